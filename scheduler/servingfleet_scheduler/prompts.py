"""Turns a request's prompt into canonical block hashes, or refuses it and names the field.

Pure. Neither tokens nor salts are kept beyond the call that needs them, and none is ever logged.
"""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass, field

from servingfleet_core import block_hashes, namespace_root
from servingfleet_protos.v1 import routing_pb2

from .errors import InvalidRequest

TOKEN_BYTES = 4
HASH_BYTES = 8
MAX_NAME_BYTES = 512
"""Adapter and cache salt."""
MAX_MEDIA_KEY_BYTES = 1024
MAX_MEDIA_ITEMS = 4096


@dataclass(slots=True)
class PreparedPrompt:
    """A checked prompt. `hashes` gives the packed canonical hashes of its full blocks."""

    model: str
    block_tokens: int
    prompt_tokens: int
    adapter: str
    cache_salt: str
    no_reuse: bool
    """The engine will reuse nothing, whatever it holds."""
    tokens: bytes | None
    """None: the caller sent hashes."""
    media: tuple[tuple[int, bytes], ...] = ()
    _hashes: dict[bool, bytes] = field(default_factory=dict)

    def hashes(self, pairs: bool = False) -> bytes:
        """Packed hashes in token or pair form; a caller's own hashes are taken for either."""
        found = self._hashes.get(pairs if self.tokens is not None else False)
        if found is None:
            assert self.tokens is not None
            root = namespace_root(self.model, self.adapter, self.cache_salt, pairs)
            found = block_hashes(root, self.tokens, self.block_tokens, self.media, pairs)
            self._hashes[pairs] = found
        return found


def prepare(
    prompt: routing_pb2.Prompt, model: str, *, block_tokens: int, max_prompt_tokens: int
) -> PreparedPrompt:
    """Raises InvalidRequest for a prompt without form or tokens, of wrong length, or that contradicts itself."""
    form = prompt.WhichOneof("form")
    if form is None:
        raise InvalidRequest("prompt", "has no tokens_le32, block_hashes or tokens; send one")
    _check_name("prompt.adapter", prompt.adapter)
    _check_name("prompt.cache_salt", prompt.cache_salt)
    if form == "block_hashes":
        return _from_hashes(prompt, model, block_tokens, max_prompt_tokens)
    if form == "tokens_le32":
        name, tokens = "prompt.tokens_le32", prompt.tokens_le32
        if len(tokens) % TOKEN_BYTES:
            raise InvalidRequest(name, f"has {len(tokens)} bytes, not a multiple of {TOKEN_BYTES}")
        count = len(tokens) // TOKEN_BYTES
        _check_count(name, count, max_prompt_tokens)
    else:
        name, count = "prompt.tokens.ids", len(prompt.tokens.ids)
        _check_count(name, count, max_prompt_tokens)
        tokens = _pack(prompt.tokens)
    if prompt.prompt_tokens not in (0, count):
        raise InvalidRequest(
            "prompt.prompt_tokens", f"is {prompt.prompt_tokens}, but {name} holds {count} tokens"
        )
    return PreparedPrompt(
        model=model,
        block_tokens=block_tokens,
        prompt_tokens=count,
        adapter=prompt.adapter,
        cache_salt=prompt.cache_salt,
        no_reuse=prompt.prompt_logprobs,
        tokens=tokens,
        media=_media(prompt, count),
    )


def _from_hashes(
    prompt: routing_pb2.Prompt, model: str, block_tokens: int, max_prompt_tokens: int
) -> PreparedPrompt:
    hashes, count = prompt.block_hashes, prompt.prompt_tokens
    if len(hashes) % HASH_BYTES:
        raise InvalidRequest(
            "prompt.block_hashes", f"has {len(hashes)} bytes, not a multiple of {HASH_BYTES}"
        )
    if not count:
        raise InvalidRequest("prompt.prompt_tokens", "is required beside block_hashes, and is 0")
    _check_count("prompt.prompt_tokens", count, max_prompt_tokens)
    covered = len(hashes) // HASH_BYTES * block_tokens
    if covered > count:
        raise InvalidRequest(
            "prompt.block_hashes",
            f"covers {covered} tokens in blocks of {block_tokens}, but prompt_tokens is {count}",
        )
    return PreparedPrompt(
        model=model,
        block_tokens=block_tokens,
        prompt_tokens=count,
        # Adapter, salt and media are in the hashes already.
        adapter="",
        cache_salt="",
        no_reuse=prompt.prompt_logprobs,
        tokens=None,
        _hashes={False: hashes},
    )


def _check_count(name: str, count: int, limit: int) -> None:
    if count == 0:
        raise InvalidRequest(name, "has no tokens")
    if count > limit:
        raise InvalidRequest(name, f"has {count} tokens; this scheduler takes at most {limit}")


def _check_name(name: str, value: str) -> None:
    size = len(value.encode())
    if size > MAX_NAME_BYTES:
        raise InvalidRequest(name, f"has {size} bytes; at most {MAX_NAME_BYTES}")


def _pack(tokens: routing_pb2.TokenList) -> bytes:
    packed = array("I", tokens.ids)
    assert packed.itemsize == TOKEN_BYTES
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _media(prompt: routing_pb2.Prompt, count: int) -> tuple[tuple[int, bytes], ...]:
    if len(prompt.media) > MAX_MEDIA_ITEMS:
        raise InvalidRequest(
            "prompt.media", f"has {len(prompt.media)} items; at most {MAX_MEDIA_ITEMS}"
        )
    items: list[tuple[int, bytes]] = []
    for index, item in enumerate(prompt.media):
        name = f"prompt.media[{index}]"
        if not 0 < len(item.key) <= MAX_MEDIA_KEY_BYTES:
            raise InvalidRequest(
                f"{name}.key", f"has {len(item.key)} bytes; expected 1 to {MAX_MEDIA_KEY_BYTES}"
            )
        if item.token_offset >= count:
            raise InvalidRequest(
                f"{name}.token_offset", f"is {item.token_offset}; the prompt has {count} tokens"
            )
        if items and item.token_offset <= items[-1][0]:
            raise InvalidRequest(
                f"{name}.token_offset",
                f"is {item.token_offset}, not after the item before it ({items[-1][0]})",
            )
        items.append((item.token_offset, item.key))
    return tuple(items)
