"""SGLang's command line, as 0.5.23 reads it. Pure."""

from __future__ import annotations

from ..spec import Engine
from .commandline import Words, program
from .flags import Unreadable
from .reading import Reading

KIND = Engine.SGLANG
HTTP_PORT = 30_000


def arguments(words: Words) -> Words | None:
    """The words after what starts a server; None if these start none."""
    for index, word in enumerate(words):
        rest = words[index + 1 :]
        if word == "-m" and rest[:1] == ("sglang.launch_server",):
            return rest[1:]
        if program(word) == "sglang" and rest[:1] == ("serve",):
            return rest[1:]
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
        reading.block_tokens = flags.number("--page-size") or 0
        reading.serving = not flags.number("--node-rank")
        mode = flags.text("--disaggregation-mode")
    except Unreadable:
        # The fleet names the model, and the relay learns the page's size.
        mode = None
    if mode == "decode":
        reading.found(
            "DecodesOnly",
            "--disaggregation-mode decode: it takes each prompt from another pod; let the pool select the pods "
            "that compute prompts",
        )
    if flags.has("--disable-radix-cache"):
        reading.found("PrefixCachingOff", "remove --disable-radix-cache: nothing is reused")
    if flags.opaque:
        return
    if not flags.has("--enable-cache-report"):
        reading.found(
            "ReuseNotReported",
            "add --enable-cache-report: clients aren't told what was reused, and can't report it",
            severe=False,
        )
    if not flags.has("--enable-metrics"):
        reading.found(
            "LoadNotReported",
            "add --enable-metrics: its load, and whether its model is hybrid, is not known",
            severe=False,
        )


def _ranks(reading: Reading) -> None:
    flags = reading.flags
    # Each independent cache publishes on a port of its own, whichever way the caches were asked for.
    size = max(
        flags.number("--dp-size", "--data-parallel-size", "--dp") or 1,
        flags.number("--attn-dp-size", "--attention-data-parallel-size") or 1,
    )
    several = (flags.number("--nnodes") or 1) > 1 and size > 1
    if not several and not (size == 1 and flags.opaque):
        reading.ranks = size
    elif reading.pool.ranks == 1:
        raise Unreadable("ranks")


def _events(reading: Reading) -> None:
    config = reading.flags.settings("--kv-events-config")
    bind = (config or {}).get("bind")

    def binds(endpoint: str) -> bool:
        if bind is not None:
            return bool(bind)
        return any(wildcard in endpoint for wildcard in ("*", "::", "0.0.0.0"))

    reading.read_events(config, binds, publishes=(config or {}).get("publisher") == "zmq")
