"""A whole client: asks where a prompt should go, sends it there, and reports what was reused."""

from __future__ import annotations

import json
import os
import time
import urllib.request
from pathlib import Path
from typing import Any

import grpc

from servingfleet_protos.v1 import routing_pb2, routing_pb2_grpc

IDENTITY = Path("/var/run/fleet")
DEADLINE_S = 2.0


class Token(grpc.AuthMetadataPlugin):
    """Sends the pod's token with every call. Read each time: the kubelet renews the file."""

    def __call__(
        self, context: grpc.AuthMetadataContext, callback: grpc.AuthMetadataPluginCallback
    ) -> None:
        token = (IDENTITY / "token").read_text()
        callback((("authorization", f"Bearer {token}"),), None)


def ask(router: routing_pb2_grpc.RouterStub, model: str, prompt: list[int]) -> dict[str, Any]:
    """The engine's answer to the prompt, given as token ids."""
    decision = router.Route(
        routing_pb2.RouteRequest(
            model=model, prompt=routing_pb2.Prompt(tokens=routing_pb2.TokenList(ids=prompt))
        ),
        timeout=DEADLINE_S,
    )
    sent = time.monotonic()
    request = urllib.request.Request(
        f"http://{decision.endpoint}/v1/completions",
        json.dumps({"model": model, "prompt": prompt, "max_tokens": 1}).encode(),
        # The headers say which data-parallel rank: without them the engine picks one itself.
        {"Content-Type": "application/json", **decision.headers},
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        answer: dict[str, Any] = json.load(reply)
    usage = answer["usage"]
    details = usage.get("prompt_tokens_details") or {}
    # Every decision ends in a report: it gives the credit back, and keeps the figures honest.
    router.Report(
        routing_pb2.ReportRequest(
            decision_id=decision.decision_id,
            stage=routing_pb2.ReportRequest.STAGE_FINISHED,
            prompt_tokens=usage["prompt_tokens"],
            # Absent, where the engine did not say: that is not the same as 0.
            cached_tokens=details.get("cached_tokens"),
            ttft_s=time.monotonic() - sent,
        ),
        timeout=DEADLINE_S,
    )
    print(
        f"{decision.endpoint}: {decision.prediction.predicted} tokens predicted,"
        f" {details.get('cached_tokens')} reused, of {usage['prompt_tokens']}"
    )
    return answer


def main() -> None:
    """Asks the same prompt twice: the second time it should be reused."""
    credentials = grpc.composite_channel_credentials(
        grpc.ssl_channel_credentials((IDENTITY / "ca.crt").read_bytes()),
        grpc.metadata_call_credentials(Token()),
    )
    with grpc.secure_channel(os.environ["FLEET_ENDPOINT"], credentials) as channel:
        router = routing_pb2_grpc.RouterStub(channel)
        for _ in range(2):
            ask(router, os.environ["FLEET_MODEL"], list(range(1000, 1200)))


if __name__ == "__main__":
    main()
