#!/usr/local/bin/python3
"""`vllm serve`, as far as the emulated engine can follow: real command lines in manifests, no GPU behind them.

Of `--kv-events-config` the endpoint decides as in vLLM: a wildcard makes the engine bind, an address makes it connect.
Options that change nothing here are accepted and ignored, as a manifest for a real engine is full of them.
"""

from __future__ import annotations

import json
import sys
from typing import Any
from urllib.parse import urlsplit

import click

from servingfleet_sim.emulator.__main__ import main as emulator

NOWHERE = 1
"""A port that nobody binds, for an engine without events."""


@click.group()
def main() -> None:
    """Stands in for vLLM's command."""


@main.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
@click.argument("model")
@click.option("--host", default="0.0.0.0")
@click.option("--port", type=int, default=8000)
@click.option("--served-model-name")
@click.option("--block-size", type=int, default=16)
@click.option("--num-gpu-blocks-override", type=int, default=1024)
@click.option("--data-parallel-size", type=int, default=1)
@click.option("--max-model-len", type=int, default=0)
@click.option("--max-num-seqs", type=int, default=256)
@click.option("--kv-events-config", default="{}")
def serve(
    model: str,
    host: str,
    port: int,
    served_model_name: str | None,
    block_size: int,
    num_gpu_blocks_override: int,
    data_parallel_size: int,
    max_model_len: int,
    max_num_seqs: int,
    kv_events_config: str,
) -> None:
    """Becomes the emulated engine."""
    options = {
        "--host": host,
        "--port": port,
        "--model": served_model_name or model,
        "--block-size": block_size,
        "--blocks": num_gpu_blocks_override,
        "--ranks": data_parallel_size,
        "--max-model-len": max_model_len,
        "--max-num-seqs": max_num_seqs,
    }
    arguments = [str(word) for option in options.items() for word in option]
    emulator([*arguments, *events(json.loads(kv_events_config))], "vllm serve")


def events(config: dict[str, Any]) -> list[str]:
    """The emulator's options for vLLM's setting."""
    if not config.get("enable_kv_cache_events"):
        return ["--events-connect", "--events-port", str(NOWHERE), "--no-replay"]
    endpoint = urlsplit(config.get("endpoint", "tcp://*:5557"))
    options = ["--events-port", str(endpoint.port), "--topic", config.get("topic", "")]
    if "*" not in endpoint.netloc:
        options.append("--events-connect")
    replay = config.get("replay_endpoint")
    if replay is None:
        return [*options, "--no-replay"]
    return [*options, "--replay-port", str(urlsplit(replay).port)]


if __name__ == "__main__":
    sys.exit(main())
