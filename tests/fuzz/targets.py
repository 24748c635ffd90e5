"""Every target by name. A target takes any bytes and raises nothing, unless there is a defect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.fuzz.decoders import DECODERS
from tests.fuzz.numbering import sequence
from tests.fuzz.pipeline import pipeline
from tests.fuzz.relays import session
from tests.fuzz.requests import REQUESTS


@dataclass(frozen=True)
class Target:
    """What is fuzzed, and how long an input may be."""

    run: Callable[[bytes], None]
    max_bytes: int = 512


TARGETS = {
    **{name: Target(run) for name, run in {**DECODERS, **REQUESTS}.items()},
    "sequence": Target(sequence, 256),
    "pipeline": Target(pipeline, 384),
    "session": Target(session, 384),
}
