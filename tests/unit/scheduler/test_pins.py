"""Where sessions went last."""

from __future__ import annotations

from servingfleet_scheduler.pins import Pin, Pins

KEY = b"a key of the fleet's"


def pins(most: int = 10, key: bytes = KEY) -> Pins:
    return Pins(key, most=most, ttl_s=60.0)


def test_a_session_is_where_it_went_last() -> None:
    known = pins()
    session = known.session("m", "s")
    known.note(session, "r1", 0, 1.0)
    known.note(session, "r2", 3, 2.0)
    assert known.get(session, 2.0) == Pin("r2", 3, 2.0)


def test_schedulers_of_a_fleet_name_it_alike_and_others_do_not() -> None:
    assert pins().session("m", "s") == pins().session("m", "s")
    assert pins().session("m", "s") != pins(key=b"a key of another fleet").session("m", "s")


def test_names_that_run_together_are_different_sessions() -> None:
    assert pins().session("ab", "c") != pins().session("a", "bc")
    assert pins().session("1:a", "b") != pins().session("1", ":ab")


def test_no_session_is_never_remembered() -> None:
    known = pins()
    assert known.session("m", "") == 0
    known.note(0, "r1", 0, 1.0)
    assert len(known) == 0


def test_one_that_is_silent_for_long_is_forgotten() -> None:
    known = pins()
    known.note(1, "r1", 0, 0.0)
    known.note(2, "r1", 0, 30.0)
    known.note(1, "r1", 0, 50.0)
    assert known.get(2, 90.0) is not None
    assert known.get(2, 91.0) is None
    known.expire(91.0)
    assert len(known) == 1
    known.expire(200.0)
    assert len(known) == 0


def test_the_least_recently_used_are_forgotten_first() -> None:
    known = pins(most=2)
    for session in (1, 2, 1, 3):
        known.note(session, "r1", 0, 0.0)
    assert [known.get(session, 0.0) is not None for session in (1, 2, 3)] == [True, False, True]
