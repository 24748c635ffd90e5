"""Certificate authorities and the certificates that servers show: issued, rotated, mended. Pure but for the keys' randomness.

Everything that is known lies in two Secrets: the authority's, which only the operator reads, and the one that is served.
`plan` looks at both and says what both should be; whoever writes one and fails at the other just asks again.

A rotation never asks anybody to trust what he can't know yet:
  1. the next authority is made, and stands in the published bundle beside the signer;
  2. OVERLAP after it was first seen there, it becomes the signer, and a certificate is issued by it;
  3. OVERLAP after that, the old authority leaves the bundle.
So a verifier whose bundle is up to OVERLAP old accepts what any server shows that is as far behind.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

OVERLAP = timedelta(hours=24)
"""How far behind a verifier or a server may be. The kubelet needs two minutes for a mounted ConfigMap or Secret; a
client's copy is made by hand, or by a job that runs each night."""
AUTHORITY_LIFE = timedelta(days=365)
LEAF_LIFE = timedelta(days=30)
BACKDATED = timedelta(hours=1)
"""Certificates are valid from before they are issued: clocks differ."""
SOON = timedelta(minutes=1)
"""Until the next look, where something was only just published."""
MOST_RETIRED = 4

BUNDLE, CERT, KEY = "ca.crt", "tls.crt", "tls.key"
"""Keys of the Secret that is served."""
_SIGNER, _NEXT, _RETIRED, _PUBLISHED = "signer", "next", "retired.crt", "published"
"""Keys of the authority's Secret; the first two with .crt and .key. None is one of the other Secret's."""


@dataclass(frozen=True)
class Certificates:
    """What a server shows, and what its clients trust. PEM."""

    ca_bundle: bytes
    cert: bytes
    key: bytes


@dataclass(frozen=True)
class Plan:
    """What both Secrets should hold, and until when."""

    authority: Mapping[str, bytes]
    leaf: Mapping[str, bytes]
    due: datetime
    """Nothing changes before."""

    @property
    def certificates(self) -> Certificates:
        """What the second Secret holds."""
        return Certificates(self.leaf[BUNDLE], self.leaf[CERT], self.leaf[KEY])


def plan(
    authority: Mapping[str, bytes] | None,
    leaf: Mapping[str, bytes] | None,
    names: Sequence[str],
    owner: str,
    now: datetime,
) -> Plan:
    """What the two Secrets should hold, given what they hold (None: there is none).

    What is missing, expired, damaged or somebody else's is made anew, and what still serves is kept. names: DNS names of the
    server. owner: whose authority it is, for people. now: with a time zone. Write the authority's Secret first.
    """
    stored, served = authority or {}, leaf or {}
    signer = _pair(stored, _SIGNER, now)
    following = _pair(stored, _NEXT, now)
    retired = [
        each for each in _certificates(stored.get(_RETIRED, b"")) if _is_authority(each, now)
    ]
    current = _served(served, now)
    if signer is None:
        signer, following = following or _new_authority(owner, now), None
        # Whoever trusts the lost authority can't know this one: what it signed is served for as long as it may be.
        retired += [
            each
            for each in _certificates(served.get(BUNDLE, b""))
            if _is_authority(each, now) and current is not None and _issued_by(current.cert, each)
        ]
    if following is None and _is_ageing(signer.cert, now):
        following = _new_authority(owner, now)

    seen = _published(stored, now)
    for each in _certificates(served.get(BUNDLE, b"")):
        seen.setdefault(_fingerprint(each), now)

    def is_known(cert: x509.Certificate) -> bool:
        return now - seen.get(_fingerprint(cert), now) >= OVERLAP

    if following is not None and is_known(following.cert):
        retired.append(signer.cert)
        signer, following = following, None

    if current is None or not _covers(current.cert, names):
        current = _new_leaf(signer, names, now)
    elif _issued_by(current.cert, signer.cert):
        if _is_ageing(current.cert, now):
            current = _new_leaf(signer, names, now)
    elif is_known(signer.cert) or not any(_issued_by(current.cert, each) for each in retired):
        current = _new_leaf(signer, names, now)

    issued = current.cert.not_valid_before_utc + BACKDATED
    retired = [each for each in retired if _issued_by(current.cert, each) or now - issued < OVERLAP]
    retired = _distinct(retired, signer.cert)[-MOST_RETIRED:]
    trusted = [signer.cert, *([following.cert] if following else []), *retired]
    known = {_fingerprint(each) for each in trusted}
    published = {key: value.isoformat() for key, value in sorted(seen.items()) if key in known}
    return Plan(
        authority={
            **signer.secret(_SIGNER),
            **(following.secret(_NEXT) if following else {}),
            **({_RETIRED: _pem(retired)} if retired else {}),
            _PUBLISHED: json.dumps(published).encode(),
        },
        leaf={BUNDLE: _pem(trusted), CERT: current.cert_pem, KEY: current.key_pem},
        due=_due(signer, following, retired, current, seen, now),
    )


@dataclass(frozen=True)
class _Pair:
    """A certificate and its private key."""

    cert: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def cert_pem(self) -> bytes:
        return self.cert.public_bytes(serialization.Encoding.PEM)

    @property
    def key_pem(self) -> bytes:
        return self.key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )

    def secret(self, name: str) -> dict[str, bytes]:
        return {f"{name}.crt": self.cert_pem, f"{name}.key": self.key_pem}


