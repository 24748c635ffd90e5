"""Regenerates the committed Python of every .proto file: `python protos/generate.py [--check]`."""

from __future__ import annotations

import filecmp
import sys
import tempfile
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

PROTOS = Path(__file__).parent
KINDS = ("python", "grpc_python", "mypy", "mypy_grpc")


def generate(out: Path) -> int:
    """Writes the generated modules below `out`; returns protoc's exit status."""
    sources = sorted(str(path) for path in PROTOS.glob("servingfleet_protos/**/*.proto"))
    well_known = resources.files("grpc_tools") / "_proto"
    outputs = [f"--{kind}_out={out}" for kind in KINDS]
    # Named by path, so that it works without an activated environment.
    scripts = Path(sys.executable).parent
    plugins = [
        f"--plugin=protoc-gen-{kind}={scripts / f'protoc-gen-{kind}'}"
        for kind in ("mypy", "mypy_grpc")
    ]
    paths = [f"--proto_path={PROTOS}", f"--proto_path={well_known}"]
    return int(protoc.main(["protoc", *paths, *plugins, *outputs, *sources]))


def stale() -> list[str]:
    """Generated files that differ from what the .proto files give now. Raises on protoc's failure."""
    with tempfile.TemporaryDirectory() as fresh:
        if generate(Path(fresh)):
            raise SystemExit("protoc failed")
        made = {path.relative_to(fresh) for path in Path(fresh).rglob("*.py*")}
        kept = {path.relative_to(PROTOS) for path in PROTOS.rglob("*_pb2*.py*")}
        kept = {path for path in kept if "__pycache__" not in path.parts}
        return sorted(
            str(path)
            for path in made | kept
            if path not in made
            or path not in kept
            or not filecmp.cmp(Path(fresh) / path, PROTOS / path, shallow=False)
        )


def main(arguments: list[str]) -> int:
    """Returns the exit status: with `--check`, 1 if anything committed is stale."""
    if arguments != ["--check"]:
        return generate(PROTOS)
    old = stale()
    if old:
        print("stale, run `make generate`:", *old, sep="\n  ")
    return 1 if old else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
