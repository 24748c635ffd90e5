"""What a router without events does: it takes for cached what it has sent there itself."""

from __future__ import annotations

from .cost import Cost


class Approximate(Cost):
    """Orders like `cost`. The scheduler gives it candidates whose reuse is from its own memory (`memory`)."""

    name = "approximate"
    from_memory = True
