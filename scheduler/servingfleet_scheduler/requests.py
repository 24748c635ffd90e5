"""Checks what a routing request says beside its prompt, and which targets it names. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable

from servingfleet_protos.v1 import common_pb2, fleet_pb2, routing_pb2

from .errors import InvalidRequest
from .hello import MAX_MODEL_BYTES, MAX_REPLICA_BYTES

MAX_ID_BYTES = 256
MAX_TARGETS = 4096
MAX_FALLBACKS = 16
MAX_LABELS = 16
MAX_LABEL_BYTES = 512
"""Of a key, and of a value: what a relay may say of its replica."""
MAX_DRAINERS = 8
MAX_DRAINER_BYTES = 64


def check_route_request(request: routing_pb2.RouteRequest) -> None:
    """Raises InvalidRequest naming the first field that can't be right; the prompt is `prompts`' business."""
    check_size("model", request.model, 1, MAX_MODEL_BYTES)
    check_size("request_id", request.request_id, 0, MAX_ID_BYTES)
    check_size("session_id", request.session_id, 0, MAX_ID_BYTES)
    for name, targets in (("only", request.only), ("exclude", request.exclude)):
        if len(targets) > MAX_TARGETS:
            raise InvalidRequest(name, f"has {len(targets)} targets; at most {MAX_TARGETS}")
        for index, target in enumerate(targets):
            check_size(f"{name}[{index}].replica", target.replica, 0, MAX_REPLICA_BYTES)
    if request.pin_session and not request.session_id:
        raise InvalidRequest("pin_session", "is true and session_id is empty: stay with what?")
    if len(request.labels) > MAX_LABELS:
        raise InvalidRequest("labels", f"has {len(request.labels)}; at most {MAX_LABELS}")
    for key, value in request.labels.items():
        check_size("labels", key, 1, MAX_LABEL_BYTES)
        check_size("labels", value, 0, MAX_LABEL_BYTES)
    if request.HasField("deadline_s") and not 0.0 <= request.deadline_s < math.inf:
        raise InvalidRequest(
            "deadline_s", f"is {request.deadline_s}; expected seconds from now, finite"
        )
    if request.max_fallbacks > MAX_FALLBACKS:
        raise InvalidRequest(
            "max_fallbacks", f"is {request.max_fallbacks}; at most {MAX_FALLBACKS}"
        )


def check_draining_request(request: fleet_pb2.SetDrainingRequest) -> None:
    """Raises InvalidRequest naming the first field that can't be right."""
    check_size("replica", request.replica, 1, MAX_REPLICA_BYTES)
    check_size("by", request.by, 1, MAX_DRAINER_BYTES)


def check_size(field: str, value: str, least: int, most: int) -> None:
    """Raises InvalidRequest unless `value` has between `least` and `most` bytes."""
    size = len(value.encode())
    if not least <= size <= most:
        raise InvalidRequest(field, f"has {size} bytes; expected {least} to {most}")


def names(targets: Iterable[common_pb2.Target], replica: str, rank: int) -> bool:
    """One of `targets` is this rank: an empty replica is any replica, an absent rank any rank."""
    return any(
        target.replica in ("", replica) and (not target.HasField("rank") or target.rank == rank)
        for target in targets
    )
