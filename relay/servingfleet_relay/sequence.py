"""The numbering of one rank's batches: gaps, duplicates, replays, restarts.

Pure: batches and the state of the socket in, steps in order out. What the payloads mean is none of its business.
The number alone proves nothing: a new engine process counts from 0 again and may overtake. So the relay asks the
engine to replay the last batch that it applied: the same bytes prove that the same process goes on.
"""

from __future__ import annotations

from dataclasses import dataclass

from servingfleet_protos.v1.common_pb2 import (
    STREAM_STATE_HISTORY_LOST,
    STREAM_STATE_LIVE,
    STREAM_STATE_RESYNCING,
    STREAM_STATE_UNPROVEN,
)

from .batches import Apply, Digests, Held, Ignored, Lost, Restarted, Step
from .frames import END_OF_REPLAY

REPLAYS_PER_HOLE = 3
"""Older engines drop replies silently, and any drops what a throttled relay does not read: ask again, but not for ever
without getting on."""
START_SLACK_S = 2.0
"""A process that started this much after its first batch was applied is another one: clocks and scrapes are coarse."""


@dataclass(slots=True)
class _Replay:
    start: int
    inclusive: bool
    """`start` was applied already: its bytes are compared."""
    progress: float
    probe: bool = False
    """Nothing is amiss: asked only in case the last batches before a silence were lost."""
    broken_off: str = ""
    """Why the replay before, whose rest this one asks for, did not end. "": there was none."""
    taken: bool = False
    seen: bool = False
    advanced: bool = False
    """It brought a batch that was still missing."""


