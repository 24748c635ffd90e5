"""The one clock of the process: seconds since the epoch that never fall."""

from __future__ import annotations

import time


class Clock:
    """Starts at the wall clock and goes on monotonically: comparable between schedulers, safe for intervals."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def __call__(self) -> float:
        return time.monotonic() + self._offset
