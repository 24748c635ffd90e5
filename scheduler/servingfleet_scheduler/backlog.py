"""Seconds of prefill work ahead on one rank: what was sent there, held to what the engine says of itself.

Pure. Nothing is counted twice: a prompt sent before the engine's report was read is in the report, one sent after is not.
The engine computes first come, first served, and packs prompts into steps: what a step costs is paid once for all that
fit into its budget of tokens. So a first token tells that nobody who came before still waits.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .policy.estimate import unknown_request_seconds
from .policy.speeds import Speeds

READING_JITTER_S = 0.05
"""A dispatch so shortly before the reading may not have reached the engine's queue yet."""
ERROR_SHARE = 0.15
"""Standard deviation of a prompt's seconds, as a share: 10% of noise, and replicas of a pool differ by as much."""
UNKNOWN_ERROR_SHARE = 1.0
"""The same of a prompt of unknown length: lengths spread about as an exponential distribution does."""
GRACE_S = 60.0
"""A prompt whose first token nobody told is taken to have had it so long after it was due."""
MAX_ECHO_S = 5.0
"""A stream that is slower resumes or falls behind: its times say nothing of the next."""
LEFT_KEPT = 256
"""Prompts that wait no more, remembered for reports that are older: those of seconds."""
MAX_WAITING = 8192
"""Prompts remembered of one rank; beyond it the oldest are taken to have begun."""


@dataclass(frozen=True, slots=True)
class Dispatch:
    """A prompt sent to a rank. `work_s`: its own expected prefill and loads, if it were alone."""

    at: float
    work_s: float
    number: int = 0
    tokens: int = 0
    """To be computed."""
    first_token: bool = False
    began: float = math.inf
    """When its first token was told."""


@dataclass(slots=True)
class Echo:
    """How long the word of a dispatch takes to its relay and back, smoothed as TCP does (RFC 6298)."""

    smoothed_s: float = 0.0
    deviation_s: float = 0.0
    _heard: bool = False

    def heard(self, seconds: float) -> None:
        """One came back."""
        seconds = min(max(0.0, seconds), MAX_ECHO_S)
        if not self._heard:
            self._heard, self.smoothed_s, self.deviation_s = True, seconds, seconds / 2
            return
        self.deviation_s += (abs(seconds - self.smoothed_s) - self.deviation_s) / 4
        self.smoothed_s += (seconds - self.smoothed_s) / 8


@dataclass(frozen=True, slots=True)
class Load:
    """What the engine said of itself at `read_at`. None: it does not say."""

    read_at: float
    running_requests: int | None = None
    waiting_requests: int | None = None
    waiting_tokens: int | None = None
    kv_usage: float | None = None

    @property
    def idle(self) -> bool:
        """Nothing runs and nothing waits."""
        return self.running_requests == 0 and not self.waiting_requests and not self.waiting_tokens


class Ahead(NamedTuple):
    """Work that a new prompt would wait for."""

    seconds: float
    sd_s: float
    """Standard deviation of `seconds`; the wider, the older the engine's report."""
    noise_s: float
    """The same, were the report fresh: what prompts differ from their estimates."""

    def at_least(self, seconds: float) -> Ahead:
        """Where something else has to be waited for meanwhile, of which only about how long is known."""
        more = seconds - self.seconds
        if more <= 0.0:
            return self
        more *= UNKNOWN_ERROR_SHARE
        return Ahead(seconds, math.hypot(self.sd_s, more), math.hypot(self.noise_s, more))


@dataclass(slots=True)
class _Waiting:
    at: float
    work_s: float
    tokens: int
    cost_s: float = 0.0
    """Seconds that it adds to those before it."""
    ends: float = 0.0
    """When its first token is due."""


