"""What the supervisor decides without its worker."""

from __future__ import annotations

import pytest

from servingfleet_relay.supervisor import BAD_OPTIONS, Patience, option, restart_delay_s, wanted

PATIENCE = Patience(first_s=0.5, most_s=30.0, refused_s=60.0)


def test_restarts_wait_longer_each_time_and_never_longer_than_the_bound() -> None:
    delays = [restart_delay_s(1, failures, 1.0, PATIENCE) for failures in (0, 1, 2, 6, 1000)]
    assert delays == [0.5, 1.0, 2.0, 30.0, 30.0]


def test_jitter_takes_at_most_half_of_a_wait() -> None:
    assert restart_delay_s(-9, 2, 0.0, PATIENCE) == 1.0


def test_bad_options_are_tried_again_rarely_from_the_first_time() -> None:
    assert restart_delay_s(BAD_OPTIONS, 0, 1.0, PATIENCE) == 60.0


@pytest.mark.parametrize(
    ("arguments", "environment", "found"),
    [
        ([], {}, ""),
        (["--worker-memory-mib", "200"], {}, "200"),
        (["--worker-memory-mib=200"], {}, "200"),
        ([], {"SERVINGFLEET_RELAY_WORKER_MEMORY_MIB": "200"}, "200"),
        (["--worker-memory-mib", "1"], {"SERVINGFLEET_RELAY_WORKER_MEMORY_MIB": "2"}, "1"),
        (["--worker-memory-mib", "1", "--worker-memory-mib=2"], {}, "2"),
        (["--worker-memory-mib"], {}, ""),
    ],
)
def test_the_supervisor_finds_its_options_as_the_worker_does(
    arguments: list[str], environment: dict[str, str], found: str
) -> None:
    assert option("worker-memory-mib", arguments, environment) == found


@pytest.mark.parametrize(
    ("arguments", "told", "expected"),
    [
        (["--supervise"], None, True),
        ([], "true", True),
        ([], "1", True),
        ([], "false", False),
        ([], None, False),
        (["--supervise", "--help"], None, False),
    ],
)
def test_supervision_is_asked_for_by_flag_or_environment(
    arguments: list[str], told: str | None, expected: bool
) -> None:
    environment = {} if told is None else {"SERVINGFLEET_RELAY_SUPERVISE": told}
    assert wanted(arguments, environment) is expected
