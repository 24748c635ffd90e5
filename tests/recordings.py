"""Where the recorded engine streams and the public traces lie, for tests that need them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def recordings_dir() -> Path:
    """The folder of recorded streams: $SERVINGFLEET_RECORDINGS, else ../shared/data/streams.

    Skips the calling test where they are missing; fails it in CI, where they must be there.
    """
    return _folder("SERVINGFLEET_RECORDINGS", "streams")


def traces_dir() -> Path:
    """The folder of public request traces: $SERVINGFLEET_TRACES, else ../shared/data/traces. Likewise."""
    return _folder("SERVINGFLEET_TRACES", "traces")


def _folder(variable: str, name: str) -> Path:
    named = os.environ.get(variable)
    path = Path(named) if named else ROOT.parent / "shared" / "data" / name
    if path.is_dir():
        return path
    missing = f"no {name} at {path}: set {variable} to their folder"
    if os.environ.get("CI"):
        pytest.fail(missing)
    pytest.skip(missing)