class Sequence:
    """The state machine of one rank."""

    def __init__(
        self,
        *,
        replay: bool,
        deadline_s: float,
        probe_s: float,
        max_held_batches: int,
        max_held_bytes: int,
    ) -> None:
        """`replay`: the engine has a replay socket. `deadline_s`: longest silence in a replay. `probe_s`: silence of
        the engine after which its last batches are asked for.

        The bounds are for batches that arrive while a replay is under way.
        """
        self.incarnation = 1
        self.replays = 0
        self.gaps = 0
        self._can_replay = replay
        self._deadline_s = deadline_s
        self._probe_s = probe_s
        self._heard = 0.0
        self._connected = False
        self._next: int | None = None
        self._digests = Digests(max_held_batches)
        self._since: float | None = None
        self._replay: _Replay | None = None
        self._attempts = 0
        self._held = Held(max_held_batches, max_held_bytes)
        self._unproven = "waiting for the engine's event socket"
        self._broken_proof = False
        self._newer = ""
        """Why it is another process, until a replay proves that it is not."""
        self._incomplete = "what the engine held before the relay joined is unknown"

    @property
    def applied(self) -> int | None:
        """Number of the last batch applied. None: none in this life of the engine."""
        return self._next - 1 if self._next else None

    @property
    def state(self) -> tuple[int, str]:
        """StreamState and the reason for it, "" if live."""
        if self._unproven:
            return STREAM_STATE_UNPROVEN, self._unproven
        if self._replay is not None and not self._replay.probe:
            return STREAM_STATE_RESYNCING, f"replay from {self._replay.start} under way"
        if self._incomplete:
            return STREAM_STATE_HISTORY_LOST, self._incomplete
        return STREAM_STATE_LIVE, ""

    @property
    def probing(self) -> bool:
        """The replay under way was asked for after a silence only."""
        return self._replay is not None and self._replay.probe

    @property
    def whole(self) -> bool:
        """All that this engine process published up to the last batch applied is known."""
        return not self._incomplete

    def take_request(self) -> int | None:
        """Where the replay that is wanted now starts; each is handed out once and replaces the one before."""
        if self._replay is None or self._replay.taken:
            return None
        self._replay.taken = True
        return self._replay.start

    def socket_up(self, now: float) -> list[Step]:
        """The event socket is connected (again)."""
        if self._connected:
            return []
        self._connected = True
        self._heard = now
        if self.applied is None:
            self._unproven = ""
            if self._can_replay:
                self._ask(now)
            return []
        return self._suspect("reconnected; that it is the same engine process is not proven", now)

    def socket_down(self) -> None:
        """The event socket is lost: what is held for later may be of a dead engine."""
        self._connected = False
        self._replay = None
        self._attempts = 0
        self._held.clear()
        self._unproven = "the engine's event socket is down"

    def process_started(self, started: float, now: float) -> list[Step]:
        """The engine says when its process started, in the clock of `now`."""
        if self._since is None or started <= self._since + START_SLACK_S:
            return []
        reason = "the engine's process is newer than its events"
        if not self._can_replay:
            return self._restart(reason)
        # It is said once only: if no replay decides, now or after a reconnect, this does.
        self._newer = reason
        return [] if self._replay is not None else self._suspect(reason, now)

    def rebuild(self, reason: str, now: float) -> list[Step]:
        """What was read does not add up: all is forgotten and, where it can be, read again from the start."""
        self._incomplete = f"read again: {reason}"
        if not self._can_replay or self._next is None:
            return [Lost(reason)]
        self._next = None
        self._digests.clear()
        self._attempts = 0
        self._held.clear()
        self._ask(now)
        return [Lost(reason)]

    def cleared(self) -> None:
        """The engine holds nothing: the history before is of no account any more."""
        self._incomplete = ""

    def live(self, seq: int, payload: bytes, now: float) -> list[Step]:
        """A batch from the subscription."""
        if not self._connected:
            # Still in the queue of a socket that is gone: the replay after the reconnect covers it.
            return [Ignored("socket_down")]
        self._heard = now
        steps = self._offer(Apply(seq, payload), now)
        if self._replay is None:
            self._attempts = 0
        return steps

    def _offer(self, batch: Apply, now: float) -> list[Step]:
        if self._replay is None:
            return self._accept(batch, now)
        last = self._held.last
        if last is not None and batch.seq <= last.seq:
            if batch.payload == last.payload:
                return [Ignored("duplicate_batch")]
            # The numbers fall back while a replay is under way: of what is held only this is of the new life.
            self._held.clear()
            self._held.add(batch)
            reason = f"the numbers fell back from {last.seq} to {batch.seq}"
            if self._attempts < REPLAYS_PER_HOLE:
                return self._suspect(reason, now)
            return [*self._restart(reason), *self._finish(now)]
        self._held.add(batch)
        if self._held.full:
            return self._give_up(self._replay, f"{len(self._held)} batches arrived meanwhile", now)
        return []

    def replayed(self, seq: int, payload: bytes, now: float) -> list[Step]:
        """A reply to the request that was taken last, the end marker included."""
        replay = self._replay
        if replay is None or not replay.taken:
            return [Ignored("stray_reply")]
        replay.progress = now
        if seq == END_OF_REPLAY:
            return self._end_of_replay(replay, now)
        if replay.inclusive and not replay.seen:
            return self._first_inclusive(replay, Apply(seq, payload), now)
        replay.seen = True
        if self._next is None:
            replay.advanced = True
            return self._begin(Apply(seq, payload), now, f"the replay begins at {seq}")
        if seq < self._next:
            return [Ignored("duplicate_batch")]
        if seq == self._next:
            replay.advanced = True
            self._attempts = 1  # whatever is missing next is another hole
            return self._apply(Apply(seq, payload), now)
        if self._attempts < REPLAYS_PER_HOLE:
            self._ask(now)
            return []
        return self._jump(Apply(seq, payload), now)

    def replay_failed(self, reason: str, now: float) -> list[Step]:
        """The replay that is under way will not end: its rest is asked for, if it brought anything."""
        replay = self._replay
        if replay is None:
            return []
        if replay.advanced:
            self._ask(now, broken_off=f"the replay from {replay.start} broke off: {reason}")
            return []
        return self._give_up(replay, reason, now)

    def _give_up(self, replay: _Replay, reason: str, now: float) -> list[Step]:
        """No replay will end: goes on with what there is."""
        if replay.probe and not replay.seen and not self._newer:
            self._attempts = 0
            return self._finish(now)
        if self._newer and not replay.seen:
            return [*self._restart(f"{self._newer}; no replay: {reason}"), *self._finish(now)]
        if (replay.seen or replay.broken_off) and not self._unproven:
            # It may have gone on: only an unbroken next batch tells.
            broke_off = f"the replay from {replay.start} broke off: {reason}"
            self._unproven = replay.broken_off or broke_off
            self._broken_proof = True
        elif self._next is None:
            self._incomplete = f"no replay of what came before: {reason}"
        self._attempts = REPLAYS_PER_HOLE
        return self._finish(now)

    def tick(self, now: float) -> list[Step]:
        """Time passes."""
        if self._replay is not None:
            if now - self._replay.progress > self._deadline_s:
                return self.replay_failed(f"silent for {self._deadline_s:g} s", now)
        elif (
            self._can_replay
            and self._connected
            and not self._unproven
            and now - self._heard >= self._probe_s
        ):
            # Only a later batch shows that one was lost, and a silent engine sends none.
            self._heard = now
            self._ask(now, probe=True)
        return []

    def _accept(self, batch: Apply, now: float) -> list[Step]:
        if self._next is None:
            lost = "" if batch.seq == 0 else self._incomplete or f"joined at {batch.seq}"
            return self._begin(batch, now, lost)
        if batch.seq == self._next:
            if self._unproven:
                if not self._broken_proof:
                    self._incomplete = self._incomplete or f"reconnected at {batch.seq}, no replay"
                self._prove()
            return self._apply(batch, now)
        if batch.seq > self._next:
            if not self._can_replay or self._attempts >= REPLAYS_PER_HOLE:
                return self._jump(batch, now)
            self.gaps += 1
            self._ask(now)
            self._held.add(batch)
            return []
        if self._digests.match(batch):
            return [Ignored("duplicate_batch")]
        reason = f"the numbers fell back from {self._next - 1} to {batch.seq}"
        if self._can_replay and self._attempts < REPLAYS_PER_HOLE:
            steps = self._suspect(reason, now)
            self._held.add(batch)
            return steps
        return [*self._restart(reason), *self._accept(batch, now)]

    def _end_of_replay(self, replay: _Replay, now: float) -> list[Step]:
        if replay.inclusive and not replay.seen:
            # The process that published `start` would still have it, or later ones.
            steps = self._restart(f"the engine knows no batch {replay.start}")
            self._attempts = 0
            self._ask(now)
            return steps
        if self._next is None:
            # Asked from 0 it has nothing: it has published nothing yet.
            self._next, self._incomplete = 0, ""
            self._prove()
        return self._finish(now, proven=replay.inclusive)

    def _first_inclusive(self, replay: _Replay, batch: Apply, now: float) -> list[Step]:
        if batch.seq < replay.start:
            return [Ignored("stray_reply")]
        if batch.seq > replay.start:
            # The ring has rolled, or another process has overtaken: nobody can tell.
            replay.seen = True
            self._newer = ""
            self._prove()
            return self._jump(
                batch, now, f"the engine's replay begins at {batch.seq}, after {replay.start}"
            )
        if not self._digests.match(batch):
            steps = self._restart(f"batch {batch.seq} is not what it was")
            self._attempts = 0
            self._ask(now)
            return steps
        replay.seen = True
        self._newer = ""
        self._prove()
        return []

    def _finish(self, now: float, *, proven: bool = False) -> list[Step]:
        """No replay is under way any more: takes up what was held meanwhile."""
        self._replay = None
        held = self._held.take()
        steps: list[Step] = []
        for batch in held:
            if proven and self._next is not None and batch.seq < self._next:
                steps.append(Ignored("duplicate_batch"))
            else:
                steps += self._offer(batch, now)
        if self._replay is None and (held or proven):
            self._attempts = 0
        return steps

    def _begin(self, batch: Apply, now: float, lost: str) -> list[Step]:
        """The first batch of what is known."""
        self._incomplete = "" if batch.seq == 0 else lost
        self._prove()
        return self._apply(batch, now)

    def _apply(self, batch: Apply, now: float) -> list[Step]:
        self._since = now if self._since is None else self._since
        self._next = batch.seq + 1
        self._digests.add(batch)
        return [batch]

    def _jump(self, batch: Apply, now: float, reason: str = "") -> list[Step]:
        """Goes on after a hole that nothing closes."""
        if not self._can_replay:
            self.gaps += 1
        reason = reason or f"batches {self._next} to {batch.seq - 1} are lost"
        self._incomplete = reason
        self._prove()
        return [Lost(reason), *self._apply(batch, now)]

    def _restart(self, reason: str) -> list[Step]:
        self.incarnation += 1
        self._next = None
        self._since = None
        self._digests.clear()
        self._replay = None
        self._newer = ""
        self._incomplete = "what the new engine process held before is unknown"
        self._prove()
        return [Restarted(reason)]

    def _suspect(self, reason: str, now: float) -> list[Step]:
        """It may be another process."""
        self._unproven, self._broken_proof = reason, False
        if self._can_replay:
            self._ask(now)
        return []

    def _ask(self, now: float, *, probe: bool = False, broken_off: str = "") -> None:
        """Wants a replay from the last batch applied, or from the start."""
        self._attempts += 1
        self.replays += 1
        applied = self.applied
        self._replay = _Replay(applied or 0, applied is not None, now, probe, broken_off)

    def _prove(self) -> None:
        if self._connected:
            self._unproven, self._broken_proof = "", False