class Backlog:
    """The queue of one rank: own dispatches and those of other schedulers, by decision id."""

    def __init__(self) -> None:
        self._waiting: dict[str, _Waiting] = {}
        """In order of arrival; those that are computed now are among them until their first token is told."""
        self._start = -math.inf
        """Since when it is at work."""
        self._free = -math.inf
        """When the engine will have computed all of it."""
        self._room = 0
        """Tokens that the last step could still take."""
        self._foreign_until = -math.inf
        """When the engine will have computed what others sent, of which only its report speaks. It comes first."""
        self._foreign_mean = 0.0
        """Seconds of one of those."""
        self._foreign_error = UNKNOWN_ERROR_SHARE
        self._costs = 0.0
        self._count = 0
        self._load: Load | None = None
        self._left: deque[tuple[float, _Waiting]] = deque(maxlen=LEFT_KEPT)
        """Who waits no more, and since when: a report may be older than that."""
        self._told = -math.inf
        """When the last first token came."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, decision_id: str) -> bool:
        return decision_id in self._waiting

    def ahead(self, now: float, *, stale_s: float) -> Ahead:
        """What a prompt that comes now would wait for. A report older than `stale_s` says nothing any more."""
        load = self._load
        if load is not None and now - load.read_at > stale_s:
            self._lose_report(now)
            load = None
        seconds = self._free - now
        if seconds <= 0.0:
            return IDLE
        foreign = max(0.0, min(seconds, self._foreign_until - now))
        ours = seconds - foreign
        mean = self._costs / self._count if self._count else 0.0
        # Each prompt ahead errs by itself: there are ours / mean of them.
        variance = ERROR_SHARE**2 * ours * min(mean, ours)
        if foreign:
            variance += self._foreign_error**2 * foreign * min(self._foreign_mean, foreign)
        noise = math.sqrt(variance)
        widening = 2.0 if load is None else 1.0 + max(0.0, now - load.read_at) / stale_s
        return Ahead(seconds, noise * widening, noise)

    # What happens to prompts

    def sent(self, decision_id: str, dispatch: Dispatch, speeds: Speeds) -> None:
        """A prompt was sent there. Known ones stay as they are."""
        waiting = self._waiting
        if decision_id in waiting:
            return
        while waiting:
            oldest = next(iter(waiting))
            if len(waiting) < MAX_WAITING and waiting[oldest].ends + GRACE_S >= dispatch.at:
                break
            del waiting[oldest]
        # The last token is always computed.
        entry = _Waiting(dispatch.at, dispatch.work_s, max(1, dispatch.tokens))
        waiting[decision_id] = entry
        self._append(entry, speeds)

    def started(self, decision_id: str, speeds: Speeds, now: float) -> None:
        """Its first token has come just now: the engine goes on with those after it."""
        if decision_id in self._waiting:
            self._drop_through(decision_id, now)
            self._told = now
            foreign = max(0.0, self._foreign_until - now)
            self._rebuild(now, foreign, self._waiting.values(), speeds)

    def served(self, decision_id: str, speeds: Speeds, now: float) -> None:
        """It is over, and nobody told when its first token came."""
        if decision_id in self._waiting:
            self._drop_through(decision_id, now)
            most = _packed(self._waiting.values(), speeds)
            self._shorten(self._free - max(now, self._foreign_until) - most, -math.inf)

    def withdrawn(self, decision_id: str, now: float) -> bool:
        """It is not computed there, or not to its end. False: it is not known to wait."""
        entry = self._waiting.pop(decision_id, None)
        if entry is None:
            return False
        self._left.append((now, entry))
        self._shorten(min(entry.cost_s, entry.ends - now), entry.ends)
        return True

    # What the engine says

    def report(self, load: Load, speeds: Speeds, jitter_s: float = 0.0) -> None:
        """`jitter_s`: how far `read_at`, or the times of dispatch, may be off, beside READING_JITTER_S. A report that is not
        newer than the last says nothing."""
        if self._load is not None and load.read_at <= self._load.read_at:
            return
        self._load = load
        if load.waiting_requests is None and load.waiting_tokens is None and not load.idle:
            return
        horizon = load.read_at - READING_JITTER_S - jitter_s
        before = [key for key, each in self._waiting.items() if each.at <= horizon]
        left = [each for since, each in self._left if each.at <= horizon < since]
        # A first token that came since tells when the engine went on.
        begin = max(load.read_at, self._told)
        if load.idle:
            for key in before:
                del self._waiting[key]
            self._rebuild(begin, 0.0, self._waiting.values(), speeds)
            return
        unstarted = len(left) + len(before)
        count = unstarted if load.waiting_requests is None else load.waiting_requests
        # The last sent are those that waited then; those before them were computed, or had been.
        begun = max(0, len(before) - count)
        begin = self._keep_last(before[:begun], begin, speeds)
        waiting = [self._waiting[key] for key in before[begun:]]
        gone = sum(each.tokens for each in left[max(0, unstarted - count) :])
        foreign = self._foreign(load, count - unstarted, gone, waiting, speeds)
        after = [each for each in self._waiting.values() if each.at > horizon]
        self._rebuild(begin, foreign, [*waiting, *after], speeds)

    # Inside

    def _foreign(
        self, load: Load, others: int, gone: int, waiting: Sequence[_Waiting], speeds: Speeds
    ) -> float:
        """Seconds of what waits beside `waiting`: `others` requests, if any. `gone`: tokens that waited when the report was
        read, and wait no more."""
        if load.waiting_tokens is not None:
            tokens = max(0, load.waiting_tokens - gone)
            if load.waiting_requests is None:
                others = math.ceil(tokens / speeds.request_tokens)
            requests = max(1, len(waiting) + max(0, others))
            foreign = _hold_to(tokens, requests, waiting, speeds)
            self._foreign_mean, self._foreign_error = foreign / max(1, others), ERROR_SHARE
            return foreign
        if others <= 0:
            return 0.0
        mean = sum(each.work_s for each in waiting) / len(waiting) if waiting else 0.0
        self._foreign_mean = mean or unknown_request_seconds(speeds)
        self._foreign_error = UNKNOWN_ERROR_SHARE
        return others * self._foreign_mean

    def _keep_last(self, begun: Sequence[str], at: float, speeds: Speeds) -> float:
        """Forgets those that wait no more, but for the last, whose tokens one step can hold together: these may be computed
        still. Returns when they will have been."""
        room, cost, ends = speeds.step_tokens, 0.0, at
        for key in reversed(begun):
            if room <= 0:
                del self._waiting[key]
                continue
            each = self._waiting[key]
            room -= each.tokens
            cost += each.cost_s
            ends = max(ends, each.ends)
        return min(ends, at + cost)

    def _drop_through(self, decision_id: str, now: float) -> None:
        for key in list(self._waiting):
            self._left.append((now, self._waiting.pop(key)))
            if key == decision_id:
                return

    def _lose_report(self, now: float) -> None:
        self._load = None
        self._shorten(self._foreign_until - now, -math.inf)
        self._foreign_until = -math.inf

    def _shorten(self, seconds: float, after: float) -> None:
        """Takes out work: those due after `after` are due earlier."""
        if seconds > 0.0:
            self._free -= seconds
            for each in self._waiting.values():
                if each.ends > after:
                    each.ends -= seconds

    def _rebuild(
        self, start: float, foreign: float, waiting: Iterable[_Waiting], speeds: Speeds
    ) -> None:
        """The queue anew: an engine that begins with `waiting` at `start`, after `foreign` seconds of others' work."""
        self._start = start
        self._free = self._foreign_until = start + foreign
        self._room = 0
        self._costs, self._count = 0.0, 0
        for each in waiting:
            self._append(each, speeds)

    def _append(self, entry: _Waiting, speeds: Speeds) -> None:
        budget = speeds.step_tokens
        if entry.at >= self._free:
            self._free = self._start = entry.at
            self._room = 0
            self._costs, self._count = 0.0, 0
        last_step = speeds.step_s + speeds.token_s * (budget - self._room)
        if entry.at > self._start and self._free - entry.at <= last_step:
            self._room = 0  # it has begun without this one
        over = entry.tokens - self._room
        steps = max(0, math.ceil(over / budget))
        self._room = steps * budget - over
        entry.cost_s = _beside_steps(entry, speeds) + speeds.step_s * steps
        self._free += entry.cost_s
        entry.ends = self._free
        self._costs += entry.cost_s
        self._count += 1


def _beside_steps(entry: _Waiting, speeds: Speeds) -> float:
    alone = speeds.step_s * math.ceil(entry.tokens / speeds.step_tokens)
    return max(0.0, entry.work_s - alone)


def _packed(waiting: Iterable[_Waiting], speeds: Speeds) -> float:
    """Seconds of all of them together."""
    tokens, seconds = 0, 0.0
    for each in waiting:
        tokens += each.tokens
        seconds += _beside_steps(each, speeds)
    return seconds + speeds.step_s * math.ceil(tokens / speeds.step_tokens)


def _hold_to(tokens: int, requests: int, waiting: Sequence[_Waiting], speeds: Speeds) -> float:
    """Makes those that wait no more work than the engine says. Returns the seconds of it that they are not."""
    steps = math.ceil(tokens / speeds.step_tokens)
    said = speeds.step_s * steps + tokens * (
        speeds.token_s + speeds.attention_s * (tokens / requests / 2)
    )
    ours = _packed(waiting, speeds)
    if ours > said:
        for each in waiting:
            each.work_s *= said / ours
            each.tokens = max(1, int(each.tokens * said / ours))
    return max(0.0, said - ours)


IDLE = Ahead(0.0, 0.0, 0.0)
