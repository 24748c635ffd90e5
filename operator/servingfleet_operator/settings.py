"""What the operator is told at its start: frozen, units in the names, reasons beside the defaults."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class OperatorSettings:
    """Settings of one release of the operator. The chart fills them in, by way of `__main__`."""

    instance: str
    """Tells the objects of this release from another's: "<release namespace>.<release>"."""
    namespace: str
    """Where the operator runs. The keys of the fleets' CAs stay there."""
    fullname: str
    """Prefix of the objects that the chart made, and of the CA keys."""
    relay_image: str
    scheduler_image: str
    image_pull_policy: str = "IfNotPresent"
    image_pull_secrets: tuple[str, ...] = ()
    """Names of Secrets, expected in every namespace that has a fleet."""
    allowed_images: tuple[str, ...] = ()
    """Patterns (`*` matches anything, `/` too) that an image in a fleet's spec must match. (): none may be named."""
    watch_namespaces: tuple[str, ...] = ()
    """(): every namespace."""
    webhook_service: str = ""
    """Service by which the API server reaches the webhook. Empty: as `fullname`."""
    webhook_port: int = 9443
    http_port: int = 9090
    """Of /metrics, /healthz and /readyz."""
    crd_dir: str = "/crds"
    """Definitions that the operator brings up to date at its start."""
    log_level: str = "info"
