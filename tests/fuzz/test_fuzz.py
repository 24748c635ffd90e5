"""Every target, on what is kept of it and, where the fuzzer is installed, on what it makes of that in some seconds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.fuzz import corpus
from tests.fuzz.child import reproducer
from tests.fuzz.running import Outcome, available, fuzz, smallest
from tests.fuzz.seeds import seeds
from tests.fuzz.targets import TARGETS

SECONDS = int(os.environ.get("SERVINGFLEET_FUZZ_SECONDS", "2"))
"""For each target."""


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_kept_of_a_target_breaks_nothing(name: str) -> None:
    for data in [b"", *seeds(name), *corpus.kept(name)]:
        try:
            TARGETS[name].run(data)
        except BaseException as error:
            error.add_note(reproducer(name, data))
            raise


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Outcome]]]:
    """The targets that were asked for, as many at once as there are cores."""
    if not available():
        assert not os.environ.get("CI"), "no atheris here: install the extra dev"
        pytest.skip("no atheris on this machine: only the corpus was replayed")
    asked = [
        str(item.callspec.params["name"])
        for item in request.session.items
        if isinstance(item, pytest.Function) and "runs" in item.fixturenames
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {
            name: pool.submit(fuzz, name, tmp_path_factory.mktemp(name), seconds=SECONDS)
            for name in asked
        }


@pytest.mark.parametrize("name", TARGETS)
def test_what_a_fuzzer_finds_in_a_short_time_breaks_nothing(
    name: str, runs: dict[str, Future[Outcome]]
) -> None:
    outcome = runs[name].result()
    assert not outcome.failed, outcome.output
    assert "stat::number_of_executed_units" in outcome.output


def test_a_corpus_is_small_and_of_a_target() -> None:
    files = list(corpus.FOLDER.glob("*"))
    assert {path.stem for path in files} <= set(TARGETS)
    for path in files:
        assert path.suffix == ".txt"
        assert path.stat().st_size <= corpus.MAX_FILE, path
        assert all(len(line) <= corpus.MAX_LINE for line in path.read_text().splitlines()), path


def test_only_inputs_that_reach_more_are_worth_keeping() -> None:
    known = seeds("vllm_payload")
    assert smallest("vllm_payload", known) == []
