"""A whole client: asks where a prompt should go, sends it there, and reports what was reused."""

from __future__ import annotations

import json
import os
import time
import urllib.request
from pathlib import Path
from typing import Any

import servingfleet_client as fleet

IDENTITY = Path("/var/run/fleet")


def scheduler() -> fleet.Scheduler:
    """The fleet's, with the pod's own token and the fleet's CA. Both files are read again when they are renewed."""
    return fleet.Scheduler(
        os.environ["FLEET_ENDPOINT"], ca_file=IDENTITY / "ca.crt", token_file=IDENTITY / "token"
    )


def send(routed: fleet.Routed, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """The engine's answer. Raises OSError."""
    request = urllib.request.Request(
        f"http://{routed.endpoint}/v1/completions",
        # Headers and body say which data-parallel rank: without them the engine picks one itself.
        json.dumps({**body, **routed.body}).encode(),
        {"Content-Type": "application/json", **routed.headers},
    )
    with urllib.request.urlopen(request, timeout=timeout_s) as reply:
        answer: dict[str, Any] = json.load(reply)
    return answer


def ask(client: fleet.Client, prompt: list[int]) -> dict[str, Any]:
    """The engine's answer to the prompt, given as token ids."""
    # However the block ends, the scheduler is told: that gives the credit back, and keeps the figures honest.
    with client.request(prompt) as routed:
        answer = send(routed, {"model": client.model, "prompt": prompt, "max_tokens": 1}, 60.0)
        routed.first_token()  # it is the only one: a client that streams says so when it comes
        routed.finished(answer["usage"])
    reused = (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens")
    print(
        f"{routed.endpoint}: {routed.decision.prediction.predicted} tokens predicted,"
        f" {reused} reused, of {answer['usage']['prompt_tokens']}"
    )
    return answer


def main() -> None:
    """Asks the same prompt twice: the second time it should be reused."""
    prompt = list(range(1000, 1200))
    with fleet.Client(scheduler(), os.environ["FLEET_MODEL"]) as client:
        ask(client, prompt)
        # Reports go out in the background. Whoever asks again at once may be ahead of them, and so short a prompt is not
        # worth a queue: it is computed anew elsewhere.
        time.sleep(1.0)
        ask(client, prompt)


if __name__ == "__main__":
    main()
