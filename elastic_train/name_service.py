"""How long a process waits for a name server that does not answer.

torch's stores look up the names of all addresses that they connect to, only for their messages, and wait for that.
Where an answer gets lost, glibc's resolver asks again after 5 s, in which a replica can miss a quorum.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

VARIABLE = "RES_OPTIONS"
IMPATIENT = "timeout:1 attempts:2"
"""Seconds for each attempt, as resolv.conf(5) has them; the least that there are."""


def be_impatient(environ: MutableMapping[str, str] = os.environ) -> None:
    """For this process, if it has not looked up anything yet, and all that it starts; what somebody has set stays."""
    environ.setdefault(VARIABLE, IMPATIENT)
