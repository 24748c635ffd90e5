"""Did a prediction rest on what the relay knew? What a scheduler says that lags behind is no evidence against a stream.

Pure.
"""

from __future__ import annotations

import math
from collections import deque

from servingfleet_protos.v1.stream_pb2 import Outcome

LAG_S = 0.5
"""What a scheduler may not know yet: deltas are milliseconds on their way, and told in order."""
RESOLUTION_S = 0.25
MOMENTS = 4096
"""17 minutes of a busy engine: outcomes of older decisions are late."""


class Lag:
    """How far one rank's batches were applied, and when."""

    def __init__(self) -> None:
        self._moments: deque[tuple[float, int, int]] = deque(maxlen=MOMENTS)
        """Time, incarnation, number of the last batch applied within `RESOLUTION_S` from then on."""

    def applied(self, incarnation: int, seq: int, now: float) -> None:
        """A batch was applied."""
        last = self._moments[-1] if self._moments else (-math.inf, 0, 0)
        if incarnation == last[1] and now - last[0] < RESOLUTION_S:
            self._moments[-1] = (last[0], incarnation, seq)
        else:
            self._moments.append((now, incarnation, seq))

    def rested(self, outcome: Outcome, incarnation: int, now: float) -> bool:
        """Whether a prediction rested on all that was applied `LAG_S` before it, of this life of the engine.

        An earlier release of the scheduler does not say: it is believed.
        """
        if not outcome.incarnation:
            return True
        if outcome.incarnation != incarnation or not 0.0 <= outcome.age_s < math.inf:
            return False
        before = now - outcome.age_s - LAG_S
        for time, life, seq in reversed(self._moments):
            if time <= before:
                known = outcome.HasField("engine_seq") and outcome.engine_seq >= seq
                return life == incarnation and known
        # So long ago nothing had been applied, or it is forgotten.
        return len(self._moments) < MOMENTS
