"""A gateway with its users, in a pod: asks, sends, reports, and prints what came of it. Uses examples/client/ask.py.

Runs on the project's image alone, with both files mounted: nothing here may import the tests.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from ask import IDENTITY, Token  # type: ignore[import-not-found]

from servingfleet_protos.v1 import common_pb2, routing_pb2, routing_pb2_grpc

Report = routing_pb2.ReportRequest
Answer = routing_pb2.ReportResponse
CALL_S = 3.0
PATIENCE_S = 60.0
"""How long one request is tried again before it counts as failed."""
PAUSE_S = 0.3
AWAY = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    # What gRPC makes of a call that reaches a server in the moment of its stop.
    grpc.StatusCode.CANCELLED,
)


class Gateway:
    """One worker: it asks over one connection and reports over another, which may lead to another scheduler."""

    def __init__(self, routes: grpc.Channel, reports: grpc.Channel, model: str) -> None:
        self._router = routing_pb2_grpc.RouterStub(routes)
        self._reporter = routing_pb2_grpc.RouterStub(reports)
        self._model = model
        self.counts: Counter[str] = Counter()
        self.endpoints: Counter[str] = Counter()

    def ask(self, name: str, prompt: list[int]) -> None:
        """One request to its end."""
        deadline = time.monotonic() + PATIENCE_S
        exclude: list[common_pb2.Target] = []
        for attempt in range(1000):
            if time.monotonic() > deadline:
                self.counts["failed"] += 1
                return
            request = routing_pb2.RouteRequest(
                model=self._model,
                prompt=routing_pb2.Prompt(tokens=routing_pb2.TokenList(ids=prompt)),
                request_id=f"{name}-{attempt}",
                exclude=exclude,
            )
            try:
                decision = self._router.Route(request, timeout=CALL_S)
            except grpc.RpcError as error:
                if error.code() not in AWAY:
                    raise
                self.counts["route retries"] += 1
                exclude.clear()
                time.sleep(PAUSE_S)
                continue
            try:
                usage = self._send(decision, prompt)
            except OSError:
                self.counts["engine retries"] += 1
                self._report(Report(decision_id=decision.decision_id, stage=Report.STAGE_FAILED))
                exclude.append(decision.target)
                continue
            self._finish(decision, usage)
            return

    def _send(self, decision: routing_pb2.RouteResponse, prompt: list[int]) -> dict[str, Any]:
        body = {"model": self._model, "prompt": prompt, "max_tokens": 2}
        request = urllib.request.Request(
            f"http://{decision.endpoint}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", **decision.headers},
        )
        with urllib.request.urlopen(request, timeout=10) as reply:
            usage: dict[str, Any] = json.load(reply)["usage"]
        return usage

    def _finish(self, decision: routing_pb2.RouteResponse, usage: dict[str, Any]) -> None:
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        predicted = decision.prediction.predicted
        self.counts += Counter(
            {
                "finished": 1,
                "promptTokens": usage["prompt_tokens"],
                "reusedTokens": cached,
                "predictedTokens": predicted,
                "agreedTokens": min(predicted, cached),
                "erroneousTokens": max(0, predicted - cached),
            }
        )
        self.endpoints[decision.endpoint] += 1
        self._report(
            Report(
                decision_id=decision.decision_id,
                stage=Report.STAGE_FINISHED,
                prompt_tokens=usage["prompt_tokens"],
                cached_tokens=cached,
            )
        )

    def _report(self, report: Report) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            try:
                answer = self._reporter.Report(report, timeout=CALL_S)
            except grpc.RpcError as error:
                if error.code() not in AWAY:
                    raise
                self.counts["report retries"] += 1
                time.sleep(PAUSE_S)
                continue
            self.counts[f"report {Answer.Disposition.Name(answer.disposition)}"] += 1
            return
        self.counts["unreported"] += 1


def main() -> None:
    """Prints one line when it starts, and one with all counts at the end."""
    options = argparse.ArgumentParser()
    options.add_argument("--requests", type=int, default=60)
    options.add_argument("--prompts", type=int, default=6, help="beginnings that requests share")
    options.add_argument("--workers", type=int, default=4)
    options.add_argument("--every", type=float, default=0.0, help="seconds from one to the next")
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args()
    chance = random.Random(given.seed)
    beginnings = [tokens(chance, 320) for _ in range(given.prompts)]
    prompts = [chance.choice(beginnings) + tokens(chance, 48) for _ in range(given.requests)]
    print(json.dumps({"event": "asking", "requests": len(prompts)}), flush=True)
    start = time.monotonic()
    totals: Counter[str] = Counter()
    endpoints: Counter[str] = Counter()
    with ThreadPoolExecutor(given.workers) as pool:

        def work(worker: int) -> None:
            with channel() as routes, channel() as reports:
                gateway = Gateway(routes, reports, os.environ["FLEET_MODEL"])
                for number in range(worker, len(prompts), given.workers):
                    time.sleep(max(0.0, start + number * given.every - time.monotonic()))
                    gateway.ask(f"{given.seed}-{number}", prompts[number])
                totals.update(gateway.counts)
                endpoints.update(gateway.endpoints)

        list(pool.map(work, range(given.workers)))
    print(json.dumps({"event": "asked", **totals, "endpoints": endpoints}), flush=True)


@contextlib.contextmanager
def channel() -> Iterator[grpc.Channel]:
    """A connection of its own: by default, all channels to one address share theirs."""
    credentials = grpc.composite_channel_credentials(
        grpc.ssl_channel_credentials((IDENTITY / "ca.crt").read_bytes()),
        grpc.metadata_call_credentials(Token()),
    )
    settings = [
        ("grpc.use_local_subchannel_pool", 1),
        # A scheduler that was killed answers nothing, not even that it is gone.
        ("grpc.keepalive_time_ms", 3000),
        ("grpc.keepalive_timeout_ms", 2000),
        ("grpc.max_reconnect_backoff_ms", 1000),
    ]
    with grpc.secure_channel(os.environ["FLEET_ENDPOINT"], credentials, settings) as opened:
        yield opened


def tokens(chance: random.Random, count: int) -> list[int]:
    return [chance.randrange(1000, 30_000) for _ in range(count)]


if __name__ == "__main__":
    main()
