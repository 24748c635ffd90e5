"""What a container will run, as far as its manifest tells: words, with marks where they can't be known. Pure.

Reads `$(NAME)` as the kubelet does, and of scripts given to a shell what is written plainly. What comes from a
ConfigMap, a script's own variables, command substitution or the image is UNKNOWN: never guessed.

Whoever may create a pod writes what is read here, and the operator reads it for everybody: what would take long, or grow
without end, is not read.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

UNKNOWN = "\0"
"""Stands in a word for text that can't be known; a word that is only this may be any number of words."""

POD_IP = "\1"
"""Stands for the pod's address. Like UNKNOWN no character that a command line can hold."""

Words = tuple[str, ...]

LONGEST = 32_768
"""Characters of a command line, or of references between variables. An engine's has some thousand."""
LONGEST_PUT_IN = 4096
"""Characters put into one text in place of its variables: these can name each other, and double each time."""
MOST_WORDS = 8192

_SHELLS = frozenset({"sh", "bash", "dash", "ash", "ksh", "zsh"})
_REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_][-\w.]*)\)")
_VARIABLE = re.compile(r"\$(?:\{([^{}]*)\}|([A-Za-z_]\w*|[@*#?0-9]))")
_ASSIGNED = re.compile(r"(?:^|[\s;&|(])([A-Za-z_]\w*)\+?=")
_CONTROL = frozenset("();<>|&\n")


def commands(container: Mapping[str, Any]) -> tuple[Words, ...]:
    """Every command that the container's command line names, as words: one, or those of a script.

    () where it is left to the image or can't be taken apart.
    """
    written = (*(container.get("command") or ()), *(container.get("args") or ()))
    if sum(map(len, written)) > LONGEST:
        return ()
    environment = _environment(container)
    words = [_expanded(word, environment, bool(container.get("envFrom"))) for word in written]
    for index, word in enumerate(words):
        if program(word) in _SHELLS:
            script = _script_of(words[index + 1 :])
            if script is None:
                return ()
            text, parameters = script
            return _simple_commands(text, environment, parameters)
    return (tuple(words),) if words else ()


def literals(container: Mapping[str, Any]) -> dict[str, str]:
    """The container's environment, as far as the manifest tells: values may contain UNKNOWN."""
    return _environment(container)


def program(word: str) -> str:
    """/usr/bin/vllm is vllm."""
    return PurePosixPath(word).name


def _environment(container: Mapping[str, Any]) -> dict[str, str]:
    environment: dict[str, str] = {}
    inherited = bool(container.get("envFrom"))
    room = LONGEST
    for variable in container.get("env") or ():
        source = variable.get("valueFrom")
        if source is None:
            text = variable.get("value") or ""
            room -= len(text) if "$" in text else 0
            value = _expanded(text, environment, inherited) if room >= 0 else UNKNOWN
        elif (source.get("fieldRef") or {}).get("fieldPath") == "status.podIP":
            value = POD_IP
        else:
            value = UNKNOWN
        environment[variable.get("name", "")] = value
    return environment


def _expanded(text: str, environment: Mapping[str, str], inherited: bool) -> str:
    """As the kubelet expands it: $(NAME) of a variable that isn't set stays as it is written."""

    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name is None:
            return "$"
        return environment.get(name, UNKNOWN if inherited else match[0])

    return _replaced(_REFERENCE, value, text)


def _replaced(pattern: re.Pattern[str], value: Callable[[re.Match[str]], str], text: str) -> str:
    room = LONGEST_PUT_IN

    def bounded(match: re.Match[str]) -> str:
        nonlocal room
        found = value(match)
        room -= len(found)
        return found if room >= 0 else UNKNOWN

    return pattern.sub(bounded, text)


def _script_of(words: Sequence[str]) -> tuple[str, Sequence[str]] | None:
    """The text after -c, and the parameters after it. None: a script in a file."""
    index = 0
    while index < len(words) and words[index].startswith(("-", "+")):
        option = words[index]
        if not option.startswith("--") and "c" in option and index + 1 < len(words):
            rest = list(words[index + 1 :])
            # `bash -c -e SCRIPT`: options may follow.
            while len(rest) > 1 and rest[0].startswith("-"):
                rest.pop(0)
            return rest[0], rest[2:]
        index += 2 if option.endswith("o") and not option.startswith("--") else 1
    return None


def _simple_commands(
    script: str, environment: Mapping[str, str], parameters: Sequence[str]
) -> tuple[Words, ...]:
    text = re.sub(r"(?m)^[ \t]*#.*$", "", script.replace("\\\n", " "))
    assigned = set(_ASSIGNED.findall(text))
    known = {name: value for name, value in environment.items() if name not in assigned}
    lexer = shlex.shlex(_without_substitutions(text), posix=True, punctuation_chars="();<>|&\n")
    lexer.whitespace = " \t\r"
    lexer.whitespace_split = True
    lexer.commenters = ""
    try:
        tokens = list(lexer)
    except ValueError:
        return ()
    found: list[Words] = []
    words: list[str] = []
    for token in tokens:
        if token and set(token) <= _CONTROL:
            found.append(tuple(words))
            words = []
        else:
            words += _substituted(token, known, parameters)
            if len(words) > MOST_WORDS:
                return ()
    found.append(tuple(words))
    return tuple(each for each in found if each)


def _without_substitutions(text: str) -> str:
    """Command substitutions and arithmetic replaced by UNKNOWN, since their parentheses would end a command."""
    pieces = []
    depth = 0
    index = 0
    while index < len(text):
        if depth == 0 and text.startswith("$(", index):
            pieces.append(UNKNOWN)
            depth, index = 1, index + 2
        elif depth:
            depth += {"(": 1, ")": -1}.get(text[index], 0)
            index += 1
        else:
            pieces.append(text[index])
            index += 1
    return re.sub(r"`[^`]*`", UNKNOWN, "".join(pieces))


def _substituted(token: str, known: Mapping[str, str], parameters: Sequence[str]) -> Sequence[str]:
    if token in ("$@", "$*", "${@}", "${*}"):
        return parameters

    def value(match: re.Match[str]) -> str:
        name = match[1] if match[1] is not None else match[2]
        if name.isdecimal() and 0 < int(name) <= len(parameters):
            return parameters[int(name) - 1]
        return known.get(name, UNKNOWN)

    text = _replaced(_VARIABLE, value, token)
    if _VARIABLE.fullmatch(token) and not text.startswith("{"):
        # A variable that is a whole word: unquoted, as lists of flags are, it is split at blanks.
        return text.split()
    return (text,)
