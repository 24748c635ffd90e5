"""Builds Kubernetes, its DNS and Helm from their Go modules, pinned by `build/*/go.mod`.

Finished packages stay in Go's build cache, so an interrupted build goes on where it was; a finished binary is built
again only when its recipe changes. On two cores: about 11 minutes from nothing.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent / "build"
SAY_EVERY_S = 15.0

Say = Callable[[str], None]


class BuildFailed(RuntimeError):
    """A binary could not be built: the text says what is missing, or holds the end of the compiler's output."""


@dataclass(frozen=True)
class Target:
    """One binary: a Go package in one of the pinned modules."""

    module: str
    package: str
    flags: str = ""
    """For the linker, with `{version}` for that of the required module."""


KUBERNETES_FLAGS = " ".join(
    f"-X {package}.{name}={value}"
    for package in ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
    for name, value in (
        ("gitVersion", "{version}"),
        ("gitMajor", "{major}"),
        ("gitMinor", "{minor}"),
        ("gitTreeState", "clean"),
        ("gitCommit", "from-go-module"),
        ("buildDate", "2026-01-01T00:00:00Z"),
    )
)

TARGETS = {
    "etcd": Target("kubernetes", "go.etcd.io/etcd/server/v3"),
    **{
        name: Target("kubernetes", f"k8s.io/kubernetes/cmd/{name}", KUBERNETES_FLAGS)
        for name in (
            "kube-apiserver",
            "kube-controller-manager",
            "kube-scheduler",
            "kubelet",
            "kube-proxy",
            "kubectl",
        )
    },
    "coredns": Target("coredns", "github.com/coredns/coredns"),
    "helm": Target(
        "helm",
        "helm.sh/helm/v3/cmd/helm",
        "-X helm.sh/helm/v3/internal/version.version={version}"
        # What `helm template` takes the cluster for.
        " -X helm.sh/helm/v3/pkg/chartutil.k8sVersionMajor=1"
        " -X helm.sh/helm/v3/pkg/chartutil.k8sVersionMinor=34",
    ),
    "pause": Target("pause", "."),
}
TOOLS = ("kubectl", "helm")
CONTROL_PLANE = ("etcd", "kube-apiserver", "kube-controller-manager", *TOOLS)
NODE = (*CONTROL_PLANE, "kube-scheduler", "kubelet", "kube-proxy", "coredns", "pause")

_MODULES = {
    "kubernetes": "k8s.io/kubernetes",
    "coredns": "github.com/coredns/coredns",
    "helm": "helm.sh/helm/v3",
}


def home() -> Path:
    """Where binaries, images and running clusters lie: outside the checkout, kept between runs."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(f"{cache}/servingfleet/cluster").expanduser().absolute()


def version(module: str) -> str:
    """The pinned release, such as 'v1.34.4'; 'v1.0.0' for a module of ours."""
    path = _MODULES.get(module)
    if path is None:
        return "v1.0.0"
    for line in (HERE / module / "go.mod").read_text().splitlines():
        words = line.removeprefix("require ").split()
        if words[:1] == [path] and len(words) > 1:
            return words[1]
    raise BuildFailed(f"{HERE / module / 'go.mod'} does not require {path}")


def build(names: Iterable[str], say: Say) -> dict[str, Path]:
    """Builds what is missing and says so. Returns all binaries by name. Raises BuildFailed."""
    binaries = home() / "bin"
    binaries.mkdir(parents=True, exist_ok=True)
    wanted = list(names)
    if not all(_current(binaries, name) for name in wanted):
        # Two builds at once would only slow each other: the second waits, and finds the work done.
        with (home() / "build.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say("cluster: waiting for another build on this machine")
                fcntl.flock(lock, fcntl.LOCK_EX)
            for number, name in enumerate(wanted, 1):
                if not _current(binaries, name):
                    _build(binaries, name, f"{number}/{len(wanted)}", say)
    return {name: binaries / name for name in wanted}


def _current(binaries: Path, name: str) -> bool:
    stamp = binaries / f"{name}.recipe"
    return (binaries / name).exists() and stamp.exists() and stamp.read_text() == _recipe(name)


def _recipe(name: str) -> str:
    """Hash of all that decides what the binary is, but the Go release: any that builds it will do."""
    target = TARGETS[name]
    parts = [target.package, _flags(target)]
    parts += [file.read_text() for file in sorted((HERE / target.module).iterdir())]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _flags(target: Target) -> str:
    release = version(target.module)
    major, minor, *_ = release.removeprefix("v").split(".")
    return f"-s -w {target.flags.format(version=release, major=major, minor=minor)}"


def _build(binaries: Path, name: str, place: str, say: Say) -> None:
    go = shutil.which("go")
    if go is None:
        raise BuildFailed(
            f"{name} is built from its Go module, and 'go' is not on the PATH. Install Go 1.24 or newer,"
            " or point SERVINGFLEET_KUBECONFIG at a cluster that you have."
        )
    target = TARGETS[name]
    folder = HERE / target.module
    say(f"cluster: building {name} {version(target.module)} ({place})")
    command = [
        *(go, "build", "-v", "-trimpath", "-ldflags", _flags(target)),
        *("-o", str(binaries / name), target.package),
    ]
    settings = {
        **os.environ,
        "CGO_ENABLED": "0",
        # The pinned files are complete: a build that wants to change them is a mistake.
        "GOFLAGS": "-mod=readonly -buildvcs=false",
        # Less often than the default 100: a quarter less time for 2 GB of memory at most.
        "GOGC": os.environ.get("GOGC", "400"),
    }
    began = said = time.monotonic()
    compiled, tail = 0, deque[str](maxlen=15)
    with subprocess.Popen(
        command, cwd=folder, env=settings, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stderr is not None
        for line in child.stderr:
            tail.append(line.rstrip())
            compiled += 1
            if time.monotonic() - said > SAY_EVERY_S:
                said = time.monotonic()
                say(f"cluster: {name}: {said - began:.0f} s, {compiled} packages, {tail[-1]}")
    if child.returncode:
        raise BuildFailed(
            f"{' '.join(command[:2])} of {name} ended with status {child.returncode}."
            " What was compiled is kept: run it again to go on.\n" + "\n".join(tail)
        )
    (binaries / f"{name}.recipe").write_text(_recipe(name))
    say(f"cluster: {name} built in {time.monotonic() - began:.0f} s")
