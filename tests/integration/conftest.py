"""Fixtures of the process tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.integration.fleet import Fleet, fleet_in


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    """Starts processes for one test and ends them all."""
    async with fleet_in(tmp_path) as started:
        yield started
