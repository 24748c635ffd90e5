"""Writes container images without a container tool: an archive in OCI's image layout.

Layers are plain tars, not compressed: they are made and unpacked on one machine. Everything that could differ between
two builds of the same files (order, owners, times) is fixed, so that the same files give the same digests.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Tree = Mapping[str, "Path | bytes"]
"""Paths in the image, relative to its root, and what lies there: a file of ours (links stay links), or bytes. A path
that ends with a slash is a folder."""

PATH = "/usr/local/bin:/usr/bin:/bin"
NOBODY = "65532:65532"
"""Numeric, so that `runAsNonRoot` can be checked without the image's /etc/passwd."""

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True)
class Layer:
    """A tar in a file. `digest`: of its bytes."""

    file: Path
    digest: str


@dataclass(frozen=True)
class Image:
    """What its containers run, unless told otherwise."""

    name: str
    """With its tag, such as 'localhost/relay:1'."""
    entrypoint: tuple[str, ...]
    layers: Sequence[Layer]
    user: str = NOBODY
    environment: Mapping[str, str] = field(default_factory=dict)


def write_layer(folder: Path, tree: Tree) -> Layer:
    """Packs the files into `folder`, under their digest."""
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / "draft"
    with tarfile.open(draft, "w", format=tarfile.PAX_FORMAT) as archive:
        for name in sorted(tree):
            _add(archive, name, tree[name])
    digest = hashlib.sha256()
    with draft.open("rb") as packed:
        while chunk := packed.read(1 << 20):
            digest.update(chunk)
    file = draft.rename(folder / f"{digest.hexdigest()}.tar")
    return Layer(file, digest.hexdigest())


def write_archive(file: Path, images: Iterable[Image]) -> None:
    """All images in one archive; a layer that they share is in it once."""
    layers: dict[str, Path] = {}
    documents: dict[str, bytes] = {}
    manifests = []
    for image in images:
        layers.update((layer.digest, layer.file) for layer in image.layers)
        config = _document(documents, _config(image), "config")
        described = [
            {
                "mediaType": "application/vnd.oci.image.layer.v1.tar",
                "digest": f"sha256:{layer.digest}",
                "size": layer.file.stat().st_size,
            }
            for layer in image.layers
        ]
        manifest = _document(
            documents,
            {
                "schemaVersion": 2,
                "mediaType": "application/vnd.oci.image.manifest.v1+json",
                "config": config,
                "layers": described,
            },
            "manifest",
        )
        manifests.append({**manifest, "annotations": {"io.containerd.image.name": image.name}})
    index = {"schemaVersion": 2, "manifests": manifests}
    draft = file.with_suffix(".draft")
    with tarfile.open(draft, "w") as archive:
        _add(archive, "oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
        _add(archive, "index.json", json.dumps(index).encode())
        for digest, document in documents.items():
            _add(archive, f"blobs/sha256/{digest}", document)
        for digest, path in layers.items():
            archive.add(path, f"blobs/sha256/{digest}")
    draft.rename(file)


def _config(image: Image) -> dict[str, Any]:
    environment = {"PATH": PATH, **image.environment}
    return {
        "architecture": _ARCHITECTURES.get(platform.machine(), platform.machine()),
        "os": "linux",
        "config": {
            "Entrypoint": list(image.entrypoint),
            "Env": [f"{name}={value}" for name, value in environment.items()],
            "User": image.user,
            "WorkingDir": "/",
        },
        "rootfs": {
            "type": "layers",
            "diff_ids": [f"sha256:{layer.digest}" for layer in image.layers],
        },
    }


def _document(documents: dict[str, bytes], content: Any, kind: str) -> dict[str, Any]:
    raw = json.dumps(content, sort_keys=True).encode()
    digest = hashlib.sha256(raw).hexdigest()
    documents[digest] = raw
    return {
        "mediaType": f"application/vnd.oci.image.{kind}.v1+json",
        "digest": f"sha256:{digest}",
        "size": len(raw),
    }


def _add(archive: tarfile.TarFile, name: str, content: Path | bytes) -> None:
    entry = tarfile.TarInfo(name.rstrip("/"))
    if name.endswith("/"):
        entry.type = tarfile.DIRTYPE
        entry.mode = 0o1777 if name == "tmp/" else 0o755
        archive.addfile(entry)
    elif isinstance(content, bytes):
        # A script starts with its interpreter; what else is made in memory is only read.
        entry.mode = 0o755 if content.startswith(b"#!") else 0o644
        entry.size = len(content)
        archive.addfile(entry, io.BytesIO(content))
    elif content.is_symlink():
        entry.type = tarfile.SYMTYPE
        entry.linkname = str(content.readlink())
        archive.addfile(entry)
    else:
        state = content.stat()
        entry.mode = 0o755 if state.st_mode & 0o100 else 0o644
        entry.size = state.st_size
        with content.open("rb") as source:
            archive.addfile(entry, source)
