"""Where the recorded engine streams lie, for tests that need them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def recordings_dir() -> Path:
    """The folder of recorded streams: $SERVINGFLEET_RECORDINGS, else ../shared/data/streams.

    Skips the calling test where they are missing; fails it in CI, where they must be there.
    """
    named = os.environ.get("SERVINGFLEET_RECORDINGS")
    path = Path(named) if named else ROOT.parent / "shared" / "data" / "streams"
    if path.is_dir():
        return path
    missing = f"no recorded streams at {path}: set SERVINGFLEET_RECORDINGS to their folder"
    if os.environ.get("CI"):
        pytest.fail(missing)
    pytest.skip(missing)
