"""Replays requests against schedulers and engines in simulated time. One run is its seed's alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from .fleet import FleetSpec
from .options import Options
from .playing import Playing
from .results import Run
from .traces import Request


def simulate(
    requests: Sequence[Request],
    fleet: FleetSpec,
    options: Options,
    seed: int,
    progress: Callable[[int], None] = lambda ended: None,
) -> Run:
    """Replays `requests` (in order of `at`, in blocks of `options.block_tokens`); `progress` hears how many have ended."""
    began = time.perf_counter()
    playing = Playing(requests, fleet, options, seed, progress)
    playing.play()
    return playing.run(time.perf_counter() - began)
