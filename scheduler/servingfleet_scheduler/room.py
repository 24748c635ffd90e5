"""How long a prompt waits for room in the GPU's cache, where running requests hold nearly all of it.

Pure. A request gives its room back when it ends: so room is free at the rate at which requests end. Blocks that are only
kept for reuse are room, as engines count them.
"""

from __future__ import annotations

from .backlog import MAX_WAITING, READING_JITTER_S, Load

CROWDED_SHARE = 0.5
"""Below this usage a prompt finds room, unless it fills half of the cache by itself."""
MEMORY = 1 / 16
"""Weight of the last request's stay: lengths of answers spread widely."""


class Room:
    """The GPU cache of one rank."""

    def __init__(self) -> None:
        self._load: Load | None = None
        self._coming: dict[str, tuple[float, int]] = {}
        """When, and tokens of it: prompts that were not yet in the cache when it was read."""
        self._tokens = 0
        self._stay_s = 0.0
        """From a first token to the end; 0: nobody has told."""

    @property
    def crowded(self) -> bool:
        """Whether room may be short."""
        load = self._load
        return load is not None and (load.kv_usage or 0.0) > CROWDED_SHARE

    def wait_s(self, now: float, tokens: int, capacity: int, *, stale_s: float) -> float:
        """Until so many tokens have room behind those that come before, of `capacity` in all. 0 where nothing is known."""
        load = self._load
        if load is None or not load.kv_usage or not self._stay_s or not capacity:
            return 0.0
        age = now - load.read_at
        if age > stale_s:
            return 0.0
        used = load.kv_usage * capacity
        freed_per_s = used / self._stay_s
        return max(0.0, (used + self._tokens + tokens - capacity) / freed_per_s - age)

    def sent(self, decision_id: str, at: float, tokens: int) -> None:
        """A prompt was sent there."""
        if self._load is None or decision_id in self._coming:
            return
        if len(self._coming) >= MAX_WAITING:
            self.ended(next(iter(self._coming)))
        self._coming[decision_id] = (at, tokens)
        self._tokens += tokens

    def ended(self, decision_id: str, stay_s: float | None = None) -> None:
        """It has gone; `stay_s` after its first token, where that is known."""
        self._tokens -= self._coming.pop(decision_id, (0.0, 0))[1]
        if stay_s is not None:
            weight = MEMORY if self._stay_s else 1.0
            self._stay_s += weight * (stay_s - self._stay_s)

    def report(self, load: Load, jitter_s: float = 0.0) -> None:
        """What the engine said: what had begun by then is in its usage. Nothing, if it is not newer than the last."""
        if self._load is not None and load.read_at <= self._load.read_at:
            return
        self._load = load
        horizon = load.read_at - READING_JITTER_S - jitter_s
        before = [key for key, (at, _) in self._coming.items() if at <= horizon]
        for key in before[: max(0, len(before) - (load.waiting_requests or 0))]:
            self.ended(key)
