"""Commits a choice: decision id, credit, and the work that now waits there; and takes it back when it has ended.

Pure.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from servingfleet_protos.v1 import routing_pb2, stream_pb2

from . import answers
from .backlog import Dispatch
from .candidates import Considered, Option, basis, next_best
from .credits import Credits
from .decisions import Decisions, Footing, Pending, Promise
from .fleet import MAX_DELTA_HASHES, Fleet
from .learner import Learner
from .memory import Memory, blocks_of
from .policy.candidate import Estimate
from .policy.estimate import work
from .prompts import HASH_BYTES
from .settings import SchedulerSettings
from .streams import Streams
from .tokens import Decision


class Dispatches:
    """What this scheduler has sent, and where."""

    def __init__(
        self,
        fleet: Fleet,
        credits: Credits,
        decisions: Decisions,
        streams: Streams,
        learner: Learner,
        settings: SchedulerSettings,
        *,
        memory: Memory | None,
        write_token: Callable[[Decision], str],
        instance_id: str,
        address: str,
        policy: str,
        rng: random.Random,
    ) -> None:
        self._fleet = fleet
        self._credits = credits
        self._decisions = decisions
        self._streams = streams
        self._learner = learner
        self._memory = memory
        self._settings = settings
        self._write_token = write_token
        self._instance_id = instance_id
        self._address = address
        self._policy = policy
        self._rng = rng
        self._count = 0

    def dispatch(
        self,
        request: routing_pb2.RouteRequest,
        considered: Considered,
        admitted: Sequence[Estimate],
        now: float,
    ) -> routing_pb2.RouteResponse:
        """Sends the request to the first of `admitted`: opens its credit, remembers the decision, answers."""
        chosen = admitted[0]
        option = considered.option(chosen)
        reuse = chosen.candidate.reuse
        decision = Decision(
            owner=self._instance_id,
            model=request.model,
            replica=option.replica.name,
            rank=option.rank.number,
            at=now,
            nonce=self._rng.getrandbits(64),
            prompt=reuse.prompt_tokens,
            predicted=reuse.predicted,
            lower=reuse.lower,
            upper=reuse.upper,
            best=considered.best,
            expected=round(reuse.expected),
            owner_address=self._address,
        )
        decision_id = self._write_token(decision)
        response = routing_pb2.RouteResponse(
            decision_id=decision_id,
            target=answers.target(option),
            endpoint=option.replica.endpoint,
            headers=answers.headers(option),
            body=answers.body(option),
            prediction=answers.prediction(reuse),
            estimated_ttft_s=chosen.seconds,
            estimated_sd_s=chosen.sd_s,
            propensity=chosen.propensity,
            pinned=considered.pinned == option.key,
            last_resort=considered.last_resort,
            basis=basis(considered.allowed),
            policy=self._policy,
            fallbacks=[
                answers.fallback(considered.option(each), each)
                for each in next_best(admitted, request.max_fallbacks)
            ],
        )
        promises = self._promises(considered, admitted)
        pending = Pending(*(decision, request.request_id, response, promises, considered.session))
        for dropped in self._decisions.add(pending):
            self.release(dropped.response.decision_id, dropped.decision, now)
        self._count += 1
        option.rank.last_dispatch = self._count
        if option.rank.breaker is not None:
            option.rank.breaker.sent(now)
        brings = work(chosen.candidate)
        dispatch = Dispatch(now, brings.seconds, self._count, brings.tokens)
        option.rank.dispatches[decision_id] = dispatch
        option.rank.speeds = chosen.candidate.speeds.scaled(chosen.candidate.scale)
        option.rank.backlog.sent(decision_id, dispatch, option.rank.speeds)
        option.rank.room.sent(decision_id, now, reuse.prompt_tokens)
        option.rank.traffic.sent(now, dispatch.work_s, _gap(chosen, considered.ordered))
        self._learner.sent(decision_id, option.replica, option.rank, chosen.candidate, now)
        hashes = considered.prompt.hashes(option.replica.pairs)
        if self._memory is not None:
            self._memory.sent(option.key, blocks_of(hashes))
        due = now + chosen.candidate.queue_s
        self._fleet.touch(option.replica, option.rank.number, hashes, reuse.predicted, due)
        if self._settings.credit:
            self._credit(decision_id, option, considered, hashes, dispatch, due)
        return response

    def _credit(
        self,
        decision_id: str,
        option: Option,
        considered: Considered,
        hashes: bytes,
        dispatch: Dispatch,
        due: float,
    ) -> None:
        prompt = considered.prompt
        expires_s = self._settings.credit_ttl_s
        opened = self._credits.open(
            decision_id,
            option.replica,
            option.rank.number,
            hashes,
            prompt.prompt_tokens,
            expires=dispatch.at + expires_s,
            due=due,
        )
        # Of a prompt without a whole block there is only its work to tell.
        told = opened or not hashes
        session = self._streams.speaking(option.replica.name)
        if told and session is not None and len(hashes) <= MAX_DELTA_HASHES * HASH_BYTES:
            credit = stream_pb2.CreditOpened(
                decision_id=decision_id,
                rank=option.rank.number,
                hashes=hashes,
                prompt_tokens=prompt.prompt_tokens,
                origin=self._instance_id,
                expires_s=expires_s,
                work_s=dispatch.work_s,
                session=considered.session,
            )
            if not prompt.no_reuse:
                credit.predicted = option.candidate.reuse.predicted
            session.send_credit(stream_pb2.SchedulerMessage(credit_opened=credit))

    def release(
        self, decision_id: str, decision: Decision, now: float, *, served: bool = False
    ) -> None:
        """The request no longer runs there: nothing waits for it, and its credit ends. `served`: it ran there to its end,
        and what it left is there before the engine's events tell."""
        target = self._fleet.rank(decision.replica, decision.rank)
        rank = target[1] if target is not None else None
        # Before: peers were told of no first token.
        waited = rank is not None and decision_id in rank.backlog
        if served:
            self.first_token(decision_id, decision, now, just_now=False)
        self._learner.lost(decision_id, decision, now)
        if rank is not None:
            known = rank.dispatches.pop(decision_id, None)
            stayed = served and known is not None and known.began <= now
            rank.room.ended(decision_id, now - known.began if known and stayed else None)
            rank.backlog.withdrawn(decision_id, now)
        if served and self._streams.speaking(decision.replica) is not None:
            # Events of what it left may be on their way: it ends when the word of it comes back behind them.
            until = now + self._settings.credit_served_s
            credit = self._credits.served(decision_id, until)
        else:
            credit = self._credits.end(decision_id)
        if credit is not None or waited:
            self._tell_peers(
                decision,
                credit_ended=stream_pb2.CreditEnded(decision_id=decision_id, origin=decision.owner),
            )

    def _promises(
        self, considered: Considered, admitted: Sequence[Estimate]
    ) -> dict[tuple[str, int], Promise]:
        """Before the credit of this dispatch opens."""
        index = self._fleet.index(considered.prompt.model)
        found = {}
        for each in admitted[: self._settings.predictions_kept]:
            key = each.candidate.replica, each.candidate.rank
            replica, rank, candidate, _ = considered.options[key]
            footing = None
            if index is not None and replica.connected and rank.warm and not rank.doubted:
                credited = index.credits(replica.number, rank.number) > 0
                footing = Footing(rank.incarnation, rank.engine_seq, credited)
            found[key] = Promise(candidate.reuse, candidate.tail, footing)
        return found

    def tell(
        self, target: tuple[str, int], predicted: int, reported: int, footing: Footing, age_s: float
    ) -> None:
        """The relay of a replica hears what became of a prompt that ran there, in tokens, `age_s` after the prediction."""
        replica, rank = target
        session = self._streams.speaking(replica)
        if session is not None:
            outcome = stream_pb2.Outcome(
                rank=rank,
                predicted=predicted,
                reported=reported,
                incarnation=footing.incarnation,
                engine_seq=footing.engine_seq,
                age_s=max(0.0, age_s),
            )
            session.send_credit(stream_pb2.SchedulerMessage(outcome=outcome))

    def first_token(
        self, decision_id: str, decision: Decision, now: float, *, just_now: bool = True
    ) -> None:
        """Its prefill is over: it no longer stands before others. `just_now`: not only told now."""
        target = self._fleet.rank(decision.replica, decision.rank)
        if target is None:
            return
        replica, rank = target
        before = rank.dispatches.get(decision_id)
        if before.first_token if before is not None else decision_id not in rank.backlog:
            return
        if before is not None:
            began = now if just_now else math.inf
            rank.dispatches[decision_id] = replace(before, first_token=True, began=began)
        if not just_now:
            rank.backlog.served(decision_id, replica.speeds_of(rank), now)
            return
        rank.backlog.started(decision_id, replica.speeds_of(rank), now)
        self._tell_peers(
            decision,
            prefill_ended=stream_pb2.PrefillEnded(decision_id=decision_id, origin=decision.owner),
        )

    def overheard(
        self, decision_id: str, decision: Decision, now: float, *, began: bool, served: bool
    ) -> None:
        """A peer's dispatch waits there no more, says a report that the peer is yet to hear: whoever asks again at once
        must not find it in the queue. All else waits for the peer's word. `began`: its first token has just come."""
        target = self._fleet.rank(decision.replica, decision.rank)
        # One without a credit is short, and its end would be the end of nothing known when the peer tells.
        if target is None or self._credits.get(decision_id) is None:
            return
        replica, rank = target
        if began:
            rank.backlog.started(decision_id, replica.speeds_of(rank), now)
        elif served:
            rank.backlog.served(decision_id, replica.speeds_of(rank), now)
        else:
            rank.backlog.withdrawn(decision_id, now)

    def _tell_peers(self, decision: Decision, **body: Any) -> None:
        session = self._streams.speaking(decision.replica)
        if session is not None and self._settings.credit:
            session.send_credit(stream_pb2.SchedulerMessage(**body))


def _gap(chosen: Estimate, allowed: Sequence[Estimate]) -> float:
    """Seconds that the prompt would wait longer at the next best target; all of its work where there is none."""
    place = chosen.candidate.replica, chosen.candidate.rank
    elsewhere = [
        each.seconds for each in allowed if (each.candidate.replica, each.candidate.rank) != place
    ]
    return max(0.0, min(elsewhere) - chosen.seconds) if elsewhere else chosen.work_s
