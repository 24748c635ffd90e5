"""Fixtures of the process tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.apiserver import ApiServer, api_server
from tests.integration.fleet import Fleet, fleet_in


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    """Starts processes for one test and ends them all."""
    async with fleet_in(tmp_path) as started:
        yield started


@pytest.fixture
async def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ApiServer]:
    """A stand-in of the API server, which processes find by their environment."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    async with api_server(tmp_path) as started:
        monkeypatch.setenv("KUBECONFIG", str(started.kubeconfig))
        yield started
