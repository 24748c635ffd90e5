"""vLLM's command line, as 0.32 reads it. Pure."""

from __future__ import annotations

from ..spec import Engine
from .commandline import Words, literals, program
from .flags import Unreadable
from .reading import Reading

KIND = Engine.VLLM
HTTP_PORT = 8000


def arguments(words: Words) -> Words | None:
    """The words after what starts a server; None if these start none."""
    for index, word in enumerate(words):
        rest = words[index + 1 :]
        if program(word) == "vllm" and rest[:1] == ("serve",):
            return rest[1:]
        if word == "-m" and rest[:1] and rest[0].startswith("vllm.entrypoints."):
            if rest[0].endswith(".api_server"):
                return rest[1:]
            if rest[:2] == ("vllm.entrypoints.cli.main", "serve"):
                return rest[2:]
    return None


def read(reading: Reading) -> None:
    """Corrects the reading by what the flags say."""
    flags = reading.flags
    # The file's flags are added to these.
    flags.opaque |= flags.has("--config")
    reading.attempt("--host or --port", "ports.http", lambda: reading.read_http(HTTP_PORT))
    reading.attempt("the number of ranks", "ranks", lambda: _ranks(reading))
    reading.attempt(
        "--kv-events-config",
        "eventsFrom, ports.events and ports.replay",
        lambda: _events(reading),
    )
    try:
        reading.read_model()
        reading.block_tokens = flags.number("--block-size") or 0
        transfer = flags.settings("--kv-transfer-config") or {}
    except Unreadable:
        # The fleet names the model, and the relay learns the block's size.
        transfer = {}
    if transfer.get("kv_role") == "kv_consumer":
        reading.found(
            "DecodesOnly",
            "kv_role kv_consumer: it takes each prompt from another pod, and reports that as reuse; let the pool "
            "select the pods that compute prompts",
        )
    if flags.has("--no-enable-prefix-caching"):
        reading.found("PrefixCachingOff", "remove --no-enable-prefix-caching: nothing is reused")
    if not flags.has("--enable-prompt-tokens-details") and not flags.opaque:
        reading.found(
            "ReuseNotReported",
            "add --enable-prompt-tokens-details: clients aren't told what was reused, and can't report it",
            severe=False,
        )
    if flags.has("--data-parallel-multi-port-external-lb", "-dpm"):
        reading.found(
            "RanksHavePorts",
            "remove --data-parallel-multi-port-external-lb: requests go to one port, and name the rank",
        )
    reading.serving = not flags.has("--headless")


def _ranks(reading: Reading) -> None:
    flags = reading.flags
    size = flags.number("--data-parallel-size", "-dp")
    local = flags.number("--data-parallel-size-local", "-dpl")
    rank = flags.number("--data-parallel-rank", "-dpn")
    start = flags.number("--data-parallel-start-rank", "-dpr")
    if rank is not None:
        reading.ranks, reading.first_rank = 1, rank
    elif local is not None:
        reading.ranks, reading.first_rank = local or 1, start or 0
    elif size is None:
        environment = literals(reading.container)
        if flags.opaque or "VLLM_DP_SIZE" in environment or "VLLM_DP_RANK" in environment:
            _leave(reading)
        else:
            reading.ranks = 1
    elif size > 1 and _spread(reading):
        _leave(reading)
    else:
        reading.ranks = size or 1


def _spread(reading: Reading) -> bool:
    """The ranks are not all in this pod, and which are is worked out from more than flags."""
    flags = reading.flags
    return (
        (flags.number("--nnodes") or 1) > 1
        or flags.text("--data-parallel-backend", "-dpb") == "ray"
        or flags.has("--data-parallel-external-lb", "-dpe", "--data-parallel-hybrid-lb", "-dph")
    )


def _leave(reading: Reading) -> None:
    # A pool that says more than one rank has been told.
    if reading.pool.ranks == 1:
        raise Unreadable("ranks")


def _events(reading: Reading) -> None:
    config = reading.flags.settings("--kv-events-config")
    enabled = config is not None and bool(config.get("enable_kv_cache_events"))
    publishes = enabled and (config or {}).get("publisher") in ("zmq", None)
    reading.read_events(config, _binds, publishes=publishes)


def _binds(endpoint: str) -> bool:
    # Also tcp://0.0.0.0 is connected to.
    return "*" in endpoint or "::" in endpoint
