"""Builds the project's wheel, as a release would, from a copy of the sources."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path

ROOT = Path(__file__).parents[3]
PATIENCE_S = 900.0
_NOT_SOURCES = ("__pycache__", "target", "build", "*.egg-info", "*.so", "*.pyc")


class WheelFailed(RuntimeError):
    """It could not be built: the text holds the end of pip's output."""


def wheel(folder: Path) -> Path:
    """The wheel of the sources as they are. Built anew only when they have changed. Raises WheelFailed."""
    digest = _digest()
    finished = folder / digest
    if not finished.exists():
        shutil.rmtree(folder, ignore_errors=True)
        sources = folder / "sources"
        for path in _sources():
            copied = sources / path.relative_to(ROOT)
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, copied)
        draft = folder / "draft"
        command = [
            *(sys.executable, "-m", "pip", "wheel", "--disable-pip-version-check"),
            *("--no-deps", "--no-build-isolation", "--wheel-dir", str(draft), str(sources)),
        ]
        # What the checkout has compiled of other crates serves here, too.
        settings = {**os.environ, "CARGO_TARGET_DIR": str(ROOT / "core" / "target")}
        ran = subprocess.run(
            command, env=settings, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        if ran.returncode:
            tail = "\n".join((ran.stdout + ran.stderr).splitlines()[-30:])
            raise WheelFailed(f"pip wheel ended with status {ran.returncode}:\n{tail}")
        draft.rename(finished)
    return next(finished.glob("*.whl"))


def unpacked(built: Path, folder: Path) -> Path:
    """The folder with the wheel's files."""
    if not folder.exists():
        with zipfile.ZipFile(built) as archive:
            archive.extractall(folder)
    return folder


def scripts(site: Path) -> dict[str, str]:
    """Console scripts of the unpacked wheel: name -> 'module:function'."""
    declared = ConfigParser()
    declared.read(next(site.glob("*.dist-info")) / "entry_points.txt")
    return dict(declared["console_scripts"])


def _sources() -> Iterator[Path]:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())
    roots = declared["tool"]["setuptools"]["packages"]["find"]["where"]
    yield from (ROOT / name for name in ("pyproject.toml", "README.md"))
    for root in roots:
        for folder, folders, files in os.walk(ROOT / root):
            ignored = shutil.ignore_patterns(*_NOT_SOURCES)(folder, [*folders, *files])
            folders[:] = sorted(set(folders) - ignored)
            yield from (Path(folder, name) for name in sorted(set(files) - ignored))


def _digest() -> str:
    digest = hashlib.sha256()
    for path in _sources():
        digest.update(f"{path.relative_to(ROOT)}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]
