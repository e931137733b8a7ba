"""A remote shell for hosts that are network namespaces of this machine: NETWORK HOST COMMAND, as ssh takes them.

NETWORK is what the names of the namespaces begin with. A host is known by its address.
"""

from __future__ import annotations

import os
import sys

from scripts.namespaces import command_in


def main() -> None:
    """Become the command, in the namespace of the host."""
    network, host, *command = sys.argv[1:]
    name = f"{network}-{host.rpartition('@')[2].split('.')[2]}"
    words = (*command_in(name), "sh", "-c", " ".join(command))
    os.execvp(words[0], words)


if __name__ == "__main__":
    main()