def _pair(stored: Mapping[str, bytes], name: str, now: datetime) -> _Pair | None:
    pair = _parsed(stored.get(f"{name}.crt", b""), stored.get(f"{name}.key", b""))
    return pair if pair and _is_authority(pair.cert, now) else None


def _served(stored: Mapping[str, bytes], now: datetime) -> _Pair | None:
    pair = _parsed(stored.get(CERT, b""), stored.get(KEY, b""))
    return pair if pair and _is_valid(pair.cert, now) else None


def _parsed(cert_pem: bytes, key_pem: bytes) -> _Pair | None:
    """The pair, or None for what is none: damaged, of another kind, or not of each other."""
    certificates = _certificates(cert_pem)
    try:
        key = serialization.load_pem_private_key(key_pem, None)
    except (ValueError, TypeError):
        return None
    if not certificates or not isinstance(key, ec.EllipticCurvePrivateKey):
        return None
    if certificates[0].public_key() != key.public_key():
        return None
    return _Pair(certificates[0], key)


def _certificates(pem: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError:
        return []


def _pem(certificates: Iterable[x509.Certificate]) -> bytes:
    return b"".join(each.public_bytes(serialization.Encoding.PEM) for each in certificates)


def _fingerprint(cert: x509.Certificate) -> str:
    return hashlib.sha256(cert.public_bytes(serialization.Encoding.DER)).hexdigest()[:32]


def _distinct(
    certificates: Iterable[x509.Certificate], other: x509.Certificate
) -> list[x509.Certificate]:
    return [
        each
        for each in {_fingerprint(each): each for each in certificates}.values()
        if each != other
    ]


def _published(stored: Mapping[str, bytes], now: datetime) -> dict[str, datetime]:
    """When each authority was first seen in the bundle; damaged: never."""
    try:
        times = {
            str(key): datetime.fromisoformat(value)
            for key, value in json.loads(stored.get(_PUBLISHED, b"{}")).items()
        }
    except (ValueError, TypeError, AttributeError):
        return {}
    # A time without a zone, or after now, was not written by a clock like ours.
    return {key: min(value, now) for key, value in times.items() if value.tzinfo is not None}


def _is_valid(cert: x509.Certificate, now: datetime) -> bool:
    return cert.not_valid_before_utc <= now < cert.not_valid_after_utc


def _is_authority(cert: x509.Certificate, now: datetime) -> bool:
    try:
        constraints = cert.extensions.get_extension_for_class(x509.BasicConstraints)
    except (x509.ExtensionNotFound, x509.DuplicateExtension, ValueError):
        return False
    return constraints.value.ca and _is_valid(cert, now)


def _ages_at(cert: x509.Certificate) -> datetime:
    """At two thirds of its life a certificate is replaced."""
    start, end = cert.not_valid_before_utc, cert.not_valid_after_utc
    return start + (end - start) * 2 / 3


def _is_ageing(cert: x509.Certificate, now: datetime) -> bool:
    return now >= _ages_at(cert)


def _covers(cert: x509.Certificate, names: Sequence[str]) -> bool:
    try:
        found = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except (x509.ExtensionNotFound, x509.DuplicateExtension, ValueError):
        return False
    return set(names) <= set(found.value.get_values_for_type(x509.DNSName))


def _issued_by(cert: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        cert.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _new_authority(owner: str, now: datetime) -> _Pair:
    key = ec.generate_private_key(ec.SECP256R1())
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    # A name of its own: some verifiers look an issuer up by name, and take the first.
    common = f"servingfleet {owner}"[:47] + f" {identifier.digest.hex()[:16]}"
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])
    cert = (
        _builder(name, name, key, now, now + AUTHORITY_LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(identifier, critical=False)
        .sign(key, hashes.SHA256())
    )
    return _Pair(cert, key)


def _new_leaf(signer: _Pair, names: Sequence[str], now: datetime) -> _Pair:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0][:64])])
    end = min(now + LEAF_LIFE, signer.cert.not_valid_after_utc)
    authority_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.key.public_key())
    cert = (
        _builder(name, signer.cert.subject, key, now, end)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(
            x509.SubjectAlternativeName([x509.DNSName(each) for each in names]), critical=False
        )
        .add_extension(authority_key, critical=False)
        .sign(signer.key, hashes.SHA256())
    )
    return _Pair(cert, key)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    now: datetime,
    end: datetime,
) -> x509.CertificateBuilder:
    # Certificates count in whole seconds.
    start = now.astimezone(UTC).replace(microsecond=0) - BACKDATED
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(end.astimezone(UTC).replace(microsecond=0))
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _due(
    signer: _Pair,
    following: _Pair | None,
    retired: Sequence[x509.Certificate],
    current: _Pair,
    seen: Mapping[str, datetime],
    now: datetime,
) -> datetime:
    def known_at(cert: x509.Certificate) -> datetime:
        published = seen.get(_fingerprint(cert))
        return now + SOON if published is None else published + OVERLAP

    times = [_ages_at(current.cert)]
    times.append(_ages_at(signer.cert) if following is None else known_at(following.cert))
    if _fingerprint(signer.cert) not in seen or not _issued_by(current.cert, signer.cert):
        times.append(known_at(signer.cert))
    if retired:
        times.append(current.cert.not_valid_before_utc + BACKDATED + OVERLAP)
    due = min(times)
    return due if due > now else now + SOON
