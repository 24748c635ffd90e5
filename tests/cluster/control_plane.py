"""etcd, the API server and the controllers, as processes on loopback.

In node mode they run in the cluster's network namespace, and a forwarder outside of it makes the API server reachable
under the same address, so that one kubeconfig serves both sides.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from kubernetes import client
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from . import pki
from .api import connected
from .daemons import DaemonFailed, Daemons
from .place import API_SERVICE, NODE, NODE_ADDRESS, SERVICE_RANGE, Place

READY_PATIENCE_S = 90.0
POLL_S = 0.1

API_SERVER = "kube-apiserver"
CONTROLLERS = "kube-controller-manager"


def start(place: Place, daemons: Daemons, binaries: Mapping[str, Path]) -> None:
    """Starts what does not run, and waits until pods can be created. Raises DaemonFailed."""
    keys = pki.make(place.folder / "pki", ("127.0.0.1", NODE_ADDRESS, API_SERVICE), NODE)
    for user in ("admin", "kubelet", CONTROLLERS, "kube-scheduler", "kube-proxy"):
        file = place.folder / f"{user}.kubeconfig"
        file.touch(mode=0o600)
        file.write_text(pki.kubeconfig(keys, user, place.server))

    inside = within(place)
    ports = place.ports
    client_url = f"http://127.0.0.1:{ports.etcd}"
    peer_url = f"http://127.0.0.1:{ports.etcd_peer}"
    daemons.start(
        "etcd",
        [
            *inside,
            str(binaries["etcd"]),
            "--name=test",
            f"--data-dir={place.folder / 'etcd'}",
            f"--listen-client-urls={client_url}",
            f"--advertise-client-urls={client_url}",
            f"--listen-peer-urls={peer_url}",
            f"--initial-advertise-peer-urls={peer_url}",
            f"--initial-cluster=test={peer_url}",
            # Nobody needs these data after a power cut, and disks of test machines are slow.
            "--unsafe-no-fsync",
        ],
    )
    daemons.start(API_SERVER, [*inside, *_api_server(place, keys, binaries)])
    if place.mode == "node":
        script = Path(__file__).parent / "forward.py"
        daemons.start("forward", [sys.executable, str(script), place.netns, str(ports.api)])
    await_ready(place, daemons)

    kubeconfig = place.folder / f"{CONTROLLERS}.kubeconfig"
    daemons.start(
        CONTROLLERS,
        [
            *inside,
            str(binaries[CONTROLLERS]),
            *_component(kubeconfig, ports.controllers),
            "--use-service-account-credentials=true",
            f"--root-ca-file={keys.cert('ca')}",
            f"--service-account-private-key-file={keys.key('sa')}",
        ],
    )
    if place.mode == "node":
        kubeconfig = place.folder / "kube-scheduler.kubeconfig"
        daemons.start(
            "kube-scheduler",
            [
                *inside,
                str(binaries["kube-scheduler"]),
                *_component(kubeconfig, ports.scheduler),
            ],
        )
    _await_service_account(place, daemons)


def await_ready(place: Place, daemons: Daemons) -> None:
    """Waits until the API server says that it is. Raises DaemonFailed."""
    deadline = time.monotonic() + READY_PATIENCE_S
    with connected(place.kubeconfig) as api:
        while True:
            daemons.check("etcd")
            daemons.check(API_SERVER)
            try:
                answer = api.call_api("GET", f"{place.server}/readyz", _request_timeout=5)
                answer.read()  # type: ignore[no-untyped-call]  # else its connection stays open
                if answer.status == 200:
                    return
                seen = f"it answered {answer.status}"
            except (ApiException, HTTPError) as error:
                seen = str(error)
            if time.monotonic() > deadline:
                raise DaemonFailed(
                    f"the API server is not ready after {READY_PATIENCE_S:.0f} s: {seen}. The end of"
                    f" {daemons.log(API_SERVER)}:\n{daemons.tail(API_SERVER)}"
                )
            time.sleep(POLL_S)


def within(place: Place) -> list[str]:
    """What to put before a command that belongs into the cluster's network."""
    # Not `ip netns exec`: it mounts a new /sys, and the cgroups of the kubelet would be hidden.
    return ["nsenter", f"--net=/run/netns/{place.netns}"] if place.mode == "node" else []


def _api_server(place: Place, keys: pki.Pki, binaries: Mapping[str, Path]) -> Sequence[str]:
    command = [
        str(binaries[API_SERVER]),
        f"--etcd-servers=http://127.0.0.1:{place.ports.etcd}",
        f"--secure-port={place.ports.api}",
        f"--tls-cert-file={keys.cert('apiserver')}",
        f"--tls-private-key-file={keys.key('apiserver')}",
        f"--client-ca-file={keys.cert('ca')}",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={keys.cert('sa')}",
        f"--service-account-signing-key-file={keys.key('sa')}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        f"--service-cluster-ip-range={SERVICE_RANGE}",
    ]
    if place.mode == "node":
        return [
            *command,
            "--bind-address=0.0.0.0",
            f"--advertise-address={NODE_ADDRESS}",
            f"--kubelet-client-certificate={keys.cert('apiserver-kubelet')}",
            f"--kubelet-client-key={keys.key('apiserver-kubelet')}",
            f"--kubelet-certificate-authority={keys.cert('ca')}",
            "--kubelet-preferred-address-types=InternalIP",
        ]
    return [
        *command,
        "--bind-address=127.0.0.1",
        "--advertise-address=127.0.0.1",
        # Endpoints may not lie on loopback, so the Service "kubernetes" stays without.
        "--endpoint-reconciler-type=none",
    ]


def _component(kubeconfig: Path, port: int) -> list[str]:
    return [
        f"--kubeconfig={kubeconfig}",
        f"--authentication-kubeconfig={kubeconfig}",
        f"--authorization-kubeconfig={kubeconfig}",
        "--bind-address=127.0.0.1",
        f"--secure-port={port}",
        "--leader-elect=false",
    ]


def _await_service_account(place: Place, daemons: Daemons) -> None:
    """Pods can't be created before the controllers have made the namespace's ServiceAccount."""
    deadline = time.monotonic() + READY_PATIENCE_S
    with connected(place.kubeconfig) as api:
        while True:
            daemons.check(CONTROLLERS)
            try:
                client.CoreV1Api(api).read_namespaced_service_account("default", "default")
                return
            except ApiException as error:
                if error.status != 404 or time.monotonic() > deadline:
                    raise
            time.sleep(POLL_S)
