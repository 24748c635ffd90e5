from __future__ import annotations

import base64
import hashlib
import hmac
import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servingfleet_scheduler.tokens import (
    MAX_ADDRESS_BYTES,
    MAX_ID_BYTES,
    BadToken,
    Decision,
    ForeignToken,
    Tokens,
)

DECISION = Decision("owner", "model", "replica", 3, 12.5, 2**63 + 1, 100, 48, 32, 64, 80, 44)
TOKENS = Tokens(b"0123456789abcdef")


def names(most: int) -> st.SearchStrategy[str]:
    return st.text(min_size=1, max_size=most).filter(lambda text: 0 < len(text.encode()) <= most)


@given(names(512), names(253), names(64), names(MAX_ADDRESS_BYTES) | st.just(""))
def test_an_id_says_what_was_decided_and_is_short(
    model: str, replica: str, owner: str, address: str
) -> None:
    decision = replace(DECISION, model=model, replica=replica, owner=owner, owner_address=address)
    written = TOKENS.write(decision)
    assert len(written) <= MAX_ID_BYTES
    assert TOKENS.read(written, [model]) == decision


def test_the_longest_names_still_fit() -> None:
    decision = replace(
        DECISION,
        model="m" * 512,
        replica="r" * 253,
        owner="o" * 64,
        owner_address="a" * MAX_ADDRESS_BYTES,
    )
    written = TOKENS.write(decision)
    assert len(written) <= MAX_ID_BYTES
    assert TOKENS.read(written, ["m", "m" * 512]).model == "m" * 512


def test_a_long_model_that_nobody_knows_any_more_reads_as_none() -> None:
    written = TOKENS.write(replace(DECISION, model="m" * 512, replica="r" * 253))
    assert TOKENS.read(written).model == ""


@given(st.data())
def test_an_altered_id_is_never_taken(data: st.DataObject) -> None:
    written = TOKENS.write(DECISION)
    at = data.draw(st.integers(0, len(written) - 1))
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_+/= é"
    letter = data.draw(st.sampled_from(sorted(set(letters) - {written[at]})))
    with pytest.raises((BadToken, ForeignToken)):
        TOKENS.read(written[:at] + letter + written[at + 1 :])


@given(st.text(max_size=2000))
def test_noise_is_no_id(noise: str) -> None:
    with pytest.raises((BadToken, ForeignToken)):
        TOKENS.read(noise)


def test_another_key_makes_it_foreign() -> None:
    with pytest.raises(ForeignToken):
        Tokens(b"another key of 16+").read(TOKENS.write(DECISION))


def test_another_version_is_bad() -> None:
    framed = base64.urlsafe_b64decode(TOKENS.write(DECISION) + "==")
    with pytest.raises(BadToken, match="version"):
        TOKENS.read(base64.urlsafe_b64encode(b"\x01" + framed[1:]).decode().rstrip("="))


def test_a_short_key_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 16"):
        Tokens(b"short")


def signed(payload: bytes) -> str:
    """An id of that content, as any release signs it."""
    tag = hmac.new(b"0123456789abcdef", payload, hashlib.sha256).digest()[:16]
    return base64.urlsafe_b64encode(b"\x02" + tag + payload).decode().rstrip("=")


def test_an_id_of_the_release_before_counted_on_what_it_predicted() -> None:
    payload = base64.urlsafe_b64decode(TOKENS.write(DECISION) + "==")[17:]
    assert signed(payload) == TOKENS.write(DECISION)
    before = TOKENS.read(signed(payload[:-4]))
    assert before == replace(DECISION, expected=DECISION.predicted)


def test_the_release_before_reads_an_id_of_this_one() -> None:
    payload = base64.urlsafe_b64decode(TOKENS.write(DECISION) + "==")[17:]
    # It reads a fixed part, a kind and four names, and does not look further.
    offset, names = 40 + 1, []
    for _ in range(4):
        (size,) = struct.unpack_from("<H", payload, offset)
        names.append(payload[offset + 2 : offset + 2 + size])
        offset += 2 + size
    assert names == [b"owner", b"", b"replica", b"model"]
    assert payload[offset:] == struct.pack("<I", DECISION.expected)
