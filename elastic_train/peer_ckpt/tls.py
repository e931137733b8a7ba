"""TLS between the processes of a run, both sides with a certificate.

Names are not checked: hosts come and go, and a peer is found by an address that the registry gave. What counts is who
signed. So the authority must be the run's own, or that of runs that may trust each other: everybody who has one of its
certificates can pretend to be any peer, though without the token of the run nobody is answered.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from elastic_train.config import PeerCkptConfig


class TlsProblem(ValueError):
    """A file that TLS needs is not as it must be; its text names the file."""


@dataclass(frozen=True)
class Tls:
    """PEM files. The certificate may be used by servers and by clients: it has no extended key usage, or both."""

    certificate: Path
    """This process's own, followed by those between it and the authority, if there are any."""
    key: Path
    """The certificate's private key, without a passphrase."""
    authority: Path
    """Whoever has a certificate that was signed by one of these belongs to the run."""

    def server_context(self) -> ssl.SSLContext:
        """For a server, which talks only to who has a certificate.

        Raises:
            TlsProblem: a file is missing, or is not what it should be.
        """
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        # Nobody resumes a session, and an unread ticket would make a reset of the end of a connection.
        context.num_tickets = 0
        return context

    def client_context(self) -> ssl.SSLContext:
        """For a client, which talks only to a server that has a certificate; errors as for ``server_context``."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def check(self) -> None:
        """See that processes with these files would talk to each other.

        Raises:
            TlsProblem: a file is missing or not what it should be, or the authority did not sign the certificate, or it
                has expired, or is not for servers and clients alike.
        """
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = self.client_context().wrap_bio(to_client, to_server)
        server = self.server_context().wrap_bio(to_server, to_client, server_side=True)
        for side in (client, server) * 2:
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError as error:
                raise TlsProblem(
                    f"{self.certificate} is no certificate that {self.authority} lets in: {error}"
                ) from error

    def _context(self, protocol: ssl._SSLMethod) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        for file in (self.certificate, self.key, self.authority):
            _check_readable(file)
        _trust(context, self.authority)
        _trust(ssl.SSLContext(protocol), self.certificate)
        try:
            context.load_cert_chain(self.certificate, self.key, password=self._refuse_passphrase)
        except ssl.SSLError as error:
            raise TlsProblem(
                f"{self.key} is not the private key of {self.certificate}, or no PEM file of one: {error}"
            ) from error
        return context

    def _refuse_passphrase(self) -> str:
        # Otherwise OpenSSL would ask for it at the terminal, and wait.
        raise TlsProblem(f"{self.key} has a passphrase: store the key without one, readable by its owner only")


def tls_of(config: PeerCkptConfig) -> Tls | None:
    """What the config says; None: peers talk in plain text."""
    if not config.tls_certificate:
        return None
    return Tls(Path(config.tls_certificate), Path(config.tls_key), Path(config.tls_authority))


def _check_readable(file: Path) -> None:
    try:
        with file.open("rb"):
            pass
    except OSError as error:
        # OpenSSL would not say which file it was.
        raise TlsProblem(f"{file} cannot be read: {error.strerror}") from error


def _trust(context: ssl.SSLContext, certificates: Path) -> None:
    try:
        context.load_verify_locations(certificates)
    except ssl.SSLError as error:
        raise TlsProblem(f"{certificates} is no PEM file of certificates: {error}") from error
