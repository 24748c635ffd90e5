"""Flags of a command line, read as argparse and vLLM's own parser read them. Pure.

What isn't there and what can't be known are told apart: a variable may hold any flag.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import yaml

from .commandline import UNKNOWN

_SWITCHES = ("--enable-", "--disable-", "--no-", "--trust-remote-code", "--headless")
"""Flags that take no value: what follows them is another word."""


LONGEST_YAML = 8192
DEEPEST_YAML = 64
"""Characters, and brackets: its parser takes a second for ten thousand of the former, or for a thousand of the latter."""
MOST_DIGITS = 5
"""No port, rank or block size has more; and a count of ranks becomes as many ports."""


class Unreadable(Exception):
    """A value is set, but by something that the manifest doesn't tell, or that no engine takes."""


def number(text: str) -> int | None:
    """A whole number; None for what is none, or is larger than any that matters here."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= MOST_DIGITS else None


class Flags:
    """The flags of one command. Names are with dashes, whichever way they were written."""

    def __init__(self, words: Sequence[str]) -> None:
        self._values: dict[str, list[str]] = {}
        self.positional = words[0] if words and not words[0].startswith("-") else ""
        """The word before all flags: the model, with engines that name it so."""
        self.opaque = UNKNOWN in words[:1]
        """Flags may be missing here that the engine is given: by a variable, or a configuration file."""
        for index, word in enumerate(words):
            if not word.startswith("-"):
                continue
            name, equals, value = word.partition("=")
            name = _dashed(name)
            following = words[index + 1] if index + 1 < len(words) else ""
            if not equals and name.startswith(_SWITCHES):
                self.opaque |= following == UNKNOWN
            elif not equals and not following.startswith("--"):
                value = following
            self._values.setdefault(name, []).append(value)
        for before, word in pairwise(words):
            # A variable after a word that is no flag without a value: nothing says what it holds.
            self.opaque |= word == UNKNOWN and (not before.startswith("-") or "=" in before)

    def has(self, *names: str) -> bool:
        """One of the names is given, whatever its value."""
        return any(name in self._values for name in names)

    def text(self, *names: str) -> str | None:
        """The last value given under one of the names. Raises Unreadable."""
        values = [value for name in names for value in self._values.get(name, ())]
        if not values:
            return None
        if UNKNOWN in values[-1]:
            raise Unreadable(names[0])
        return values[-1]

    def texts(self, name: str) -> list[str]:
        """Every value given under the name. Raises Unreadable."""
        values = self._values.get(name, [])
        if any(UNKNOWN in value for value in values):
            raise Unreadable(name)
        return values

    def number(self, *names: str) -> int | None:
        """Raises Unreadable, also for what is no number."""
        text = self.text(*names)
        if text is None:
            return None
        found = number(text)
        if found is None:
            raise Unreadable(names[0])
        return found

    def settings(self, name: str) -> Mapping[str, Any] | None:
        """A JSON value; or `--name.key value`, which win over it as in vLLM. Raises Unreadable."""
        dotted = [each for each in self._values if each.startswith(f"{name}.")]
        if dotted:
            return {
                each.removeprefix(f"{name}.").rstrip("+"): _plain(self.text(each) or "")
                for each in dotted
            }
        text = self.text(name)
        if text is None:
            return None
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise Unreadable(name) from error
        if not isinstance(value, dict):
            raise Unreadable(name)
        return value

    def tree(self, name: str) -> Mapping[str, Any]:
        """What every `--name key.key=YAML` sets, as TensorRT-LLM's --set. Raises Unreadable."""
        tree: dict[str, Any] = {}
        texts = self.texts(name)
        joined = "".join(texts)
        if len(joined) > LONGEST_YAML or joined.count("[") + joined.count("{") > DEEPEST_YAML:
            raise Unreadable(name)
        for text in texts:
            path, _, value = text.partition("=")
            *parents, last = path.split(".")
            node = tree
            for key in parents:
                node = node.setdefault(key, {})
                if not isinstance(node, dict):
                    raise Unreadable(name)
            try:
                node[last] = yaml.safe_load(value)
            except (yaml.YAMLError, ValueError, RecursionError) as error:
                raise Unreadable(name) from error
        return tree


def _dashed(name: str) -> str:
    # Only up to the first dot: after it come the keys of a configuration.
    head, dot, keys = name.partition(".")
    return head.replace("_", "-") + dot + keys


def _plain(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
