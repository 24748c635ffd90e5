"""What a client asks and reports, as messages."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servingfleet_client import MediaKey, Target
from servingfleet_client.requests import Stage, counts, packed, report_request, route_request

TOKENS = [1, 2, 70_000]
PACKED = bytes.fromhex("01000000 02000000 70110100")


@pytest.mark.parametrize(
    "tokens",
    [
        TOKENS,
        tuple(TOKENS),
        iter(TOKENS),
        array("I", TOKENS),
        array("q", TOKENS),
        PACKED,
        bytearray(PACKED),
    ],
    ids=lambda tokens: type(tokens).__name__,
)
def test_every_form_of_tokens_is_the_same_on_the_wire(tokens: Any) -> None:
    assert packed(tokens) == PACKED


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_tokens_survive_packing(tokens: list[int]) -> None:
    data = packed(tokens)
    assert [int.from_bytes(data[at : at + 4], "little") for at in range(0, len(data), 4)] == tokens


@pytest.mark.parametrize("tokens", [[-1], [2**32], ["7"], [1.5], "text", b"123", 5])
def test_what_is_no_token_is_refused_and_not_repeated(tokens: Any) -> None:
    with pytest.raises(ValueError, match=r"^tokens: .*expected") as refused:
        packed(tokens)
    assert "2, 3" not in str(refused.value)


def test_a_request_says_all_that_was_said_of_it() -> None:
    request = route_request(
        "m",
        TOKENS,
        {
            "request_id": "r",
            "adapter": "a",
            "cache_salt": "s",
            "media": [MediaKey(key=b"k", token_offset=1)],
            "prompt_logprobs": True,
            "session_id": "c",
            "pin_session": True,
            "priority": -3,
            "labels": {"pool": "h100"},
            "only": [Target(replica="x")],
            "exclude": [Target(replica="y", rank=0)],
            "deadline_s": 0.0,
            "max_fallbacks": 2,
            "expected_output_tokens": 5,
        },
    )
    assert request.prompt.tokens_le32 == PACKED
    assert (request.prompt.adapter, request.prompt.cache_salt) == ("a", "s")
    assert request.prompt.media[0].key == b"k"
    assert request.prompt.prompt_logprobs
    assert (request.model, request.request_id, request.session_id) == ("m", "r", "c")
    assert (request.pin_session, request.priority) == (True, -3)
    assert dict(request.labels) == {"pool": "h100"}
    assert request.only[0].replica == "x"
    assert request.exclude[0].HasField("rank")
    assert request.HasField("deadline_s")
    assert (request.max_fallbacks, request.expected_output_tokens) == (2, 5)


def test_no_deadline_is_not_a_deadline_of_nothing() -> None:
    assert not route_request("m", TOKENS, {"deadline_s": None}).HasField("deadline_s")


@pytest.mark.parametrize("options", [{"dead_line": 1.0}, {"adapter": 5}, {"max_fallbacks": -1}])
def test_an_option_that_is_none_is_refused(options: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        route_request("m", TOKENS, options)


CHAT = {
    "prompt_tokens": 9,
    "completion_tokens": 2,
    "prompt_tokens_details": {"cached_tokens": 4},
}
RESPONSE = {"input_tokens": 9, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 4}}


def as_object(usage: dict[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(
        **{k: as_object(v) if isinstance(v, dict) else v for k, v in usage.items()}
    )


@pytest.mark.parametrize("usage", [CHAT, RESPONSE, as_object(CHAT), as_object(RESPONSE)])
def test_usage_is_read_as_mapping_and_as_object(usage: object) -> None:
    assert counts(usage) == {"prompt_tokens": 9, "cached_tokens": 4, "output_tokens": 2}


@pytest.mark.parametrize("details", [None, {}, {"cached_tokens": None}])
def test_reuse_that_the_engine_does_not_tell_is_not_zero(details: object) -> None:
    usage = CHAT | {"prompt_tokens_details": details}
    assert counts(usage)["cached_tokens"] is None
    assert counts(usage, reuse_when_absent=0)["cached_tokens"] == 0
    report = report_request("d", Stage.STAGE_FINISHED, usage=usage)
    assert report.HasField("prompt_tokens")
    assert not report.HasField("cached_tokens")


def test_a_reuse_of_nothing_is_told() -> None:
    usage = CHAT | {"prompt_tokens_details": {"cached_tokens": 0}}
    assert report_request("d", Stage.STAGE_FINISHED, usage=usage).HasField("cached_tokens")


def test_an_answer_without_usage_has_no_counts() -> None:
    report = report_request("d", Stage.STAGE_FINISHED)
    assert not any(
        report.HasField(name) for name in ("prompt_tokens", "cached_tokens", "output_tokens")
    )


@pytest.mark.parametrize("nonsense", [-1, 2**32, "7", 1.5, True, [1], object()])
def test_what_is_no_count_is_not_reported(nonsense: Any) -> None:
    usage = {
        "prompt_tokens": nonsense,
        "prompt_tokens_details": {"cached_tokens": nonsense},
        "completion_tokens": 3,
    }
    report = report_request("d", Stage.STAGE_FINISHED, usage=usage, reuse_when_absent=0)
    assert not report.HasField("prompt_tokens")
    assert not report.HasField("cached_tokens")
    assert report.output_tokens == 3
