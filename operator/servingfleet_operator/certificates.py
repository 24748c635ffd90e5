"""What must be made once and kept: certificate authorities, what servers show, the key of decision ids. All in Secrets.

What certificates should be is `pki`'s to say. The authorities' keys stay in the operator's namespace; a fleet's namespace
holds what its scheduler shows.
"""

from __future__ import annotations

import logging
import secrets
from base64 import b64decode, b64encode
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from . import names, pki
from .children import Children
from .cluster import Cluster
from .deployment import DECISION_KEY
from .kinds import SECRET
from .settings import OperatorSettings
from .spec import Fleet
from .store import Body, Key

log = logging.getLogger(__name__)

KEY_BYTES = 32
LEAST_KEY_BYTES = 16
"""The scheduler refuses shorter ones."""

FLEET_NAMESPACE_LABEL = f"{names.GROUP}/ca-for-namespace"
FLEET_LABEL = f"{names.GROUP}/ca-for-fleet"


@dataclass(frozen=True)
class Material:
    """What one fleet's children are made with."""

    certificates: pki.Certificates | None
    """None: it talks in plain text."""
    decision_key: bytes
    due: datetime | None
    """When its certificates are to be looked at again. None: it has none."""


class Certificates:
    """The Secrets of all fleets, and the webhook's."""

    def __init__(
        self,
        cluster: Cluster,
        children: Children,
        settings: OperatorSettings,
        today: Callable[[], datetime],
    ) -> None:
        self._cluster = cluster
        self._children = children
        self._settings = settings
        self._today = today
        self._kept: dict[str, Material] = {}

    async def of(self, fleet: Fleet, *, trust: bool) -> Material:
        """The fleet's material, made where it is missing; `Children` writes what belongs into its namespace.

        trust: the Secrets are taken to be still as they were. Raises as `Children.apply` does.
        """
        now = self._today()
        kept = self._kept.get(fleet.uid)
        if (
            trust
            and kept is not None
            and (kept.certificates is not None) == fleet.secured
            and (kept.due is None or now < kept.due)
        ):
            return kept
        decision = await self._children.find(fleet, SECRET, names.decision_key(fleet.name))
        key = (_content(decision) or {}).get(DECISION_KEY, b"")
        if len(key) < LEAST_KEY_BYTES:
            key = secrets.token_bytes(KEY_BYTES)
        certificates, due = None, None
        if fleet.secured:
            served = await self._children.find(fleet, SECRET, names.tls(fleet.name))
            plan = await self._plan(
                names.ca_secret(self._settings.fullname, fleet.name, fleet.namespace),
                served,
                names.certificate_names(fleet.name, fleet.namespace),
                f"{fleet.namespace}/{fleet.name}",
                {FLEET_NAMESPACE_LABEL: fleet.namespace, FLEET_LABEL: fleet.name},
            )
            certificates, due = plan.certificates, plan.due
        material = Material(certificates, key, due)
        self._kept[fleet.uid] = material
        return material

    def known(self, fleet: Fleet) -> pki.Certificates | None:
        """The fleet's certificates as of its last reconcile."""
        kept = self._kept.get(fleet.uid)
        return None if kept is None else kept.certificates

    async def webhook(self) -> pki.Plan:
        """The webhook's certificate, made where it is missing. Raises ClusterError."""
        name = self.webhook_secret
        served = await self._cluster.find(SECRET, name, self._settings.namespace)
        service = self._settings.webhook_service or self._settings.fullname
        host = f"{service}.{self._settings.namespace}.svc"
        plan = await self._plan(
            f"{self._settings.fullname}-webhook-ca",
            served,
            (host, f"{host}.cluster.local"),
            f"webhook {self._settings.instance}",
            {},
        )
        if plan.leaf != _content(served):
            await self._write(name, served, {}, plan.leaf, "kubernetes.io/tls")
        return plan

    @property
    def webhook_secret(self) -> str:
        """Name of the Secret that every replica serves the webhook with."""
        return f"{self._settings.fullname}-webhook-tls"

    async def served(self) -> pki.Certificates | None:
        """What the webhook is to show, as the leading replica left it; None: it has not yet. Raises ClusterError."""
        held = _content(
            await self._cluster.find(SECRET, self.webhook_secret, self._settings.namespace)
        )
        if held is None or not {pki.BUNDLE, pki.CERT, pki.KEY} <= held.keys():
            return None
        return pki.Certificates(held[pki.BUNDLE], held[pki.CERT], held[pki.KEY])

    async def prune(self, fleets: Iterable[Key]) -> None:
        """Removes the authorities of fleets that are not among these. Raises ClusterError."""
        keep = {(key.namespace, key.name) for key in fleets}
        selector = f"{FLEET_LABEL},{names.OPERATOR_LABEL}={self._label}"
        listing = await self._cluster.list(
            SECRET,
            self._settings.namespace,
            labels=selector,
            # Their content is none of this one's business.
            keep=lambda body: {"metadata": body["metadata"]},
        )
        for secret in listing.items:
            metadata = secret["metadata"]
            labels = metadata["labels"]
            fleet = (labels.get(FLEET_NAMESPACE_LABEL, ""), labels[FLEET_LABEL])
            if fleet not in keep:
                await self._cluster.delete(
                    SECRET, metadata["name"], metadata["namespace"], metadata["uid"]
                )
                log.info("authority removed", extra={"namespace": fleet[0], "fleet": fleet[1]})

    def keep_only(self, uids: Container[str]) -> None:
        """Forgets the material of other fleets than these."""
        self._kept = {uid: material for uid, material in self._kept.items() if uid in uids}

    @property
    def _label(self) -> str:
        return names.label_value(self._settings.instance)

    async def _plan(
        self,
        authority_name: str,
        served: Body | None,
        hosts: tuple[str, ...],
        owner: str,
        labels: Mapping[str, str],
    ) -> pki.Plan:
        authority = await self._cluster.find(SECRET, authority_name, self._settings.namespace)
        plan = pki.plan(_content(authority), _content(served), hosts, owner, self._today())
        if plan.authority != _content(authority):
            await self._write(authority_name, authority, labels, plan.authority, "Opaque")
            log.info("authority written", extra={"owner": owner, "secret": authority_name})
        return plan

    async def _write(
        self,
        name: str,
        present: Body | None,
        labels: Mapping[str, str],
        held: Mapping[str, bytes],
        kind: str,
    ) -> None:
        metadata: dict[str, Any] = {
            "name": name,
            "namespace": self._settings.namespace,
            "labels": {
                names.MANAGED_BY_LABEL: names.MANAGED_BY,
                names.OPERATOR_LABEL: self._label,
                **labels,
            },
        }
        if present is not None:
            metadata["uid"] = present["metadata"]["uid"]
        data = {key: b64encode(value).decode() for key, value in sorted(held.items())}
        await self._cluster.apply(
            {"apiVersion": "v1", "kind": "Secret", "type": kind, "metadata": metadata, "data": data}
        )


def _content(secret: Body | None) -> Mapping[str, bytes] | None:
    """What a Secret holds; None where there is none. What can't be read counts as absent."""
    if secret is None:
        return None
    held: dict[str, bytes] = {}
    for key, value in (secret.get("data") or {}).items():
        try:
            held[key] = b64decode(value)
        except ValueError:
            continue
    return held
