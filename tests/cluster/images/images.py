"""The images of the tests: one for each process, as the Dockerfile's targets, and the emulated engine.

All share the layers of the interpreter, of what every process needs, and of the project; each adds its own extra.
"""

from __future__ import annotations

import fcntl
import hashlib
import platform
import time
from collections.abc import Callable, Collection
from functools import partial
from importlib import metadata
from pathlib import Path

from ..building import Say, home
from .oci import Image, Layer, Tree, write_archive, write_layer
from .python_trees import BIN, SITE, VERSION, compiled, distributions, interpreter, requirements
from .wheel import ROOT, scripts, unpacked, wheel

PREFIX = "localhost/servingfleet"
"""As the chart names them, with `image.registry=localhost`."""
TAG = "test"

EXTRAS = {"relay": "relay", "scheduler": "scheduler", "operator": "operator", "emulator": "sim"}
"""What each image can do: the extra of the project that it carries."""
ENTRYPOINTS = {
    "relay": "servingfleet-relay",
    "scheduler": "servingfleet-scheduler",
    "operator": "servingfleet-operator",
    "emulator": "vllm",
}
SETTINGS = {"PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}
_SCRIPT = "#!/usr/local/bin/python3\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n"


def name(process: str) -> str:
    """The image's name with its tag."""
    return f"{PREFIX}/{process}:{TAG}"


def archive(say: Say) -> Path:
    """One OCI archive with all images, made anew where sources or dependencies have changed. Raises WheelFailed."""
    folder = home() / "images"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        began = time.monotonic()
        built = wheel(folder / "wheel")
        images = _images(folder / "layers", unpacked(built, built.parent / "site"))
        finished = folder / f"images-{_key(*map(repr, images))}.tar"
        if not finished.exists():
            for old in folder.glob("images-*.tar"):
                old.unlink()
            write_archive(finished, images)
            _forget_layers(folder / "layers", images)
            say(f"cluster: images assembled in {time.monotonic() - began:.0f} s")
    return finished


def _images(folder: Path, site: Path) -> list[Image]:
    """Each with its layers, those that change least at the bottom."""
    wanted = {process: requirements(extra) for process, extra in EXTRAS.items()}
    # Distributions that go into the same images share a layer.
    groups: dict[frozenset[str], set[str]] = {}
    for distribution in set.union(*wanted.values()):
        users = frozenset(process for process in wanted if distribution in wanted[process])
        groups.setdefault(users, set()).add(distribution)
    shared = {
        users: _layer(folder, _versions(names), partial(distributions, names))
        for users, names in sorted(
            groups.items(), key=lambda group: (-len(group[0]), *sorted(group[0]))
        )
    }
    python = _layer(folder, platform.python_build(), interpreter)
    project = write_layer(folder, compiled(_project(site)))
    images = []
    for process in wanted:
        needed = [layer for users, layer in shared.items() if process in users]
        start = write_layer(folder, _start(site, process))
        layers = (python, *needed, project, start)
        images.append(Image(name(process), (ENTRYPOINTS[process],), layers, environment=SETTINGS))
    return images


def _project(site: Path) -> Tree:
    """The wheel's files, as pip would install them."""
    files = (path for path in site.rglob("*") if path.is_file())
    return {f"{SITE}/{path.relative_to(site)}": path for path in sorted(files)}


def _start(site: Path, process: str) -> Tree:
    """What only this image has: its command, and the files that it reads."""
    commands = {f"{BIN}/{command}": _script(to) for command, to in scripts(site).items()}
    if process == "emulator":
        return {**commands, f"{BIN}/vllm": Path(__file__).with_name("vllm.py")}
    command = f"{BIN}/servingfleet-{process}"
    crds = (ROOT / "crds").glob("*.yaml") if process == "operator" else ()
    return {command: commands[command], **{f"crds/{path.name}": path for path in crds}}


def _script(target: str) -> bytes:
    module, function = target.split(":")
    return _SCRIPT.format(module=module, function=function).encode()


def _layer(folder: Path, key: Collection[str], tree: Callable[[], Tree]) -> Layer:
    """The layer of that key, packed once. Its digest stands in a file named by the key."""
    recipe = (Path(__file__).with_name(file).read_text() for file in ("oci.py", "python_trees.py"))
    known = folder / f"{_key(*recipe, VERSION, *key)}.digest"
    if known.exists():
        digest = known.read_text()
        if (packed := folder / f"{digest}.tar").exists():
            return Layer(packed, digest)
    layer = write_layer(folder, compiled(tree()))
    known.write_text(layer.digest)
    return layer


def _forget_layers(folder: Path, images: Collection[Image]) -> None:
    used = {layer.file for image in images for layer in image.layers}
    for file in folder.glob("*.tar"):
        if file not in used:
            file.unlink()


def pins() -> list[str]:
    """The distributions of all images as they are installed here, as pip's constraints."""
    return _versions(set.union(*map(requirements, EXTRAS.values())))


def _versions(names: Collection[str]) -> list[str]:
    return [f"{name}=={metadata.version(name)}" for name in sorted(names)]


def _key(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
