"""`python -m tests.cluster`: a Kubernetes of our own, kept between commands and test runs."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import cast

import click

from . import building, demo, node, own, place
from .building import BuildFailed
from .daemons import DaemonFailed, Daemons
from .images import images
from .images.wheel import WheelFailed
from .place import InUse, Mode, Place
from .sources import NAME, NoCluster


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


mode_argument = click.argument("mode", type=click.Choice(["cp", "node"]), default="node")
name_option = click.option(
    "--name",
    envvar=NAME,
    default="dev",
    show_default=True,
    help=f"Which of several; also read from {NAME}.",
)
FAULTS = {
    "start": (Daemons.restart, "Start a component again."),
    "stop": (Daemons.stop, "Ask a component to end."),
    "kill": (Daemons.kill, "End a component without a word."),
    "freeze": (Daemons.freeze, "Stop a component's clock: its connections stay open."),
    "thaw": (Daemons.thaw, "Let a frozen component go on."),
}


@click.group()
def main() -> None:
    """A Kubernetes of our own: cp, the control plane alone, or node, with a node where pods run."""


@main.command()
@mode_argument
def build(mode: str) -> None:
    """Build its binaries from their Go modules."""
    building.build(building.NODE if mode == "node" else building.CONTROL_PLANE, say)


@main.command()
@mode_argument
@name_option
def up(mode: str, name: str) -> None:
    """Start it, and keep it until `down`. A node gets the project's images."""
    if lacking := own.missing(cast(Mode, mode)):
        raise click.ClickException(lacking)
    own.sweep(say)
    where = place.named(cast(Mode, mode), name)
    with place.held(where):
        own.start(where, say)
        if mode == "node":
            node.load(where, images.archive(say))
    click.echo(f"export KUBECONFIG={where.kubeconfig} {NAME}={name}")


@main.command("images")
def assemble() -> None:
    """Assemble the project's images; prints the archive's path."""
    click.echo(images.archive(say))


@main.command()
def pins() -> None:
    """Print what the images hold as installed here: the lines of constraints.txt."""
    click.echo("\n".join(images.pins()))


@main.command()
@mode_argument
@name_option
def load(mode: str, name: str) -> None:
    """Give the node the images of the sources as they are now."""
    node.load(_running(mode, name), images.archive(say))


@main.command()
@mode_argument
@name_option
def down(mode: str, name: str) -> None:
    """End it, and remove what it held."""
    where = _running(mode, name)
    with place.held(where):
        own.destroy(where)


@main.command("demo")
def show() -> None:
    """The whole of it, from a cluster to a fleet's figures."""
    demo.run()


@main.command()
def status() -> None:
    """What runs."""
    for where in place.known():
        click.echo(f"{where.name}: {where.kubeconfig}")
        daemons = Daemons(where.folder)
        for name in daemons.names():
            state = "running" if daemons.running(name) else "ended"
            click.echo(f"  {name:<24} {state:<8} {daemons.log(name)}")


def _add_fault(command: str) -> None:
    act, text = FAULTS[command]

    @main.command(command, help=text)
    @click.argument("component")
    @mode_argument
    @name_option
    def fault(component: str, mode: str, name: str) -> None:
        daemons = Daemons(_running(mode, name).folder)
        if component not in daemons.names():
            raise click.UsageError(f"{component!r} is none of {', '.join(daemons.names())}")
        act(daemons, component)


for _command in FAULTS:
    _add_fault(_command)


def _add_tool(tool: str) -> None:
    settings = {"ignore_unknown_options": True, "allow_interspersed_args": False}

    @main.command(tool, context_settings=settings, add_help_option=False)
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    def run(arguments: tuple[str, ...]) -> None:
        name = os.environ.get(NAME, "dev")
        running = [where for where in place.known() if where.name in (f"node-{name}", f"cp-{name}")]
        if not running:
            raise click.ClickException(f"no cluster {name!r} runs; start one with `up`")
        binary = building.build([tool], say)[tool]
        settings = {**os.environ, "KUBECONFIG": str(running[-1].kubeconfig)}
        sys.exit(subprocess.call([str(binary), *arguments], env=settings))

    run.help = f"Run {tool} against the cluster (the node's, where both run)."


for _tool in building.TOOLS:
    _add_tool(_tool)


def _running(mode: str, name: str) -> Place:
    for where in place.known():
        if where.name == f"{mode}-{name}":
            return where
    raise click.ClickException(f"no cluster {mode}-{name} runs; `status` lists those that do")


if __name__ == "__main__":
    try:
        main()
    except (BuildFailed, DaemonFailed, InUse, NoCluster, WheelFailed) as error:
        say(str(error))
        sys.exit(1)
