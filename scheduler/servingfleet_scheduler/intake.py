"""The gRPC edge of the relays' streams: one task reads into the session, the call itself writes what it answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

from servingfleet_protos.v1 import stream_pb2, stream_pb2_grpc

from .clock import Clock
from .errors import SchedulerError, SessionRefused
from .rich_errors import Context, abort
from .service import Scheduler
from .sessions import Session

log = logging.getLogger(__name__)


class RelayIntakeServicer(stream_pb2_grpc.RelayIntakeServicer):
    """Streams of relays, each a Session."""

    def __init__(self, scheduler: Scheduler, clock: Clock) -> None:
        self._scheduler = scheduler
        self._clock = clock

    async def Stream(
        self, requests: AsyncIterator[stream_pb2.RelayMessage], context: Context
    ) -> AsyncIterator[stream_pb2.SchedulerMessage]:
        session = self._scheduler.open_session(self._clock())
        wake = asyncio.Event()
        session.on_output = wake.set
        reader = asyncio.create_task(self._read(session, requests))
        reader.add_done_callback(lambda _: wake.set())
        try:
            while True:
                await wake.wait()
                wake.clear()
                for message in session.take():
                    yield message
                if session.refused is not None or reader.done():
                    break
        finally:
            reader.cancel()
            session.close(self._clock())
            self._log_end(session)
        if session.refused is not None:
            await abort(context, session.refused)
        if reader.exception() is not None:
            await abort(context, SchedulerError("a defect in the scheduler: see its log"))

    async def _read(
        self, session: Session, requests: AsyncIterator[stream_pb2.RelayMessage]
    ) -> None:
        greeted = False
        try:
            async for message in requests:
                session.receive(message, self._clock())
                if not greeted and session.replica is not None:
                    greeted = True
                    log.info("relay connected", extra=_fields(session))
        except SessionRefused:
            # The session keeps it, and the writer ends the call with it.
            return
        except Exception:
            log.exception("defect in a relay stream", extra=_fields(session))
            raise

    def _log_end(self, session: Session) -> None:
        fields = _fields(session)
        if session.refused is None:
            log.info("relay disconnected", extra=fields)
        else:
            fields |= {"reason": session.refused.reason, "detail": session.refused.message}
            log.warning("relay refused", extra=fields)


def _fields(session: Session) -> dict[str, str]:
    replica = session.replica
    if replica is None:
        return {}
    return {"replica": replica.name, "model": replica.model, "engine": replica.engine}
