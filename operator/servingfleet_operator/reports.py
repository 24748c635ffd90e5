"""What the scheduler pods say about reuse and about their relays' streams, asked over gRPC as any client would; and what
they are told of engine pods that drain.

Every pod is asked by its own address: each has its own streams, and the fleet's figures are sums over all. What can't be
asked or told is reported, never raised.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc

from servingfleet_protos.v1 import fleet_pb2, fleet_pb2_grpc

from . import names
from .cluster import Cluster
from .observed import SchedulerReport

if TYPE_CHECKING:  # this name exists for type checkers only
    from servingfleet_protos.v1.fleet_pb2_grpc import FleetAsyncStub

DEADLINE_S = 3.0
"""For one pod, both questions together. They read counters."""
TOKEN_S = 3600
TOKEN_USED_S = 2400.0
"""A token is asked for again this long after it was given."""
MAX_MESSAGE_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True)
class Answers:
    """Who answered what, and who did not."""

    reports: tuple[SchedulerReport, ...]
    unanswered: tuple[str, ...]
    """One line for each pod that did not answer: its name, and why."""
    untold: tuple[str, ...] = ()
    """One line for each pod that could not be told who drains: its name, and why."""


@dataclass(frozen=True)
class Caller:
    """How one fleet's schedulers are spoken to."""

    ca_bundle: bytes | None
    """None: in plain text."""
    server_name: str
    """Which their certificate must carry."""
    token: str
    """Empty: none is sent."""


class Tokens:
    """Our own tokens, one for each fleet's audience, kept while they are good."""

    def __init__(self, cluster: Cluster, clock: Callable[[], float] = time.monotonic) -> None:
        self._cluster = cluster
        self._clock = clock
        self._account: tuple[str, str] | None = None
        self._tokens: dict[str, tuple[float, str]] = {}

    async def token(self, audience: str) -> str:
        """A token for that audience. Empty where we have no ServiceAccount, as with an administrator's kubeconfig.

        Raises ClusterError.
        """
        now = self._clock()
        kept = self._tokens.get(audience)
        if kept is not None and now < kept[0]:
            return kept[1]
        if self._account is None:
            user = (await self._cluster.whoami()).split(":")
            is_account = user[:2] == ["system", "serviceaccount"] and len(user) == 4
            self._account = (user[2], user[3]) if is_account else ("", "")
        namespace, account = self._account
        if not account:
            return ""
        token = await self._cluster.token(account, namespace, audience, TOKEN_S)
        self._tokens = {name: each for name, each in self._tokens.items() if now < each[0]}
        self._tokens[audience] = (now + TOKEN_USED_S, token)
        return token

    def forget(self, audience: str) -> None:
        """The token was refused: the next one is new."""
        self._tokens.pop(audience, None)


async def ask(
    pods: Sequence[Mapping[str, Any]], caller: Caller, draining: Mapping[str, bool]
) -> Answers:
    """Asks every ready scheduler pod; the others are not expected to answer.

    Tells each which replicas drain, where it does not know yet. `draining`: as `EnginePods` has it. A replica without
    a pod is left as it is: one that drained until its end must not come back, and others are not ours.
    """
    ready = [pod for pod in pods if is_ready(pod)]
    answers = await asyncio.gather(*(_ask_one(pod, caller, draining) for pod in ready))
    return Answers(
        tuple(report for report, _, _ in answers if report is not None),
        tuple(unanswered for _, unanswered, _ in answers if unanswered),
        tuple(untold for _, _, untold in answers if untold),
    )


def is_ready(pod: Mapping[str, Any]) -> bool:
    """The pod has an address, its probes pass, and nobody is deleting it."""
    status = pod.get("status") or {}
    ready = any(
        condition.get("type") == "Ready" and condition.get("status") == "True"
        for condition in status.get("conditions") or ()
    )
    return ready and bool(status.get("podIP")) and "deletionTimestamp" not in pod["metadata"]


async def _ask_one(
    pod: Mapping[str, Any], caller: Caller, draining: Mapping[str, bool]
) -> tuple[SchedulerReport | None, str, str]:
    """Its report, or why there is none; and why it could not be told who drains."""
    name = pod["metadata"]["name"]
    address = pod["status"]["podIP"]
    target = f"{f'[{address}]' if ':' in address else address}:{names.GRPC_PORT}"
    metadata = (("authorization", f"Bearer {caller.token}"),) if caller.token else ()
    try:
        async with asyncio.timeout(DEADLINE_S), _channel(target, caller) as channel:
            stub = fleet_pb2_grpc.FleetStub(channel)
            replicas, reuse = await asyncio.gather(
                stub.ListReplicas(fleet_pb2.ListReplicasRequest(), metadata=metadata),
                stub.GetReuse(fleet_pb2.GetReuseRequest(), metadata=metadata),
            )
            untold = await _tell(stub, replicas, draining, metadata)
    except TimeoutError:
        return None, f"{name}: no answer from {target} in {DEADLINE_S:g} s", ""
    except grpc.aio.AioRpcError as error:
        return None, f"{name}: {error.code().name} from {target}: {error.details()}", ""
    return SchedulerReport(name, replicas, reuse), "", f"{name}: {untold}" if untold else ""


async def _tell(
    stub: FleetAsyncStub,
    known: fleet_pb2.ListReplicasResponse,
    draining: Mapping[str, bool],
    metadata: tuple[tuple[str, str], ...],
) -> str:
    """Tells a scheduler what it does not know yet of who drains; `known` then says it too.

    Returns why it could not be told; empty: it was.
    """
    news = [
        each
        for each in known.replicas
        if draining.get(each.replica) not in (None, names.DRAINER in each.draining_by)
    ]
    answers = await asyncio.gather(
        *(
            stub.SetDraining(
                fleet_pb2.SetDrainingRequest(
                    replica=each.replica, draining=draining[each.replica], by=names.DRAINER
                ),
                metadata=metadata,
            )
            for each in news
        ),
        return_exceptions=True,
    )
    untold = ""
    for each, answer in zip(news, answers, strict=True):
        if isinstance(answer, fleet_pb2.SetDrainingResponse):
            each.draining_by[:] = answer.draining_by
        elif not isinstance(answer, grpc.aio.AioRpcError):
            raise answer
        # Else a replica that it has forgotten since: next time it is not in the list.
        elif answer.code() != grpc.StatusCode.NOT_FOUND:
            untold = f"{answer.code().name}: {answer.details()}"
    return untold


def _channel(target: str, caller: Caller) -> grpc.aio.Channel:
    options: list[tuple[str, str | int]] = [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        # Pods are reached directly, whatever the environment says of proxies.
        ("grpc.enable_http_proxy", 0),
    ]
    if caller.ca_bundle is None:
        return grpc.aio.insecure_channel(target, options=options)
    options.append(("grpc.ssl_target_name_override", caller.server_name))
    credentials = grpc.ssl_channel_credentials(root_certificates=caller.ca_bundle)
    return grpc.aio.secure_channel(target, credentials, options=options)
