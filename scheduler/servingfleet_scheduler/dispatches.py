"""Commits a choice: decision id, credit, and the work that now waits there; and takes it back when it has ended.

Pure.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from servingfleet_protos.v1 import routing_pb2, stream_pb2

from . import answers
from .backlog import Dispatch
from .candidates import Considered, Option, basis
from .credits import Credits
from .decisions import Decisions, Pending
from .fleet import MAX_DELTA_HASHES, Fleet
from .policy.candidate import Estimate
from .policy.estimate import work_seconds
from .prompts import HASH_BYTES, PreparedPrompt
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
        settings: SchedulerSettings,
        *,
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
            owner_address=self._address,
        )
        decision_id = self._write_token(decision)
        response = routing_pb2.RouteResponse(
            decision_id=decision_id,
            target=answers.target(option),
            endpoint=option.replica.endpoint,
            headers=answers.headers(option),
            prediction=answers.prediction(reuse),
            estimated_ttft_s=chosen.seconds,
            basis=basis(considered.allowed),
            policy=self._policy,
            fallbacks=[
                answers.fallback(considered.option(each), each)
                for each in admitted[1 : 1 + request.max_fallbacks]
            ],
        )
        predictions = {
            considered.option(each).key: each.candidate.reuse
            for each in considered.ordered[: self._settings.predictions_kept]
        }
        for dropped in self._decisions.add(
            Pending(decision, request.request_id, response, predictions)
        ):
            self.release(dropped.response.decision_id, dropped.decision)
        self._count += 1
        option.rank.last_dispatch = self._count
        option.rank.dispatches[decision_id] = Dispatch(
            at=now,
            work_s=work_seconds(option.replica.speeds, reuse),
            number=self._count,
        )
        self._credit(decision_id, option, considered.prompt, now)
        return response

    def _credit(self, decision_id: str, option: Option, prompt: PreparedPrompt, now: float) -> None:
        hashes = prompt.hashes(option.replica.pairs)
        expires_s = self._settings.credit_ttl_s
        opened = self._credits.open(
            decision_id,
            option.replica,
            option.rank.number,
            hashes,
            prompt.prompt_tokens,
            expires=now + expires_s,
        )
        session = self._streams.speaking(option.replica.name)
        if opened and session is not None and len(hashes) <= MAX_DELTA_HASHES * HASH_BYTES:
            session.send_credit(
                stream_pb2.SchedulerMessage(
                    credit_opened=stream_pb2.CreditOpened(
                        decision_id=decision_id,
                        rank=option.rank.number,
                        hashes=hashes,
                        prompt_tokens=prompt.prompt_tokens,
                        origin=self._instance_id,
                        expires_s=expires_s,
                    )
                )
            )

    def release(self, decision_id: str, decision: Decision) -> None:
        """The request no longer runs there: nothing waits for it, and no credit stands for it."""
        replica = self._fleet.get(decision.replica)
        if replica is not None and decision.rank in replica.ranks:
            replica.ranks[decision.rank].dispatches.pop(decision_id, None)
        if self._credits.end(decision_id) is None:
            return
        session = self._streams.speaking(decision.replica)
        if session is not None:
            session.send_credit(
                stream_pb2.SchedulerMessage(
                    credit_ended=stream_pb2.CreditEnded(
                        decision_id=decision_id, origin=decision.owner
                    )
                )
            )

    def tell(self, replica: str, rank: int, predicted: int, reported: int) -> None:
        """The relay of a replica hears what became of a prompt that ran there. Tokens."""
        session = self._streams.speaking(replica)
        if session is not None:
            outcome = stream_pb2.Outcome(rank=rank, predicted=predicted, reported=reported)
            session.send_credit(stream_pb2.SchedulerMessage(outcome=outcome))

    def first_token(self, decision_id: str, decision: Decision) -> None:
        """Its prefill is over: it no longer stands before others."""
        replica = self._fleet.get(decision.replica)
        rank = replica.ranks.get(decision.rank) if replica else None
        if rank is not None and decision_id in rank.dispatches:
            before = rank.dispatches[decision_id]
            rank.dispatches[decision_id] = Dispatch(
                before.at, before.work_s, before.number, first_token=True
            )
