"""The gRPC edge of the relays' streams: one task reads into the session, the call itself writes what it answers.

Where callers are checked, another task sees to it that the relay still is who it said it is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

from servingfleet_protos.v1 import stream_pb2, stream_pb2_grpc

from .clock import Clock
from .errors import AccessRefused, Refused, SchedulerError
from .gate import Gate
from .proofs import Proof
from .rich_errors import Context, abort
from .service import Scheduler
from .sessions import Session

log = logging.getLogger(__name__)


class RelayIntakeServicer(stream_pb2_grpc.RelayIntakeServicer):
    """Streams of relays, each a Session. Without a gate a relay may speak for any replica."""

    def __init__(self, scheduler: Scheduler, clock: Clock, gate: Gate | None = None) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._gate = gate

    async def Stream(
        self, requests: AsyncIterator[stream_pb2.RelayMessage], context: Context
    ) -> AsyncIterator[stream_pb2.SchedulerMessage]:
        proof = await self._proof(context)
        pod_uid = proof.pod_uid if proof is not None else None
        session = self._scheduler.open_session(self._clock(), pod_uid)
        wake = asyncio.Event()
        session.on_output = wake.set
        tasks = [asyncio.create_task(self._read(session, requests, proof))]
        if proof is not None:
            tasks.append(asyncio.create_task(self._hold(session, proof)))
        for task in tasks:
            task.add_done_callback(lambda _: wake.set())
        try:
            while True:
                await wake.wait()
                wake.clear()
                for message in session.take():
                    yield message
                if session.refused is not None or any(task.done() for task in tasks):
                    break
        finally:
            for task in tasks:
                task.cancel()
            session.close(self._clock())
            self._log_end(session)
        if session.refused is not None:
            await abort(context, session.refused)
        if any(task.done() and task.exception() is not None for task in tasks):
            await abort(context, SchedulerError("a defect in the scheduler: see its log"))

    async def _proof(self, context: Context) -> Proof | None:
        """None: nobody asks. Ends the call where there is none."""
        if self._gate is None:
            return None
        try:
            return await Proof.begin(self._gate, context.invocation_metadata() or ())
        except AccessRefused as refusal:
            log.warning("relay refused", extra=_why(refusal))
            refused: SchedulerError = refusal
        except Exception:
            log.exception("defect in a relay's proof")
            refused = SchedulerError("a defect in the scheduler: see its log")
        await abort(context, refused)

    async def _read(
        self,
        session: Session,
        requests: AsyncIterator[stream_pb2.RelayMessage],
        proof: Proof | None,
    ) -> None:
        greeted = False
        try:
            async for message in requests:
                session.receive(message, self._clock())
                if not greeted and session.replica is not None:
                    greeted = True
                    log.info("relay connected", extra=_fields(session))
                if proof is not None and message.HasField("credential"):
                    proof.renew(message.credential.token)
        except Refused:
            # The session keeps it, and the writer ends the call with it.
            return
        except Exception:
            log.exception("defect in a relay stream", extra=_fields(session))
            raise

    async def _hold(self, session: Session, proof: Proof) -> None:
        try:
            await proof.hold()
        except AccessRefused as refusal:
            session.refuse(refusal)
        except Exception:
            log.exception("defect in a relay's proof", extra=_fields(session))
            raise

    def _log_end(self, session: Session) -> None:
        fields = _fields(session)
        if session.refused is None:
            log.info("relay disconnected", extra=fields)
        else:
            log.warning("relay refused", extra=fields | _why(session.refused))


def _why(refusal: Refused) -> dict[str, str]:
    return {"reason": refusal.reason, "detail": refusal.message}


def _fields(session: Session) -> dict[str, str]:
    replica = session.replica
    if replica is None:
        return {}
    return {"replica": replica.name, "model": replica.model, "engine": replica.engine}
