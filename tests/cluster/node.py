"""The node of a cluster of our own: containerd, the kubelet, kube-proxy and DNS, in a network namespace.

The namespace has no way out: pods, Services and the node's own processes meet on one bridge in it, and the machine's
own network stays as it is. Tests reach the API server through a forwarder (see `control_plane`), and pods through the
API server, so they need not be inside.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from kubernetes import client

from . import node_settings, pki
from .api import connected
from .cgroups import Cgroups
from .control_plane import within
from .daemons import DaemonFailed, Daemons
from .images.oci import Image, write_archive, write_layer
from .node_settings import BRIDGE
from .place import NODE, NODE_ADDRESS, Place

READY_PATIENCE_S = 90.0
POLL_S = 0.2
CNI_PLUGINS = ("/usr/lib/cni", "/opt/cni/bin")
"""Where Debian has them, and where everybody else has."""

DEBIAN_PACKAGES = {
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "ip": "iproute2",
    "nsenter": "util-linux",
}
SYSCTLS = (
    "vm.overcommit_memory",
    "kernel.panic",
    "kernel.panic_on_oops",
    "kernel.keys.root_maxkeys",
    "kernel.keys.root_maxbytes",
)
"""The kubelet sets these for the whole machine; we put them back."""


def missing() -> str:
    """What this machine lacks for a node, for people. Empty: nothing."""
    if os.geteuid() != 0:
        return "pods need root (network namespaces, cgroups, mounts)"
    packages = {package for tool, package in DEBIAN_PACKAGES.items() if not shutil.which(tool)}
    if _cni_plugins() is None:
        packages.add("containernetworking-plugins")
    if packages:
        return f"apt-get install {' '.join(sorted(packages))}"
    return ""


def open_network(place: Place) -> None:
    """Makes the namespace and its bridge, unless they are there."""
    if Path(f"/run/netns/{place.netns}").exists():
        return
    _run("ip", "netns", "add", place.netns)
    inside = ("ip", "-n", place.netns)
    _run(*inside, "link", "set", "lo", "up")
    _run(*inside, "link", "add", BRIDGE, "type", "bridge")
    _run(*inside, "address", "add", f"{NODE_ADDRESS}/24", "dev", BRIDGE)
    _run(*inside, "link", "set", BRIDGE, "up")
    # Kubelet and kube-proxy want a default route. It leads back to the bridge.
    _run(*inside, "route", "add", "default", "via", NODE_ADDRESS, "dev", BRIDGE)
    _run(*within(place), "sysctl", "-qw", "net.ipv4.ip_forward=1")
    # Without it a pod can't reach itself or its neighbours through a Service.
    _run(*within(place), "sysctl", "-qw", "net.bridge.bridge-nf-call-iptables=1")


def start(place: Place, daemons: Daemons, binaries: Mapping[str, Path]) -> None:
    """Starts what does not run, and waits until the node is Ready. Raises DaemonFailed."""
    place.runtime.mkdir(parents=True, exist_ok=True)
    inside = within(place)
    _containerd(place, daemons, inside, binaries)
    _kubelet(place, daemons, inside, binaries)
    _proxy(place, daemons, inside, binaries)
    _dns(place, daemons, inside, binaries)
    with connected(place.kubeconfig) as api:
        deadline = time.monotonic() + READY_PATIENCE_S
        while not _ready(api):
            daemons.check("kubelet")
            if time.monotonic() > deadline:
                raise DaemonFailed(
                    f"the node is not Ready after {READY_PATIENCE_S:.0f} s. The end of"
                    f" {daemons.log('kubelet')}:\n{daemons.tail('kubelet')}"
                )
            time.sleep(POLL_S)


def load(place: Place, archive: Path) -> None:
    """Gives the images of an OCI archive to the node. Raises CalledProcessError."""
    _run("ctr", f"--address={_socket(place)}", "-n", "k8s.io", "images", "import", str(archive))


def stop(place: Place, daemons: Daemons) -> None:
    """Ends the node's processes and all pods, whatever state they are in."""
    # The kubelet first, or it would start again what we end.
    for name in ("kubelet", "kube-proxy", "coredns", "containerd"):
        if daemons.running(name):
            daemons.kill(name)
    for pid in _shims(place):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    _cgroups(place).remove()
    saved = place.folder / "sysctl.json"
    if saved.exists():
        for name, value in json.loads(saved.read_text()).items():
            _sysctl(name).write_text(value)


def close_network(place: Place) -> None:
    """Removes what is left on the machine: mounts, sockets, the namespace."""
    roots = (f"{place.folder}/", f"{place.runtime}/")
    mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for mount in reversed(mounts):
        if mount.startswith(roots):
            _run("umount", "--lazy", mount)
    shutil.rmtree(place.runtime, ignore_errors=True)
    if Path(f"/run/netns/{place.netns}").exists():
        _run("ip", "netns", "delete", place.netns)


