"""Asks the schedulers of every fleet, again and again, apart from the reconciles: one that is slow to answer delays nobody.
On the way each is told which engine pods drain.

What was answered is kept here; a reconcile is asked for only when an answer differs from the one before.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass

from . import names
from .certificates import Certificates
from .errors import ClusterError, Unreachable
from .metrics import Metrics
from .queue import QueueSettings, WorkQueue
from .reports import Answers, Caller, Tokens, ask, is_ready
from .spec import BadSpec, Fleet
from .store import Body, Key, Store

log = logging.getLogger(__name__)

ASK_S = 15.0
"""Between two questions: a status with figures is not written more often."""
GRACE_S = 10.0
"""A scheduler that has only just become ready may not answer yet: the right to ask who we are takes a moment to spread."""
AGAIN_S = 2.0
"""Until it is asked again meanwhile."""
SETTINGS = QueueSettings(gather_s=0.0, first_backoff_s=ASK_S, longest_backoff_s=ASK_S, workers=16)


@dataclass(frozen=True)
class _Asked:
    pods: frozenset[str]
    since: float
    """When these became the ready ones."""


class Asking:
    """What the schedulers of fleets said last."""

    def __init__(
        self,
        *,
        store: Store,
        certificates: Certificates,
        tokens: Tokens,
        metrics: Metrics,
        leads: Callable[[], bool],
        on_news: Callable[[Key], None],
        rng: random.Random,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._certificates = certificates
        self._tokens = tokens
        self._metrics = metrics
        self._leads = leads
        self._on_news = on_news
        self._clock = clock
        self._queue: WorkQueue[Key] = WorkQueue(self._one, SETTINGS, rng)
        self._answers: dict[Key, Answers] = {}
        self._asked: dict[Key, _Asked] = {}
        self._draining: dict[Key, Mapping[str, bool]] = {}

    async def run(self) -> None:
        """Asks for ever."""
        await self._queue.run()

    def answers(
        self, key: Key, pods: Sequence[Body], draining: Mapping[str, bool]
    ) -> Answers | None:
        """The last answers of the fleet's schedulers; None: none is ready, or none was asked yet.

        pods: the scheduler's. Those that became ready since are asked at once.
        draining: the engines' pods, as EnginePods has them; schedulers are told of a change at once.
        """
        before = _draining(self._draining.get(key, {}))
        self._draining[key] = draining
        ready = frozenset(pod["metadata"]["uid"] for pod in pods if is_ready(pod))
        if not ready:
            self._answers.pop(key, None)
            self._asked.pop(key, None)
            self._queue.forget(key)
            return None
        asked = self._asked.get(key)
        if asked is None or asked.pods != ready:
            self._asked[key] = _Asked(ready, self._clock())
            self._queue.add(key)
        elif before != _draining(draining):
            self._queue.add(key)
        return self._answers.get(key)

    def keep_only(self, keys: Container[Key]) -> None:
        """Forgets other fleets than these."""
        known = {*self._asked, *self._answers, *self._draining}
        for key in [key for key in known if key not in keys]:
            self._draining.pop(key, None)
            self._asked.pop(key, None)
            self._answers.pop(key, None)
            self._queue.forget(key)

    async def _one(self, key: Key) -> float | None:
        if not self._leads() or key not in self._asked:
            self._asked.pop(key, None)
            self._answers.pop(key, None)
            return None
        try:
            fleet = self._store.fleet(key)
        except BadSpec:
            fleet = None
        if fleet is None:
            return ASK_S
        caller = await self._caller(key, fleet)
        if isinstance(caller, str):
            answers = Answers((), (caller,))
        else:
            pods = self._store.scheduler_pods(key)
            answers = await ask(pods, caller, self._draining.get(key, {}))
        if any("UNAUTHENTICATED" in line for line in answers.unanswered):
            self._tokens.forget(names.audience(fleet.name, fleet.namespace))
        self._metrics.scheduler_reports.labels("answered").inc(len(answers.reports))
        self._metrics.scheduler_reports.labels("unanswered").inc(len(answers.unanswered))
        asked = self._asked.get(key)
        if asked is None:
            return None
        fresh = self._clock() - asked.since < GRACE_S
        if fresh and not answers.reports and key not in self._answers:
            return AGAIN_S
        before = self._answers.get(key)
        if answers.untold and (before is None or before.untold != answers.untold):
            log.warning(
                "schedulers not told who drains",
                extra={"fleet": key.name, "namespace": key.namespace, "error": answers.untold[0]},
            )
        if before != answers:
            self._answers[key] = answers
            self._on_news(key)
        return AGAIN_S if fresh and answers.unanswered else ASK_S

    async def _caller(self, key: Key, fleet: Fleet) -> Caller | str:
        server_name = names.server_name(fleet.name, fleet.namespace)
        if not fleet.secured:
            return Caller(None, server_name, "")
        certificates = self._certificates.known(fleet)
        if certificates is None:
            return "the fleet has no certificates; see the condition Reconciled"
        try:
            token = await self._tokens.token(names.audience(fleet.name, fleet.namespace))
        except ClusterError as error:
            if isinstance(error, Unreachable) and key in self._answers:
                raise  # what was answered before stands
            return str(error)
        return Caller(certificates.ca_bundle, server_name, token)


def _draining(pods: Mapping[str, bool]) -> set[str]:
    return {uid for uid, drains in pods.items() if drains}
