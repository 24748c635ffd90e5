"""A gateway with its users, in a pod: asks, sends, reports, and prints what came of it. Uses examples/client/ask.py.

Runs on the project's image alone, with both files mounted: nothing here may import the tests.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ask import scheduler, send  # type: ignore[import-not-found]

import servingfleet_client as fleet

Answer = fleet.ReportResponse
ENGINE_S = 10.0
PATIENCE_S = 60.0
"""How long one request is tried again before it counts as failed."""
PAUSE_S = 0.3
AWAY = (fleet.Unavailable, fleet.TimedOut, fleet.NoReplicas)


class Gateway:
    """One worker: it asks over one connection and reports over another, which may lead to another scheduler."""

    def __init__(self, routes: fleet.Client, reports: fleet.Client) -> None:
        self._routes = routes
        self._reports = reports
        self.counts: Counter[str] = Counter()
        self.endpoints: Counter[str] = Counter()

    def ask(self, name: str, prompt: list[int]) -> None:
        """One request to its end."""
        deadline = time.monotonic() + PATIENCE_S
        exclude: list[fleet.Target] = []
        for attempt in range(1000):
            if time.monotonic() > deadline:
                self.counts["failed"] += 1
                return
            try:
                routed = self._routes.route(prompt, request_id=f"{name}-{attempt}", exclude=exclude)
            except AWAY:
                self.counts["route retries"] += 1
                exclude.clear()
                time.sleep(PAUSE_S)
                continue
            body = {"model": self._routes.model, "prompt": prompt, "max_tokens": 2}
            try:
                usage = send(routed, body, ENGINE_S)["usage"]
            except OSError:
                self.counts["engine retries"] += 1
                self._report(routed, stage=fleet.ReportRequest.STAGE_FAILED)
                exclude.append(routed.target)
                continue
            self._finish(routed, usage)
            return

    def _finish(self, routed: fleet.Routed, usage: dict[str, Any]) -> None:
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        predicted = routed.decision.prediction.predicted
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
        self.endpoints[routed.endpoint] += 1
        self._report(
            routed,
            stage=fleet.ReportRequest.STAGE_FINISHED,
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=cached,
        )

    def _report(self, routed: fleet.Routed, **said: Any) -> None:
        # Waited for, to count what becomes of it.
        report = fleet.ReportRequest(decision_id=routed.decision.decision_id, **said)
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            try:
                answer = self._reports.report(report)
            except AWAY:
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
            model = os.environ["FLEET_MODEL"]
            with fleet.Client(scheduler(), model) as routes, fleet.Client(scheduler(), model) as r:
                gateway = Gateway(routes, r)
                for number in range(worker, len(prompts), given.workers):
                    time.sleep(max(0.0, start + number * given.every - time.monotonic()))
                    gateway.ask(f"{given.seed}-{number}", prompts[number])
                totals.update(gateway.counts)
                endpoints.update(gateway.endpoints)

        list(pool.map(work, range(given.workers)))
    print(json.dumps({"event": "asked", **totals, "endpoints": endpoints}), flush=True)


def tokens(chance: random.Random, count: int) -> list[int]:
    return [chance.randrange(1000, 30_000) for _ in range(count)]


if __name__ == "__main__":
    main()
