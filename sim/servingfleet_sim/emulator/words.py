"""A tokenizer without a vocabulary: words are tokens, 't123' is token 123, any other word the one its hash says."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any


class BadMessage(ValueError):
    """A chat message without text."""


def encode(text: str, vocabulary: int) -> tuple[int, ...]:
    """The tokens of a text. A word's token is below `vocabulary` and the same on every machine."""
    return tuple(_token(word, vocabulary) for word in text.split())


def decode(tokens: Iterable[int]) -> str:
    """A text with these tokens."""
    return " ".join(f"t{token}" for token in tokens)


def chat(messages: Sequence[Any]) -> str:
    """The prompt of a chat: the contents, one after another. Raises BadMessage."""
    return " ".join(_content(place, message) for place, message in enumerate(messages))


def _token(word: str, vocabulary: int) -> int:
    if word[0] == "t" and word[1:].isascii() and word[1:].isdigit():
        named = int(word[1:])
        if named < vocabulary:
            return named
    digest = hashlib.blake2b(word.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % vocabulary


def _content(place: int, message: Any) -> str:
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        if all(isinstance(part, str) for part in parts):
            return " ".join(map(str, parts))
    raise BadMessage(
        f"messages[{place}]: expected an object whose content is a text, or a list of text parts"
    )
