"""A request that has been given a place, and what is reported of it.

No I/O: reports leave through `send`, and nobody waits for them.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from servingfleet_protos.v1 import common_pb2, routing_pb2

from .errors import FleetError
from .requests import Stage, report_request

log = logging.getLogger(__name__)

Failures = type[BaseException] | tuple[type[BaseException], ...]


class Routed:
    """A decision, to be told what becomes of it.

    None of its methods waits or raises: reports are sent in the background, and a user's answer never depends on
    them. The first end counts; what comes after it is ignored.

    As a block (`with`, or through `request`) it always comes to an end: a block that ends without one is reported as
    failed if an exception of `failures` ends it, else as aborted.
    """

    def __init__(
        self,
        decision: routing_pb2.RouteResponse,
        request_id: str,
        send: Callable[[routing_pb2.ReportRequest], None],
        clock: Callable[[], float],
        failures: Failures = Exception,
    ) -> None:
        """`clock`: seconds from any origin."""
        self.decision = decision
        self.request_id = request_id
        """Under which it was asked; for the engine's log, and the user's."""
        self.target: common_pb2.Target = decision.target
        """Where it is to run now."""
        self.endpoint: str = decision.endpoint
        """host:port of the engine. Empty: the scheduler does not know it."""
        self.headers: Mapping[str, str] = dict(decision.headers)
        """Headers that make the engine run it on that rank: to be sent with it."""
        self.body: Mapping[str, Any] = _values(decision.body)
        """Fields that do the same in the request's JSON body: to be set there."""
        self._fallbacks = iter(decision.fallbacks)
        self._elsewhere: common_pb2.Target | None = None
        self._failed_on: list[common_pb2.Target] = []
        self._send = send
        self._clock = clock
        self._failures = failures
        self._since = clock()
        self._ttft_s: float | None = None
        self._ended = False

    def started(self) -> None:
        """The engine has it."""
        self._report(Stage.STAGE_STARTED)

    def first_token(self) -> None:
        """The engine's first token is here: its time is taken. Calls after the first do nothing."""
        if self._ttft_s is None and not self._ended:
            self._ttft_s = self._clock() - self._since
            self._report(Stage.STAGE_FIRST_TOKEN)

    def finished(
        self, usage: object = None, *, reuse_when_absent: int | None = None, prompts: int = 1
    ) -> None:
        """The engine's answer is complete. `usage`: what it says of it, an OpenAI mapping or object.

        `reuse_when_absent`: tokens reused where `usage` says nothing of that; 0 for SGLang with
        --enable-cache-report, which leaves out what is nothing. `prompts`: how many this usage speaks for.
        """
        self._end(Stage.STAGE_FINISHED, usage, reuse_when_absent, prompts)

    def failed(self) -> None:
        """The engine refused it, or broke off."""
        self._end(Stage.STAGE_FAILED)

    def aborted(self) -> None:
        """The user went away."""
        self._end(Stage.STAGE_ABORTED)

    def fall_back(self) -> bool:
        """The engine failed: goes on to the next fallback. Target, endpoint, headers and body are then its own.

        False: there is none left. It saves asking again; reports say from then on where it failed and where it runs.
        """
        fallback = None if self._ended else next(self._fallbacks, None)
        if fallback is None:
            return False
        self._failed_on.append(self.target)
        self.target = self._elsewhere = fallback.target
        self.endpoint = fallback.endpoint
        self.headers = dict(fallback.headers)
        self.body = _values(fallback.body)
        self._since = self._clock()
        self._ttft_s = None
        # Else the credit would stand where nothing comes.
        self._report(Stage.STAGE_STARTED)
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, self._failures):
            self.failed()
        else:
            self.aborted()

    def _end(
        self,
        stage: Stage.ValueType,
        usage: object = None,
        reuse_when_absent: int | None = None,
        prompts: int = 1,
    ) -> None:
        self._report(stage, usage, reuse_when_absent, prompts)
        self._ended = True

    def _report(
        self,
        stage: Stage.ValueType,
        usage: object = None,
        reuse_when_absent: int | None = None,
        prompts: int = 1,
    ) -> None:
        if self._ended:
            return
        self._send(
            report_request(
                self.decision.decision_id,
                stage,
                ran_on=self._elsewhere,
                failed_on=self._failed_on,
                usage=usage,
                reuse_when_absent=reuse_when_absent,
                prompts=prompts,
                ttft_s=self._ttft_s,
            )
        )


def _values(fields: Mapping[str, str]) -> dict[str, Any]:
    return {name: json.loads(value) for name, value in fields.items()}


MAX_WAITING = 10_000
"""Reports under way at once. Each has a deadline; a scheduler that is slow must not fill the gateway's memory."""


class Deliveries:
    """How background reports fare. One warning when they begin to be lost, not one for each."""

    def __init__(self) -> None:
        self.lost: Counter[str] = Counter()
        """By the reason or code that the last try ended with; TOO_MANY and CLOSED were not tried."""
        self._losing = False

    def taken(self) -> None:
        """A report has arrived."""
        if self._losing:
            self._losing = False
            log.info("reports are taken again", extra={"lost": self.lost.total()})

    def failed(self, error: FleetError) -> None:
        """A report has not arrived, or was refused."""
        code = error.code.name if error.code else type(error).__name__
        self._lose(error.reason or code, error.message)

    def room(self, waiting: int, *, closed: bool) -> bool:
        """There is room for one more beside those that wait. Else it is counted as lost."""
        if closed:
            self._lose("CLOSED", "the client was closed before the request had come to its end")
        elif waiting >= MAX_WAITING:
            self._lose("TOO_MANY", f"{waiting} reports wait for an answer")
        else:
            return True
        return False

    def _lose(self, why: str, message: str) -> None:
        self.lost[why] += 1
        if not self._losing:
            self._losing = True
            log.warning("reports are lost", extra={"reason": why, "error": message})
