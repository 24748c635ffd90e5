"""`servingfleet-operator`: reads settings, runs until told to stop."""

from __future__ import annotations

import asyncio
import signal
import sys

import click
import kopf

from .login import login
from .logs import configure
from .process import Hosts, Process
from .settings import OperatorSettings


@click.command(
    context_settings={
        "auto_envvar_prefix": "SERVINGFLEET_OPERATOR",
        "help_option_names": ["-h", "--help"],
        "show_default": True,
    }
)
@click.option("--instance", required=True, help="<namespace>.<name> of the Helm release.")
@click.option("--namespace", required=True, help="Where the operator runs.")
@click.option("--fullname", required=True, help="Prefix of the objects that the chart made.")
@click.option(
    "--watch-namespace",
    "watch_namespaces",
    multiple=True,
    help="Where fleets are looked after; may be given again. None: everywhere.",
)
@click.option("--relay-image", required=True, help="For the relays in the engines' pods.")
@click.option("--scheduler-image", required=True, help="For the schedulers.")
@click.option(
    "--image-pull-policy",
    default=OperatorSettings.image_pull_policy,
    type=click.Choice(["Always", "IfNotPresent", "Never"]),
    help="Of both.",
)
@click.option(
    "--image-pull-secret",
    "image_pull_secrets",
    multiple=True,
    help="Name of a Secret that is in every namespace with a fleet; may be given again.",
)
@click.option(
    "--allowed-image",
    "allowed_images",
    multiple=True,
    help="Pattern of images that a fleet's spec may name; may be given again. None: no image.",
)
@click.option("--webhook-service", default="", help="By which the API server finds the webhook.")
@click.option("--webhook-host", default="", help="Address of the webhook. Empty: all.")
@click.option("--webhook-port", default=OperatorSettings.webhook_port, help="0: any free port.")
@click.option(
    "--http-host", default="", help="Address of /metrics, /healthz and /readyz. Empty: all."
)
@click.option("--http-port", default=OperatorSettings.http_port, help="0: any free port.")
@click.option("--crd-dir", default=OperatorSettings.crd_dir, help="The definition shipped with it.")
@click.option(
    "--log-level",
    default=OperatorSettings.log_level,
    type=click.Choice(["debug", "info", "warning", "error"]),
    help="Least level logged, as JSON on standard error.",
)
@click.version_option(package_name="servingfleet")
def main(webhook_host: str, http_host: str, **options: object) -> None:
    """Looks after ServingFleets: their schedulers, the relays in their engines' pods, their status.

    Each option can also be set in the environment, as SERVINGFLEET_OPERATOR_<OPTION>; several values are separated by
    spaces.
    """
    settings = OperatorSettings(**options)  # type: ignore[arg-type]
    configure(settings.log_level)
    try:
        login()
        orderly = asyncio.run(_run(settings, Hosts(webhook_host, http_host)))
    except (kopf.LoginError, OSError) as error:
        raise click.ClickException(str(error)) from error
    sys.exit(0 if orderly else 1)


async def _run(settings: OperatorSettings, hosts: Hosts) -> bool:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return await Process(settings, login).run(stop, hosts)


if __name__ == "__main__":
    main()