def _containerd(
    place: Place, daemons: Daemons, inside: Sequence[str], binaries: Mapping[str, Path]
) -> None:
    networks = place.folder / "cni"
    networks.mkdir(exist_ok=True)
    (networks / "10-pods.conflist").write_text(node_settings.network(place))
    plugins = _cni_plugins()
    assert plugins is not None, "`missing` was asked"
    socket, config = _socket(place), place.folder / "containerd.toml"
    snapshotter = _snapshotter(place.folder)
    _write(config, node_settings.containerd(place, socket, snapshotter, plugins, networks))
    daemons.start("containerd", [*inside, "containerd", "-c", str(config)])
    deadline = time.monotonic() + READY_PATIENCE_S
    while subprocess.run(
        ["ctr", f"--address={socket}", "version"], capture_output=True, check=False
    ).returncode:
        daemons.check("containerd")
        if time.monotonic() > deadline:
            raise DaemonFailed(f"containerd does not answer:\n{daemons.tail('containerd')}")
        time.sleep(POLL_S)
    archive = place.folder / "pause.tar"
    layer = write_layer(place.folder, {"pause": binaries["pause"]})
    write_archive(archive, [Image(node_settings.PAUSE_IMAGE, ("/pause",), [layer])])
    load(place, archive)


def _kubelet(
    place: Place, daemons: Daemons, inside: Sequence[str], binaries: Mapping[str, Path]
) -> None:
    cgroups = _cgroups(place)
    cgroups.make()
    saved = place.folder / "sysctl.json"
    if not saved.exists():
        saved.write_text(json.dumps({name: _sysctl(name).read_text() for name in SYSCTLS}))
    keys, config = pki.Pki(place.folder / "pki"), place.folder / "kubelet.json"
    _write(config, node_settings.kubelet(place, keys, _socket(place), cgroups.name))
    daemons.start(
        "kubelet",
        [
            *inside,
            str(binaries["kubelet"]),
            f"--config={config}",
            f"--kubeconfig={place.folder / 'kubelet.kubeconfig'}",
            f"--hostname-override={NODE}",
            f"--node-ip={NODE_ADDRESS}",
            f"--root-dir={place.folder / 'kubelet'}",
        ],
    )


def _proxy(
    place: Place, daemons: Daemons, inside: Sequence[str], binaries: Mapping[str, Path]
) -> None:
    config = place.folder / "kube-proxy.json"
    _write(config, node_settings.proxy(place.folder / "kube-proxy.kubeconfig"))
    daemons.start("kube-proxy", [*inside, str(binaries["kube-proxy"]), f"--config={config}"])


def _dns(
    place: Place, daemons: Daemons, inside: Sequence[str], binaries: Mapping[str, Path]
) -> None:
    """CoreDNS is a process of the namespace."""
    config = place.folder / "Corefile"
    _write(config, node_settings.dns(place.kubeconfig))
    daemons.start("coredns", [*inside, str(binaries["coredns"]), "-conf", str(config)])
    objects = {"apiVersion": "v1", "kind": "List", "items": node_settings.dns_objects()}
    subprocess.run(
        [str(binaries["kubectl"]), f"--kubeconfig={place.kubeconfig}", "apply", "-f", "-"],
        input=json.dumps(objects),
        text=True,
        stdout=subprocess.DEVNULL,
        check=True,
    )


def _ready(api: client.ApiClient) -> bool:
    nodes = client.CoreV1Api(api).list_node().items
    return any(
        condition.type == "Ready" and condition.status == "True"
        for found in nodes
        for condition in (found.status and found.status.conditions) or ()
    )


def _cgroups(place: Place) -> Cgroups:
    return Cgroups(place.netns)


def _socket(place: Place) -> Path:
    return place.runtime / "containerd.sock"


def _cni_plugins() -> Path | None:
    return next((Path(folder) for folder in CNI_PLUGINS if Path(folder, "bridge").exists()), None)


def _snapshotter(folder: Path) -> str:
    """Overlays can't lie on an overlay, as the disk of a container is one."""
    kind = subprocess.run(
        ["stat", "-f", "-c", "%T", str(folder)], capture_output=True, text=True, check=True
    ).stdout
    return "native" if kind.strip() == "overlayfs" else "overlayfs"


def _write(file: Path, text: str) -> None:
    """Not if it says so already: kube-proxy ends when its configuration is touched."""
    if not file.exists() or file.read_text() != text:
        file.write_text(text)


def _sysctl(name: str) -> Path:
    return Path("/proc/sys") / name.replace(".", "/")


def _shims(place: Place) -> Iterator[int]:
    """Pids of the shims of our containerd: they outlive it, and name its socket."""
    socket = str(_socket(place)).encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (folder / "cmdline").read_bytes().split(b"\0")
            if b"containerd-shim" in command[0] and socket in command:
                yield int(folder.name)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
