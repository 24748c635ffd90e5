"""`servingfleet drain`: takes a replica out of routing, and back in."""

from __future__ import annotations

from collections.abc import Sequence

import click
from google.protobuf.json_format import MessageToDict

from servingfleet_protos.v1 import fleet_pb2
from servingfleet_protos.v1.fleet_pb2_grpc import FleetStub

from . import exits
from .connecting import Scheduler, schedulers_options
from .output import console, format_option, print_json


@click.command()
@schedulers_options
@click.argument("replica")
@click.option("--undo", is_flag=True, help="Take it back into routing.")
@click.option(
    "--by",
    default="cli",
    show_default=True,
    help="In whose name: it drains until everybody who drained it has taken that back.",
)
@format_option
def drain(schedulers: Sequence[Scheduler], replica: str, undo: bool, by: str, output: str) -> None:
    """Send REPLICA no new requests; what runs there goes on. Name every scheduler: none tells the others.

    In Kubernetes REPLICA is the pod's uid, and the annotation servingfleet.dev/drain: "true" on the pod does the same
    through the operator, for all schedulers and also for those that start later.
    """
    asked = fleet_pb2.SetDrainingRequest(replica=replica, draining=not undo, by=by)
    answers: dict[str, fleet_pb2.SetDrainingResponse] = {}
    failed: list[exits.Exit] = []
    for scheduler in schedulers:
        try:
            with scheduler.channel() as channel:
                answers[scheduler.target] = FleetStub(channel).SetDraining(
                    asked, timeout=scheduler.timeout_s
                )
        except exits.Exit as error:
            failed.append(error)  # the others are told all the same
    if output == "json":
        print_json(
            {at: MessageToDict(a, preserving_proto_field_name=True) for at, a in answers.items()}
        )
        answers.clear()
    for target, answer in answers.items():
        drained = f"drained by {', '.join(answer.draining_by)}" if answer.draining_by else "in use"
        console().print(
            f"{target}: {replica} is {drained}; {answer.dispatched_requests} requests of "
            "this scheduler have not ended there",
            soft_wrap=True,
        )
    if failed:
        raise exits.Exit("\n".join(each.message for each in failed), failed[0].exit_code)
