"""Builds the `servingfleet` command."""

from __future__ import annotations

import click

from . import exits
from .asking import explain, replicas, reuse, route
from .checking import check_stream
from .demo import demo
from .draining import drain
from .recording import record_command
from .replaying import replay
from .top import top
from .verifying import verify_command


@click.group(epilog=exits.HELP)
@click.version_option(package_name="servingfleet")
def main() -> None:
    """Ask a fleet where prompts should go, and whether its predictions hold."""


for command in (
    route,
    explain,
    reuse,
    replicas,
    drain,
    check_stream,
    verify_command,
    record_command,
    demo,
    replay,
    top,
):
    main.add_command(command)

if __name__ == "__main__":
    main()
