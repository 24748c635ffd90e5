"""What the processes of a node are told. Pure: places and binaries in, texts out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .pki import Pki
from .place import DNS_SERVICE, NODE, NODE_ADDRESS, POD_RANGE, SERVICE_RANGE, Place

BRIDGE = "pods0"
PAUSE_IMAGE = "localhost/servingfleet-pause:1"


def network(place: Place) -> str:
    """Of the CNI plugins: all pods on one bridge."""
    settings = {
        "cniVersion": "0.4.0",
        "name": "pods",
        "plugins": [
            {
                "type": "bridge",
                "bridge": BRIDGE,
                "isGateway": True,
                "hairpinMode": True,
                "ipam": {
                    "type": "host-local",
                    "dataDir": str(place.runtime / "ipam"),
                    "ranges": [[{"subnet": POD_RANGE, "rangeStart": "10.250.0.10"}]],
                    "routes": [{"dst": "0.0.0.0/0"}],
                },
            },
            {"type": "portmap", "capabilities": {"portMappings": True}},
        ],
    }
    return json.dumps(settings)


def containerd(place: Place, socket: Path, snapshotter: str, plugins: Path, networks: Path) -> str:
    """`plugins`: folder of the CNI plugins; `networks`: of their settings."""
    return f"""\
version = 2
root = "{place.folder}/containerd"
state = "{place.runtime}/containerd"
[grpc]
  address = "{socket}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE_IMAGE}"
  disable_apparmor = true
  # Without CAP_SYS_RESOURCE, as in many sandboxes, runc may not lower oom_score_adj.
  restrict_oom_score_adj = true
  enable_unprivileged_ports = true
  # With the rest of our mounts, so that they are found at the end.
  netns_mounts_under_state_dir = true
  stream_server_address = "127.0.0.1"
  stream_server_port = "0"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "{snapshotter}"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{plugins}"
    conf_dir = "{networks}"
"""


def kubelet(place: Place, keys: Pki, socket: Path, cgroups: str) -> str:
    """`cgroups`: the branch in which it keeps its pods."""
    settings = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": NODE_ADDRESS,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(keys.cert("ca"))},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(keys.cert("kubelet-server")),
        "tlsPrivateKeyFile": str(keys.key("kubelet-server")),
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{cgroups}",
        "failCgroupV1": False,
        "failSwapOn": False,
        "containerRuntimeEndpoint": f"unix://{socket}",
        "resolvConf": "",
        "clusterDNS": [DNS_SERVICE],
        "clusterDomain": "cluster.local",
        # Disks of test machines are full of other things.
        "evictionHard": {
            "memory.available": "100Mi",
            "nodefs.available": "1%",
            "imagefs.available": "1%",
        },
        "imageGCHighThresholdPercent": 100,
        "enableControllerAttachDetach": False,
        "oomScoreAdj": 0,
        "healthzBindAddress": "127.0.0.1",
        "maxPods": 60,
        "nodeStatusUpdateFrequency": "5s",
        # Tests await changes of mounted Secrets and ConfigMaps.
        "syncFrequency": "10s",
        "volumePluginDir": str(place.folder / "kubelet" / "plugins"),
    }
    return json.dumps(settings, indent=1)


def proxy(kubeconfig: Path) -> str:
    """Of kube-proxy."""
    settings = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "iptables",
        "bindAddress": NODE_ADDRESS,
        "hostnameOverride": NODE,
        "clusterCIDR": POD_RANGE,
        # Sysctls of the whole machine otherwise.
        "conntrack": {
            "maxPerCore": 0,
            "min": 0,
            "tcpEstablishedTimeout": "0s",
            "tcpCloseWaitTimeout": "0s",
        },
        "clientConnection": {"kubeconfig": str(kubeconfig)},
    }
    return json.dumps(settings, indent=1)


def dns(kubeconfig: Path) -> str:
    """Of CoreDNS: the cluster's names, and no others."""
    return f"""\
cluster.local:53 {{
  bind {NODE_ADDRESS}
  errors
  kubernetes cluster.local {SERVICE_RANGE} {{
    kubeconfig {kubeconfig}
  }}
  cache 5
}}
.:53 {{
  bind {NODE_ADDRESS}
  template ANY ANY {{
    rcode NXDOMAIN
  }}
}}
"""


def dns_objects() -> list[dict[str, Any]]:
    """The Service whose address pods are given, and behind it CoreDNS, which is no pod."""
    ports = [{"name": name, "port": 53, "protocol": name.upper()} for name in ("udp", "tcp")]
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "kube-dns", "namespace": "kube-system"},
            "spec": {"clusterIP": DNS_SERVICE, "ports": ports},
        },
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "name": "kube-dns-node",
                "namespace": "kube-system",
                "labels": {"kubernetes.io/service-name": "kube-dns"},
            },
            "addressType": "IPv4",
            "ports": ports,
            "endpoints": [{"addresses": [NODE_ADDRESS], "conditions": {"ready": True}}],
        },
    ]
