"""`python -m tests.engine [RANKS]`: installs the engine and becomes it, on the ports that the documents name."""

from __future__ import annotations

import os
import sys

from .engine import Ports, command, settings
from .environment import prepare


def main() -> None:
    """Does not return."""
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    environment = prepare(lambda line: print(line, file=sys.stderr, flush=True))
    server = command(environment, Ports(8000, 5557, 5657), ranks)
    os.execve(server[0], server, settings())


if __name__ == "__main__":
    main()
