"""Turns a request away early when no target is expected to answer it in time.

Pure: time is an argument, and what is remembered is small and bounded. Only what is known may speak against a request:
where the index is not sure what a target holds, the most that it could reuse is assumed, and neither an engine that may
be gone, nor metrics that are old, nor a speed that nobody has measured yet makes a rejection likelier.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .errors import DeadlineUnreachable, NotAdmitted, QueueFull, TargetUnreachable
from .learning import LEAST_SHARE
from .policy.candidate import PARTS, Candidate, Estimate
from .policy.estimate import prefill_seconds
from .settings import AdmissionSettings

RETRY_LEAST_S = 1.0
"""Retry-After has whole seconds."""
RETRY_MOST_S = 30.0
"""Further ahead no queue can be known."""
RETRY_JITTER = 0.2
"""Share by which retry delays differ, so that refused clients don't come back at once."""
MAX_GATES = 4096
"""Models times classes told apart; further models are one."""
OTHER = "(other)"
NO_CLASS = ""
"""Of requests to which no target applies: only their own deadline does."""

_UNCERTAIN = PARTS.index("uncertain")


class Earliest(NamedTuple):
    """When a target can answer, as far as is known."""

    seconds: float
    sd_s: float


def earliest(estimate: Estimate) -> Earliest:
    """Seconds to first token that can't be held against the target for lack of our own data."""
    candidate = estimate.candidate
    speeds = candidate.speeds
    if candidate.certain:
        work_s = estimate.work_s - estimate.parts[_UNCERTAIN]
    else:
        upper = candidate.reuse.upper
        computed = candidate.reuse.prompt_tokens - upper
        work_s = candidate.scale * prefill_seconds(speeds, computed, upper)
    if speeds.assumed:
        work_s *= LEAST_SHARE  # it may be as much faster as learning allows
    noise = math.hypot(candidate.queue_noise_s, speeds.noise_share * work_s)
    return Earliest(candidate.queue_s + work_s, noise)


class Limit(NamedTuple):
    """What a request asks for, and its class allows."""

    group: str
    """Its class, by the least priority of it; NO_CLASS: none."""
    seconds: float
    """To first token."""
    queue_s: float
    """Of work ahead, at most."""
    own: bool
    """`seconds` is the request's own deadline."""


@dataclass(slots=True)
class _Gate:
    """What is remembered of one class of a model."""

    refused: float = -math.inf
    """When a request was refused last by the whole limit."""
    closed: bool = False
    next_slot: float = -math.inf
    """When the work of those that were sent away, and told to come back, will have drained."""


