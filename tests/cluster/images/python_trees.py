"""The files of a Python process: an interpreter, the distributions that it needs, and the libraries of both.

They are those of the Python that runs the tests: the images hold exactly the versions that were tested, nothing is
downloaded, and no distribution of Linux is asked for.
"""

from __future__ import annotations

import py_compile
import re
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path, PurePosixPath

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from .oci import Tree
from .wheel import ROOT

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
SITE = f"usr/local/lib/python{VERSION}/site-packages"
BIN = "usr/local/bin"
TAG = sys.implementation.cache_tag

_LEFT_OUT = {
    "__pycache__",
    "ensurepip",
    "idlelib",
    "lib2to3",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
    "tkinter",
    "turtledemo",
}
_LEFT_OUT_MODULES = ("_tkinter.", "nis.", "_test", "_ctypes_test.", "_xxtestfuzz.", "xxlimited")


def interpreter() -> dict[str, Path | bytes]:
    """Python, its standard library and the C library, with the few files that these look for."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    python = Path(sys.executable).resolve()
    tree: dict[str, Path | bytes] = {
        f"{BIN}/python{VERSION}": python,
        "etc/passwd": b"nobody:x:65532:65532::/:/sbin/nologin\n",
        "etc/group": b"nobody:x:65532:\n",
        "etc/nsswitch.conf": b"hosts: files dns\n",
        "tmp/": b"",
        "proc/": b"",
        "sys/": b"",
        "dev/": b"",
    }
    tree |= _files(stdlib, f"usr/local/lib/python{VERSION}")
    # Files, since a link would have to be made on disk first.
    tree |= {f"{BIN}/python3": python, f"{BIN}/python": python}
    return tree | _libraries(tree)


def requirements(extra: str) -> set[str]:
    """Canonical names of the distributions that the project with one extra needs, itself left out.

    The project's own needs are read from its sources: what is installed of it may be older.
    """
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    project = canonicalize_name(declared["name"])
    found: set[str] = set()
    queue = [(project, frozenset({extra}))]
    seen: set[tuple[str, frozenset[str]]] = set()
    while queue:
        name, extras = queue.pop()
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        found.add(name)
        if name == project:
            lines = list(declared["dependencies"])
            lines += [line for one in extras for line in declared["optional-dependencies"][one]]
        else:
            lines = metadata.distribution(name).requires or []
        for wanted in map(Requirement, lines):
            if wanted.marker is None or any(
                wanted.marker.evaluate({"extra": one}) for one in (*extras, "")
            ):
                queue.append((canonicalize_name(wanted.name), frozenset(wanted.extras)))
    return found - {project}


def distributions(names: Iterable[str]) -> dict[str, Path | bytes]:
    """The installed files of distributions, and the libraries of the system that they load."""
    tree: dict[str, Path | bytes] = {}
    for name in sorted(names):
        distribution = metadata.distribution(name)
        for file in distribution.files or ():
            path = PurePosixPath(file)
            # Scripts name our interpreter, and compiled files are made for our paths.
            if ".." in path.parts or path.suffix == ".pyc":
                continue
            tree[f"{SITE}/{path}"] = Path(str(distribution.locate_file(file)))
    return tree | _libraries(tree)


def compiled(tree: Tree) -> Tree:
    """The tree with its modules compiled: containers have nowhere to keep what they compile, and start sooner."""
    whole = dict(tree)
    with tempfile.TemporaryDirectory() as folder:
        draft = Path(folder, "draft")
        for name, content in tree.items():
            if name.endswith(".py") and isinstance(content, Path):
                try:
                    py_compile.compile(
                        str(content),
                        cfile=str(draft),
                        dfile=f"/{name}",
                        doraise=True,
                        # Of the source's hash, unchecked: the same bytes whenever they are made.
                        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
                    )
                except py_compile.PyCompileError:
                    continue  # a template, or written for another Python
                path = PurePosixPath(name)
                whole[f"{path.parent}/__pycache__/{path.stem}.{TAG}.pyc"] = draft.read_bytes()
    return whole


def _files(folder: Path, prefix: str) -> dict[str, Path | bytes]:
    tree: dict[str, Path | bytes] = {}
    for path in sorted(folder.iterdir()):
        if path.name in _LEFT_OUT or path.name.startswith(("config-", *_LEFT_OUT_MODULES)):
            continue
        if path.is_dir():
            tree |= _files(path, f"{prefix}/{path.name}")
        else:
            tree[f"{prefix}/{path.name}"] = path.resolve()
    return tree


def _libraries(tree: Tree) -> dict[str, Path | bytes]:
    """What the dynamic linker would load for the tree's programs and modules, and the linker itself."""
    files = {content.resolve() for content in tree.values() if isinstance(content, Path)}
    found: dict[str, Path | bytes] = {}
    for file in files:
        if _is_module(file) or file.parent.name == "bin":
            for library in _linked(file):
                if library.resolve() not in files:  # wheels bring some of their own
                    found[str(_where(library)).lstrip("/")] = library.resolve()
    return found


def _is_module(file: Path) -> bool:
    return ".so" in file.suffixes


def _linked(file: Path) -> Iterator[Path]:
    shown = subprocess.run(["ldd", str(file)], capture_output=True, text=True, check=False).stdout
    for path in re.findall(r"(?:=> |^\s*)(/\S+) \(0x", shown, re.MULTILINE):
        yield Path(path)


def _where(library: Path) -> Path:
    """The linker is found by its full path, libraries in the C library's folder."""
    if library.name.startswith("ld-"):
        return library
    return _system_folder() / library.name


def _system_folder() -> Path:
    return next(
        path.parent for path in _linked(Path(sys.executable)) if path.name.startswith("libc.")
    )
