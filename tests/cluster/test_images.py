"""The images, those of the Dockerfile and the ones assembled for tests: no cluster needed."""

from __future__ import annotations

import json
import re
import tarfile
import tomllib
from pathlib import Path

import pytest

from tests.cluster.images import vllm
from tests.cluster.images.images import ENTRYPOINTS, EXTRAS
from tests.cluster.images.oci import Image, write_archive, write_layer
from tests.cluster.images.python_trees import requirements
from tests.cluster.images.wheel import ROOT


def test_every_distribution_of_an_image_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.split("==")[0] for line in lines if "==" in line}
    assert set.union(*map(requirements, EXTRAS.values())) <= pinned


def test_the_dockerfile_starts_what_the_assembled_images_start() -> None:
    stages = re.findall(
        r"^FROM runtime AS (\S+)\n(?:.*\n)*?ENTRYPOINT (.*)$",
        (ROOT / "Dockerfile").read_text(),
        re.MULTILINE,
    )
    assert {stage: json.loads(command) for stage, command in stages} == {
        process: [command] for process, command in ENTRYPOINTS.items()
    }


def test_the_dockerfile_builds_the_wheel_from_every_source_root() -> None:
    roots = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = set(roots["tool"]["setuptools"]["packages"]["find"]["where"])
    copied = set(re.findall(r"^COPY (\w+) \1$", (ROOT / "Dockerfile").read_text(), re.MULTILINE))
    sent = {
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] == "!"
    }
    assert wanted == copied
    assert wanted <= sent


def test_an_image_carries_no_other_process_s_dependencies() -> None:
    assert "kopf" in requirements("operator")
    assert {"kopf", "cryptography", "kubernetes"}.isdisjoint(requirements("relay"))
    assert {"kopf", "pyzmq"}.isdisjoint(requirements("scheduler"))


def test_the_same_files_give_the_same_image(tmp_path: Path) -> None:
    def archive(name: str, times: int) -> bytes:
        source = tmp_path / name
        source.mkdir()
        for number in range(3):
            (source / str(number)).write_text("x" * number)
        tree = {f"opt/{path.name}": path for path in list(source.iterdir())[::times]}
        image = Image("localhost/a:1", ("a",), (write_layer(tmp_path / f"{name}-layers", tree),))
        write_archive(tmp_path / f"{name}.tar", [image])
        return _member(tmp_path / f"{name}.tar", "index.json")

    assert archive("first", 1) == archive("second", -1)


def test_a_layer_that_two_images_share_is_kept_once(tmp_path: Path) -> None:
    shared = write_layer(tmp_path, {"etc/shared": b"s" * 10_000})
    images = [
        Image(f"localhost/{name}:1", (name,), (shared, write_layer(tmp_path, {name: b"x"})))
        for name in ("a", "b")
    ]
    write_archive(tmp_path / "both.tar", images)
    with tarfile.open(tmp_path / "both.tar") as packed:
        names = packed.getnames()
    assert names.count(f"blobs/sha256/{shared.digest}") == 1
    index = json.loads(_member(tmp_path / "both.tar", "index.json"))
    assert [entry["annotations"]["io.containerd.image.name"] for entry in index["manifests"]] == [
        "localhost/a:1",
        "localhost/b:1",
    ]


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (
            {"enable_kv_cache_events": True, "publisher": "zmq", "topic": "kv"},
            ["--events-port", "5557", "--topic", "kv", "--no-replay"],
        ),
        (
            {
                "enable_kv_cache_events": True,
                "endpoint": "tcp://127.0.0.1:6557",
                "replay_endpoint": "tcp://127.0.0.1:6657",
            },
            ["--events-port", "6557", "--topic", "", "--events-connect", "--replay-port", "6657"],
        ),
    ],
)
def test_an_address_in_the_events_endpoint_makes_the_engine_connect(
    config: dict[str, object], options: list[str]
) -> None:
    assert vllm.events(config) == options


def _member(archive: Path, name: str) -> bytes:
    with tarfile.open(archive) as packed:
        file = packed.extractfile(name)
        assert file is not None
        return file.read()
