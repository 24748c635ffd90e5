"""The server's certificate, read again at each handshake: open streams outlive it, new ones get the new one. Edge."""

from __future__ import annotations

import hashlib
import logging
import ssl
from pathlib import Path

import grpc

log = logging.getLogger(__name__)


class BadCertificate(Exception):
    """The files hold no certificate with its key: whoever writes them must act."""


class ServerCertificate:
    """A certificate chain and its key, PEM, in two files that are replaced while the server runs."""

    def __init__(self, cert_file: Path, key_file: Path) -> None:
        """Raises BadCertificate."""
        self._files = (cert_file, key_file)
        self._used = (b"", b"")
        self._used = self._read()
        self._trouble = ""

    def credentials(self) -> grpc.ServerCredentials:
        """For any number of ports."""
        return grpc.dynamic_ssl_server_credentials(
            _configuration(self._used),
            self._renewed,  # type: ignore[arg-type]  # gRPC documents None, its stubs don't
            require_client_authentication=False,
        )

    def _renewed(self) -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC's threads at each handshake. None: as before."""
        try:
            read = self._read()
        except BadCertificate as error:
            # Half replaced, or broken: the one in use may be good for long.
            if str(error) != self._trouble:
                self._trouble = str(error)
                log.warning("certificate not usable", extra={"error": self._trouble})
            return None
        self._trouble = ""
        if read == self._used:
            return None
        self._used = read
        log.info("certificate replaced", extra={"sha256": hashlib.sha256(read[0]).hexdigest()})
        return _configuration(read)

    def _read(self) -> tuple[bytes, bytes]:
        cert_file, key_file = self._files
        try:
            read = (cert_file.read_bytes(), key_file.read_bytes())
            if read != self._used:
                # gRPC would take a pair that does not match, and fail every handshake with it.
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert_file, key_file)
        except OSError as error:  # ssl.SSLError is one
            reason = error.reason if isinstance(error, ssl.SSLError) else error.strerror
            raise BadCertificate(f"{cert_file} with {key_file}: {reason or error}") from None
        return read


def _configuration(pair: tuple[bytes, bytes]) -> grpc.ServerCertificateConfiguration:
    chain, key = pair
    return grpc.ssl_server_certificate_configuration([(key, chain)])
