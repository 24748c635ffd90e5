"""The frames of an engine's event sockets: which sequence number, which payload.

Pure. vLLM and SGLang frame alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

END_OF_REPLAY = 2**64 - 1
"""Sequence number of the last reply to a replay request: -1 as a signed number."""


class BadFrames(ValueError):
    """A message that is no event message. `reason` is a bounded word for counters."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Frame:
    """One numbered message."""

    seq: int
    payload: bytes


def live_frame(frames: Sequence[bytes]) -> Frame:
    """Reads what a subscriber received: topic, sequence number, payload. Raises BadFrames."""
    if len(frames) != 3:
        raise BadFrames("frame_count", f"{len(frames)} frames; expected topic, sequence, payload")
    seq = _sequence(frames[1])
    if seq >= 2**63:
        raise BadFrames("frame_sequence", f"sequence number {seq}; expected one below 2^63")
    return Frame(seq, frames[2])


def reply_frame(frames: Sequence[bytes]) -> Frame:
    """Reads one reply to a replay request. Raises BadFrames.

    Releases before vLLM 0.26 and SGLang 0.5.22 send no topic: read from the end.
    """
    if len(frames) not in (3, 4):
        raise BadFrames(
            "frame_count", f"{len(frames)} frames in a replay; expected 3, or 4 with topic"
        )
    seq = _sequence(frames[-2])
    if 2**63 <= seq < END_OF_REPLAY:
        raise BadFrames("frame_sequence", f"replayed sequence number {seq}; expected below 2^63")
    return Frame(seq, frames[-1])


def replay_request(start: int) -> list[bytes]:
    """The frames that ask for everything from `start` on, as a DEALER sends them."""
    return [b"", start.to_bytes(8, "big")]


def _sequence(frame: bytes) -> int:
    if len(frame) != 8:
        raise BadFrames("frame_sequence", f"sequence frame of {len(frame)} bytes; expected 8")
    return int.from_bytes(frame, "big")
