"""Where the API server is and who we are: the pod's ServiceAccount, or else a kubeconfig.

One answer for the watches, which are kopf's, and for `cluster`.
"""

from __future__ import annotations

import os
from pathlib import Path

import kopf

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


def login() -> kopf.ConnectionInfo:
    """Raises kopf.LoginError where neither is found."""
    token = SERVICE_ACCOUNT / "token"
    if token.exists():
        # By address: kopf's own login goes by name, and a cluster's DNS may be what is broken.
        host = os.environ.get("KUBERNETES_SERVICE_HOST", "kubernetes.default.svc")
        port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        return kopf.ConnectionInfo(
            server=f"https://{f'[{host}]' if ':' in host else host}:{port}",
            ca_data=(SERVICE_ACCOUNT / "ca.crt").read_text(),
            token=token.read_text().strip(),
        )
    info = kopf.login_with_kubeconfig(settings=kopf.OperatorSettings())
    if info is None:
        raise kopf.LoginError(
            f"neither {token} nor a kubeconfig is there; "
            "run in a pod with a ServiceAccount, or set KUBECONFIG"
        )
    return info
