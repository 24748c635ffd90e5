"""The emulator's formats, words, requests and speeds."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servingfleet_relay.adapters import vllm
from servingfleet_sim.emulator import words
from servingfleet_sim.emulator.api import BadRequest, Reader, UnknownModel
from servingfleet_sim.emulator.events import (
    CPU,
    Cleared,
    Event,
    HashForm,
    Removed,
    Stored,
    encode,
    generation,
)
from servingfleet_sim.emulator.sequence import Asked, Sequence
from servingfleet_sim.emulator.settings import Settings
from servingfleet_sim.emulator.speed import GPUS, Speed
from servingfleet_sim.emulator.steps import Work

A, B = bytes(range(32)), bytes(range(32, 64))
EVENTS: list[Event] = [
    Stored(
        (A, B),
        None,
        (1, 2, 3, 4),
        2,
        extra_keys=(("lora", "salt"), ("lora",)),
        adapter="lora",
        adapter_number=1,
    ),
    Removed((A,)),
    Stored((B,), None, (), 0, CPU, described=False),
    Cleared(),
]
VERSIONS = ["0.9.1", "0.10.2", "0.14.0", "0.17", "0.20.0", "0.22.1", "0.24.0", "0.33.0"]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("hash_form", HashForm)
def test_the_relay_reads_every_generation(version: str, hash_form: HashForm) -> None:
    payload = encode(EVENTS, 1.5, 3, generation(version, hash_form))
    batch = vllm.decode((b"topic", bytes(8), payload))
    assert batch.rank == 3
    kinds = [type(event).__name__ for event in batch.events]
    assert kinds == ["Stored", "Removed", "Stored", "Cleared"]


def test_a_version_that_is_no_release_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'main', expected a release such as '0\.33\.0'"):
        generation("main")
    with pytest.raises(ValueError, match=r"0\.8\.5, expected 0\.9\.1 or later"):
        generation("0.8.5")


@given(st.lists(st.integers(0, 999)))
def test_tokens_survive_the_way_through_text(tokens: list[int]) -> None:
    assert words.encode(words.decode(tokens), 1000) == tuple(tokens)


@given(st.text())
def test_every_word_has_a_token_of_the_vocabulary(text: str) -> None:
    tokens = words.encode(text, 1000)
    assert len(tokens) == len(text.split())
    assert all(0 <= token < 1000 for token in tokens)


def test_a_chat_is_its_contents_one_after_another() -> None:
    parts = [{"type": "text", "text": "t2"}, {"type": "text", "text": "t3"}]
    messages = [{"role": "system", "content": "t1"}, {"role": "user", "content": parts}]
    assert words.encode(words.chat(messages), 10) == (1, 2, 3)


READER = Reader(Settings(model="m", adapters={"a": 1}, ranks=2, vocabulary=100))


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("t1 t2", [(1, 2)]),
        ([1, 2], [(1, 2)]),
        (["t1", "t2"], [(1,), (2,)]),
        ([[1], [2, 3]], [(1,), (2, 3)]),
    ],
)
def test_a_prompt_is_text_or_tokens_or_several(prompt: Any, prompts: list[Any]) -> None:
    call = READER.completion({"prompt": prompt})
    assert [asked.prompt for asked in call.prompts] == prompts


def test_an_adapter_is_asked_for_as_a_model() -> None:
    (asked,) = READER.completion({"model": "a", "prompt": [1]}).prompts
    assert (asked.adapter, asked.adapter_number) == ("a", 1)
    with pytest.raises(UnknownModel, match="'b' is not served here; known: m, a"):
        READER.completion({"model": "b", "prompt": [1]})


@pytest.mark.parametrize(
    "body",
    [
        [],
        {},
        {"prompt": []},
        {"prompt": [100]},
        {"prompt": [-1]},
        {"prompt": [True]},
        {"prompt": [1], "max_tokens": 0},
        {"prompt": [1], "max_tokens": "5"},
        {"prompt": [1], "n": 2},
        {"prompt": [1], "cache_salt": 7},
        {"prompt": [1], "stream_options": 1},
    ],
)
def test_a_request_that_makes_no_sense_is_refused(body: Any) -> None:
    with pytest.raises(BadRequest):
        READER.completion(body)


def test_a_rank_beyond_the_last_is_refused() -> None:
    assert READER.rank(None) is None
    assert READER.rank("1") == 1
    with pytest.raises(BadRequest, match="'2': this engine has ranks 0 to 1"):
        READER.rank("2")


def work(tokens: int, context: int, prompt: int) -> Work:
    return Work(Sequence(0, Asked((1,) * prompt)), tokens, context)


def test_a_step_takes_what_the_formula_says() -> None:
    speed = Speed(step_s=1, weights_s=10, token_s=2, pair_s=0.5, context_token_s=0.25)
    assert speed.step([]) == 0
    assert speed.step([work(20, 8, 28)]) == 1 + 2 * 20 + 0.5 * 20 * (8 + 10)
    # Two decodes: below the time to read the weights, and their own contexts on top.
    assert speed.step([work(1, 4, 4), work(1, 6, 5)]) == 1 + 10 + 0.25 * 10


def test_chunks_of_a_prompt_cost_one_step_more_each_and_no_more() -> None:
    speed = GPUS["h100"]
    whole = speed.step([work(8000, 0, 8000)])
    halves = speed.step([work(4000, 0, 8000)]) + speed.step([work(4000, 4000, 8000)])
    assert halves == pytest.approx(whole + speed.step_s)


def test_twice_the_speed_takes_half_the_time() -> None:
    speed = GPUS["a100"]
    load = [work(3000, 500, 4000), work(1, 700, 600)]
    assert speed.scaled(2).step(load) == pytest.approx(speed.step(load) / 2)
