"""What a decision rests on: the prompt, every target and what it would cost, their order, and where the session was.

Pure.
"""

from __future__ import annotations

import random
from collections import Counter

from servingfleet_protos.v1 import routing_pb2

from .candidates import Considered, options
from .errors import ModelUnknown, TargetUnknown
from .expectation import Expectations
from .fleet import Fleet
from .learner import Learner
from .memory import Memory
from .pins import Pin, Pins
from .policy.candidate import Estimate, Policy
from .policy.estimate import estimates
from .prompts import prepare
from .requests import names
from .settings import SchedulerSettings


class Considering:
    """Reads what is known, and changes nothing."""

    def __init__(
        self,
        settings: SchedulerSettings,
        fleet: Fleet,
        policy: Policy,
        pins: Pins,
        learner: Learner,
        expectations: Expectations,
        memory: Memory | None,
    ) -> None:
        self._settings = settings
        self._fleet = fleet
        self._policy = policy
        self._pins = pins
        self._learner = learner
        self._expectations = expectations
        self._memory = memory

    def consider(
        self, request: routing_pb2.RouteRequest, now: float, rng: random.Random
    ) -> Considered:
        """Chance comes from `rng` only. Raises InvalidRequest, ModelUnknown, TargetUnknown."""
        prompt = prepare(
            request.prompt,
            request.model,
            block_tokens=self._settings.block_tokens,
            max_prompt_tokens=self._settings.max_prompt_tokens,
        )
        if self._fleet.index(request.model) is None:
            known = self._fleet.models
            raise ModelUnknown(
                f"no replica serves model {request.model!r}; known: "
                f"{', '.join(known[:10]) or 'none yet'}",
                metadata={"known": str(len(known))},
            )
        found, last_resort = options(
            self._fleet,
            self._settings,
            request,
            prompt,
            now,
            self._learner,
            self._expectations,
            self._memory,
        )
        if request.only and not any(
            names(request.only, option.replica.name, option.rank.number) for option in found
        ):
            raise TargetUnknown(
                f"none of the {len(request.only)} targets in `only` serves model {request.model!r}",
                metadata={"targets": str(len(found))},
            )
        allowed = [option.candidate for option in found if not option.refused]
        ordered = self._policy.order(estimates(allowed), rng)
        session = self._pins.session(request.model, request.session_id)
        pin = self._pins.get(session, now) if request.pin_session else None
        if pin is not None:
            ordered = _pinned(ordered, pin)
        stays = pin is not None and bool(ordered) and _is_at(ordered[0], pin)
        return Considered(
            prompt,
            {option.key: option for option in found},
            ordered,
            last_resort=last_resort,
            session=session,
            pinned=(pin.replica, pin.rank) if pin is not None and stays else None,
        )


def reasons(considered: Considered) -> str:
    """Why none of the targets may be chosen: the most frequent reasons."""
    counts = Counter(option.refused for option in considered.options.values()).most_common()
    told = ", ".join(f"{count} {why}" for why, count in counts[:3])
    return f"{told}, and {len(counts) - 3} more reasons" if len(counts) > 3 else told


def _pinned(ordered: list[Estimate], pin: Pin) -> list[Estimate]:
    """The pin's target first, if it may be chosen: no chance has part in that."""
    first = [each._replace(propensity=1.0) for each in ordered if _is_at(each, pin)]
    if not first:
        return ordered
    return first + [each._replace(propensity=0.0) for each in ordered if not _is_at(each, pin)]


def _is_at(estimate: Estimate, pin: Pin) -> bool:
    candidate = estimate.candidate
    return (candidate.replica, candidate.rank) == (pin.replica, pin.rank)
