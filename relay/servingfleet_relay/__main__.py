"""`servingfleet-relay`: the relay itself, or the supervisor that keeps one running."""

from __future__ import annotations

import os
import sys

from . import supervisor


def main() -> None:
    """Runs until a signal; exits with the status of the relay, the supervisor always with 0."""
    # gRPC's own lines about what fails on the way are no JSON; ours say it. Read as gRPC is loaded.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    arguments = sys.argv[1:]
    if supervisor.wanted(arguments, os.environ):
        sys.exit(supervisor.main(arguments, os.environ))
    # Only here: the supervisor must stay small, and start even where this can't be loaded.
    from .command import main as relay

    relay(prog_name="servingfleet-relay")


if __name__ == "__main__":
    main()
