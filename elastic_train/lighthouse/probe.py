"""Whether a Lighthouse answers, asked from outside as a browser would."""

from __future__ import annotations

from http.client import HTTPConnection, HTTPException
from urllib.parse import urlsplit


def answers(address: str, timeout_s: float) -> bool:
    """Whether the Lighthouse shows its status page, for which it looks into what it knows of all replicas.

    Args:
        address: ``http://host:port``.
        timeout_s: bound on each step: the connection, the head, the body.
    """
    parts = urlsplit(address)
    connection = HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)
    try:
        connection.request("GET", "/status")
        connection.getresponse().read()
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()
    return True
