"""What a simulated fleet must never do."""

from __future__ import annotations


class Violation(AssertionError):
    """An invariant is broken. `invariant` names it, so that a smaller script can be held to the same."""

    def __init__(self, invariant: str, detail: str) -> None:
        super().__init__(f"{invariant}: {detail}")
        self.invariant = invariant
