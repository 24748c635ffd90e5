"""Every shared recording through check-stream: what is said of it is what is known of it."""

from __future__ import annotations

from servingfleet_sim.checking import Checker, StreamReport, check
from servingfleet_sim.recordings import read
from tests.recordings import recordings_dir

NOT_SOUND = {
    "f3-mistral-all-swa": {"C14"},
    # An extra_key that is not on the wire.
    "s1-sglang-page16": {"C19"},
    "s2-sglang-page1": {"C19"},
    "s3-sglang-eagle-bigram-page16": {"C19"},
}
"""By recording: the invariants that fail."""


def checked(name: str) -> StreamReport:
    recording = read(recordings_dir() / name)
    checker = Checker(
        recording.ranks,
        block_tokens=16,
        engine=recording.adapter,
        version=str(recording.engine.get(recording.adapter, "")),
        host_unit_tokens=recording.host_unit_tokens,
        layer_groups=recording.layer_groups,
    )
    return check(recording.messages, checker)


def test_a_recording_is_sound_or_fails_what_it_is_known_to_fail() -> None:
    names = {path.parent.name for path in recordings_dir().glob("*/events.jsonl")}
    assert names > NOT_SOUND.keys()
    for name in names:
        report = checked(name)
        failed = {each.id for each in report.invariants if each.result == "failed"}
        assert failed == NOT_SOUND.get(name, set()), (name, report.not_indexed)
        assert report.verdict == ("degraded" if failed else "sound"), (name, report.not_indexed)
        assert report.indexed or name == "f5-qwen3next-gdn", "its prompts are shorter than a block"
