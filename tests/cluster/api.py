"""Connections to an API server."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from kubernetes import client, config


@contextlib.contextmanager
def connected(kubeconfig: Path) -> Iterator[client.ApiClient]:
    """A client of the kubeconfig's current context; its sockets are closed at the end."""
    settings = client.Configuration()
    config.load_kube_config(str(kubeconfig), client_configuration=settings)  # type: ignore[no-untyped-call]
    # Tests await conditions themselves: a client that retries for minutes would only hide what happens.
    settings.retries = False
    with client.ApiClient(settings) as api:
        try:
            yield api
        finally:
            api.rest_client.pool_manager.clear()
