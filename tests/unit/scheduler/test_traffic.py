from __future__ import annotations

import math

import pytest

from servingfleet_scheduler.traffic import MEMORY_S, Traffic


def test_a_steady_stream_is_known_after_some_minutes() -> None:
    traffic = Traffic()
    for number in range(2000):
        traffic.sent(1000.0 + number * 0.5, 0.2, 0.3 if number % 2 else None)
    arrivals_per_s, busy, gap_s = traffic.read(2000.0)
    assert arrivals_per_s == pytest.approx(2.0, rel=0.02)
    assert busy == pytest.approx(0.4, rel=0.02)
    assert gap_s == pytest.approx(0.3)


def test_what_came_fades() -> None:
    traffic = Traffic()
    traffic.sent(0.0, 3.0)
    arrivals_per_s, busy, gap_s = traffic.read(MEMORY_S)
    assert arrivals_per_s == pytest.approx(math.exp(-1.0) / MEMORY_S)
    assert busy == pytest.approx(3.0 * arrivals_per_s)
    assert gap_s == 0.0
    assert Traffic().read(100.0) == (0.0, 0.0, 0.0)


def test_the_gap_is_that_of_the_latest_prompts() -> None:
    traffic = Traffic()
    traffic.sent(0.0, 3.0, 8.0)
    assert traffic.read(1000.0)[2] == pytest.approx(8.0)
    traffic.sent(MEMORY_S, 3.0, 1.0)
    faded = math.exp(-1.0)
    assert traffic.read(1000.0)[2] == pytest.approx((8.0 * faded + 1.0) / (faded + 1.0))


def test_what_is_told_late_counts_as_if_it_came_now() -> None:
    traffic = Traffic()
    traffic.sent(100.0, 1.0)
    traffic.sent(90.0, 1.0)
    assert traffic.read(100.0)[0] == pytest.approx(2.0 / MEMORY_S)