class Admission:
    """Of all models."""

    def __init__(self, settings: AdmissionSettings, rng: random.Random) -> None:
        self._settings = settings
        self._rng = rng
        self._gates: dict[tuple[str, str], _Gate] = {}
        self.rejections: Counter[tuple[str, str, str]] = Counter()
        """By model, class and reason."""

    def limit(self, priority: int, deadline_s: float | None) -> Limit | None:
        """What holds for such a request; None: nothing."""
        classes = [each for each in self._settings.targets if each.priority <= priority]
        target = max(classes, key=lambda each: each.priority, default=None)
        if target is None:
            return None if deadline_s is None else Limit(NO_CLASS, deadline_s, math.inf, own=True)
        own = deadline_s is not None and deadline_s <= target.seconds
        seconds = deadline_s if own and deadline_s is not None else target.seconds
        return Limit(str(target.priority), seconds, target.queue_s, own=own)

    def admit(
        self, model: str, ordered: Sequence[Estimate], limit: Limit | None, now: float
    ) -> list[Estimate]:
        """Those that can answer within the limit, in the policy's order; all of them where there is none.

        Raises NotAdmitted, with the estimates and a delay after which there should be room.
        """
        if limit is None:
            return list(ordered)
        key = (model, limit.group)
        if key not in self._gates and len(self._gates) >= MAX_GATES:
            key = (OTHER, limit.group)
        gate = self._gates.setdefault(key, _Gate())
        share = self._share(gate, now)
        found = [(earliest(each), each) for each in ordered]
        admitted = [each for when, each in found if not self._over(when, each, limit, share)]
        if admitted:
            gate.closed = False
            return admitted
        # What even idle engines can't do says nothing of how busy they are.
        if any(self._idle(when, each) <= limit.seconds for when, each in found) and all(
            self._over(when, each, limit, 1.0) for when, each in found
        ):
            gate.closed, gate.refused = True, now
        error = self._refusal(gate, found, limit, share, now)
        self.rejections[*key, error.reason] += 1
        raise error

    def refused(self, model: str, estimate: Estimate, limit: Limit | None, now: float) -> str:
        """Why `admit` would not take this target now; empty: it would. Changes nothing."""
        if limit is None:
            return ""
        when = earliest(estimate)
        share = self._share(self._gates.get((model, limit.group)) or _Gate(), now)
        if not self._over(when, estimate, limit, share):
            return ""
        queue_s = estimate.candidate.queue_s
        if queue_s > share * limit.queue_s:
            return (
                f"{queue_s:.3f} s of queue are more than the class's {share * limit.queue_s:.3f} s"
            )
        what = "deadline" if limit.own else "class's target"
        return (
            f"{when.seconds:.3f} s, ±{self._settings.z * when.sd_s:.3f} s, "
            f"is beyond the {what}, {share * limit.seconds:.3f} s"
        )

    # Inside

    def _share(self, gate: _Gate, now: float) -> float:
        """Of the limit that holds now. A class that refused somebody opens again a little later than it closed, so that it
        does not flap; it does not stay so when nobody comes whom the whole limit would refuse."""
        closed = gate.closed and now - gate.refused < RETRY_MOST_S
        return self._settings.reopen_share if closed else 1.0

    def _over(self, when: Earliest, each: Estimate, limit: Limit, share: float) -> bool:
        queue_s = each.candidate.queue_s
        if queue_s > share * limit.queue_s:
            return True
        if not queue_s:
            # There is nothing to wait for: what an idle engine can do is not refused for the sake of calm.
            share = 1.0
        return when.seconds + self._settings.z * when.sd_s > share * limit.seconds

    def _idle(self, when: Earliest, each: Estimate) -> float:
        """Seconds that must fit, were nothing ahead."""
        work_s = when.seconds - each.candidate.queue_s
        return work_s * (1.0 + self._settings.z * each.candidate.speeds.noise_share)

    def _refusal(
        self,
        gate: _Gate,
        found: Sequence[tuple[Earliest, Estimate]],
        limit: Limit,
        share: float,
        now: float,
    ) -> NotAdmitted:
        when, best = min(found, key=lambda pair: pair[0].seconds)
        candidate = best.candidate
        queue_s = candidate.queue_s
        work_s = when.seconds - queue_s
        careful = when.seconds + self._settings.z * when.sd_s
        over = max(careful - share * limit.seconds, queue_s - share * limit.queue_s)
        metadata = {
            "estimate_s": f"{when.seconds:.3f}",
            "sd_s": f"{when.sd_s:.3f}",
            "queue_s": f"{queue_s:.3f}",
            "idle_estimate_s": f"{work_s:.3f}",
            "over_s": f"{over:.3f}",
            **_needed(candidate, over),
            "replica": candidate.replica,
            "rank": str(candidate.rank),
            "targets": str(len(found)),
            "limit_s": f"{share * limit.seconds:.3f}",
            **({"deadline_s": f"{limit.seconds:.3f}"} if limit.own else {}),
            **({"class": limit.group} if limit.group else {}),
            **(
                {"limit_queue_s": f"{share * limit.queue_s:.3f}"}
                if limit.queue_s < math.inf
                else {}
            ),
        }
        if self._idle(when, best) <= limit.seconds:
            delay = self._slot(gate, over, work_s, len(found), now)
        else:
            delay = RETRY_MOST_S  # a retry helps only if caches fill meanwhile
        jitter = 1.0 + self._rng.uniform(-RETRY_JITTER, RETRY_JITTER)
        text = (
            f"the earliest first token is from {candidate.replica} rank {candidate.rank} in "
            f"{when.seconds:.3f} s, ±{self._settings.z * when.sd_s:.3f} s, {queue_s:.3f} s of it queue; "
        )
        kind: type[NotAdmitted]
        if careful <= share * limit.seconds:
            kind = QueueFull
            text += f"requests of class {limit.group} may wait for {share * limit.queue_s:.3f} s"
        else:
            kind = DeadlineUnreachable if limit.own else TargetUnreachable
            text += f"no target gives one within {share * limit.seconds:.3f} s"
        return kind(
            f"{text}: allow more time or retry later",
            metadata=metadata,
            retry_s=min(RETRY_MOST_S, max(RETRY_LEAST_S, delay * jitter)),
        )

    def _slot(self, gate: _Gate, over: float, work_s: float, targets: int, now: float) -> float:
        """Seconds until there is room for this request, after those that were sent away before it."""
        gate.next_slot = max(gate.next_slot, now + over) + work_s / targets
        gate.next_slot = min(gate.next_slot, now + RETRY_MOST_S)
        return gate.next_slot - now


def _needed(candidate: Candidate, over: float) -> dict[str, str]:
    """What of the target would have had to be otherwise, by itself, where that can be."""
    reuse, speeds = candidate.reuse, candidate.speeds
    needed = {"shed_queue_s": f"{over:.3f}"} if over <= candidate.queue_s else {}
    # As if all tokens attended to those that are held only: then at most so many are needed.
    per_token = candidate.scale * (speeds.token_s + speeds.attention_s * reuse.predicted)
    tokens = math.ceil(over / per_token) if per_token else 0
    if 0 < tokens < reuse.prompt_tokens - reuse.predicted:
        needed["missing_reuse_tokens"] = str(tokens)
    return needed
