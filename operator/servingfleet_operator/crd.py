"""Brings the definition of ServingFleet up to date: Helm installs a CRD once and never touches it again.

Only forward: a definition that a newer operator wrote is left alone, so that two releases of different age, or a rollback,
don't undo each other.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from . import names
from .cluster import Cluster
from .errors import Refused
from .kinds import CRD

log = logging.getLogger(__name__)

VERSION_ANNOTATION = f"{names.GROUP}/crd-version"
NAME = f"{names.PLURAL}.{names.GROUP}"


def shipped(folder: Path) -> Mapping[str, Any] | None:
    """The definition that came with this operator; None where none did, as from a source tree."""
    for path in sorted(folder.glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            if document and document.get("metadata", {}).get("name") == NAME:
                return dict(document)
    return None


def version(definition: Mapping[str, Any] | None) -> int:
    """The number that grows with every change of the definition; 0: there is none, or it bears none."""
    annotations = ((definition or {}).get("metadata") or {}).get("annotations") or {}
    text = str(annotations.get(VERSION_ANNOTATION, ""))
    return int(text) if text.isdecimal() else 0


async def bring_up_to_date(cluster: Cluster, definition: Mapping[str, Any]) -> None:
    """Applies the definition if it is newer than the cluster's. Raises ClusterError, but for a right that is not given."""
    try:
        present = await cluster.find(CRD, NAME)
        if present is not None and version(present) >= version(definition):
            return
        await cluster.apply(definition)
    except Refused as error:
        log.warning(
            "definition not updated",
            extra={
                "crd": NAME,
                "error": str(error),
                "remedy": "kubectl apply --server-side --force-conflicts -f crds/",
            },
        )
        return
    log.info(
        "definition updated",
        extra={"crd": NAME, "from": version(present), "to": version(definition)},
    )
