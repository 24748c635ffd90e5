"""Keys and certificates of a cluster of our own: one CA, a leaf for each component, and their kubeconfigs."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

LIFE = timedelta(days=3650)
"""A cluster kept by a developer should not end by itself."""

CLIENTS = {
    "admin": ("admin", "system:masters"),
    "kube-controller-manager": ("system:kube-controller-manager", None),
    "kube-scheduler": ("system:kube-scheduler", None),
    "kube-proxy": ("system:kube-proxy", None),
    # What the API server shows the kubelet for logs and exec.
    "apiserver-kubelet": ("apiserver-kubelet", "system:masters"),
}
"""File name -> user and group, as Kubernetes' built-in roles expect them."""


@dataclass(frozen=True)
class Pki:
    """The files in one folder: `NAME.crt` and `NAME.key`, PEM."""

    folder: Path

    def cert(self, name: str) -> Path:
        """Of `ca`, `apiserver`, `kubelet`, a client, or the public half of `sa`."""
        return self.folder / f"{name}.crt"

    def key(self, name: str) -> Path:
        return self.folder / f"{name}.key"


def make(folder: Path, addresses: Sequence[str], node: str) -> Pki:
    """Writes what is missing. `addresses`: IPv4, of the API server and the kubelet; `node`: the node's name."""
    pki = Pki(folder)
    if pki.cert("ca").exists():
        return pki
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    ca_key = ec.generate_private_key(ec.SECP256R1())
    ca_name = _name("servingfleet-test-ca", None)
    ca = (
        _unsigned(ca_name, ca_name, ca_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(ca_key, hashes.SHA256())
    )
    _write_key(pki.key("ca"), ca_key)

    served = x509.SubjectAlternativeName(
        [
            *(x509.DNSName(name) for name in ("localhost", "kubernetes.default.svc", node)),
            *(x509.IPAddress(IPv4Address(address)) for address in addresses),
        ]
    )
    leaves: list[tuple[str, x509.Name, x509.SubjectAlternativeName | None]] = [
        ("apiserver", _name("kube-apiserver", None), served),
        ("kubelet-server", _name(node, None), served),
        ("kubelet", _name(f"system:node:{node}", "system:nodes"), None),
        *((file, _name(user, group), None) for file, (user, group) in CLIENTS.items()),
    ]
    for file, subject, names in leaves:
        key = ec.generate_private_key(ec.SECP256R1())
        usage = (
            ExtendedKeyUsageOID.CLIENT_AUTH if names is None else ExtendedKeyUsageOID.SERVER_AUTH
        )
        leaf = _unsigned(subject, ca_name, key.public_key()).add_extension(
            x509.ExtendedKeyUsage([usage]), critical=False
        )
        if names is not None:
            leaf = leaf.add_extension(names, critical=False)
        _write_key(pki.key(file), key)
        pki.cert(file).write_bytes(_pem(leaf.sign(ca_key, hashes.SHA256())))

    tokens = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    _write_key(pki.key("sa"), tokens)
    pki.cert("sa").write_bytes(
        tokens.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    # Last: it marks the folder as complete.
    pki.cert("ca").write_bytes(_pem(ca))
    return pki


def kubeconfig(pki: Pki, user: str, server: str) -> str:
    """A kubeconfig for one of the clients. JSON, which is YAML. `server`: an https URL."""
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {
                    "name": "servingfleet-test",
                    "cluster": {
                        "server": server,
                        "certificate-authority-data": _base64(pki.cert("ca")),
                    },
                }
            ],
            "users": [
                {
                    "name": user,
                    "user": {
                        "client-certificate-data": _base64(pki.cert(user)),
                        "client-key-data": _base64(pki.key(user)),
                    },
                }
            ],
            "contexts": [
                {
                    "name": "servingfleet-test",
                    "context": {"cluster": "servingfleet-test", "user": user},
                }
            ],
            "current-context": "servingfleet-test",
        },
        indent=1,
    )


def _name(common: str, organisation: str | None) -> x509.Name:
    parts = [x509.NameAttribute(NameOID.COMMON_NAME, common)]
    if organisation is not None:
        parts.append(x509.NameAttribute(NameOID.ORGANIZATION_NAME, organisation))
    return x509.Name(parts)


def _unsigned(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + LIFE)
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _write_key(file: Path, key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> None:
    file.touch(mode=0o600)
    file.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.TraditionalOpenSSL,
            serialization.NoEncryption(),
        )
    )


def _base64(file: Path) -> str:
    return base64.b64encode(file.read_bytes()).decode()
