"""What an API server must say to ServingFleets: the rules of crds/servingfleet.yaml by example.

Data only: `fleet(...)` makes the manifests, each case names a part of the refusal that a person then reads.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SMALLEST: Mapping[str, Any] = {
    "apiVersion": "servingfleet.dev/v1alpha1",
    "kind": "ServingFleet",
    "metadata": {"name": "demo", "namespace": "default"},
    "spec": {
        "model": {"name": "m"},
        "pools": [{"name": "a", "selector": {"matchLabels": {"app": "vllm"}}}],
    },
}
"""The least that is accepted."""


def fleet(changes: Mapping[str, Any]) -> dict[str, Any]:
    """SMALLEST, changed: path ("spec.pools.0.ranks") to value; None takes away."""
    made: dict[str, Any] = copy.deepcopy(dict(SMALLEST))
    for path, value in changes.items():
        *parents, last = path.split(".")
        at: Any = made
        for parent in parents:
            at = at[int(parent)] if isinstance(at, list) else at.setdefault(parent, {})
        if isinstance(at, list):
            at[int(last) : int(last) + 1] = [value]
        elif value is None:
            del at[last]
        else:
            at[last] = value
    return made


@dataclass(frozen=True)
class Refused:
    """A fleet that must not be created, or not be changed so."""

    name: str
    refusal: str
    """Part of the API server's answer."""
    changes: Mapping[str, Any]
    before: Mapping[str, Any] | None = None
    """For what must not be changed: the fleet that was there, as changes to SMALLEST. None: it is created."""


@dataclass(frozen=True)
class Accepted:
    """A fleet that must be taken, and what it then reads as."""

    name: str
    changes: Mapping[str, Any]
    reads: Mapping[str, Any] = field(default_factory=dict)


_OTHER_POOL = {"name": "b", "selector": {"matchLabels": {"app": "other"}}}

REFUSED = (
    # Names
    Refused("a long name", "at most 40 lower case letters", {"metadata.name": "a" * 41}),
    Refused("a name with dots", "at most 40 lower case letters", {"metadata.name": "my.fleet"}),
    Refused("a name with a digit first", "a letter first", {"metadata.name": "7b"}),
    # What is required
    Refused("no model", "spec.model: Required value", {"spec.model": None}),
    Refused("no pools", "spec.pools: Required value", {"spec.pools": None}),
    Refused("an empty list of pools", "should have at least 1 items", {"spec.pools": []}),
    Refused("an empty model name", "should match", {"spec.model.name": ""}),
    Refused("a model name that is a variable", "should match", {"spec.model.name": "$(HOME)"}),
    Refused(
        "a selector without labels",
        "should have at least 1 properties",
        {"spec.pools.0.selector.matchLabels": {}},
    ),
    # What can't be changed
    Refused("another model", "model.name can't be changed", {"spec.model.name": "n"}, before={}),
    Refused("another block", "blockTokens can't be changed", {"spec.blockTokens": 32}, before={}),
    Refused(
        "a block that is left out again",
        "blockTokens can't be changed",
        {},
        before={"spec.blockTokens": 32},
    ),
    # What must be unique
    Refused(
        "two pools of one name",
        'Duplicate value: {"name":"a"}',
        {"spec.pools.1": {**_OTHER_POOL, "name": "a"}},
    ),
    Refused(
        "a tier twice",
        'Duplicate value: {"tier":"host"}',
        {
            "spec.pools.0.speed.bytesPerToken": "128Ki",
            "spec.pools.0.tiers": [{"tier": "host", "bandwidth": "40G"}] * 2,
        },
    ),
    Refused("a namespace twice", "Duplicate value", {"spec.access.namespaces": ["a", "a"]}),
    # Words
    Refused("an unknown engine", "Unsupported value", {"spec.pools.0.engine": "Triton"}),
    Refused("an unknown policy", "Unsupported value", {"spec.scheduler.policy": "best"}),
    Refused("a field that is none", "unknown field", {"spec.pools.0.rank": 2}),
    # Ports
    Refused(
        "events on the http port",
        "the http port is also an event or replay port",
        {"spec.pools.0.ports": {"http": 5557}},
    ),
    Refused(
        "a later rank's events on the http port",
        "the http port is also an event or replay port",
        {"spec.pools.0.ports": {"http": 5560}, "spec.pools.0.ranks": 4},
    ),
    Refused(
        "events and replay on one port",
        "move one of them apart",
        {"spec.pools.0.ports": {"replay": 5557}},
    ),
    Refused(
        "ranks whose events reach the replay ports",
        "move one of them apart",
        {"spec.pools.0.ranks": 101},
    ),
    Refused(
        "ranks beyond the last port",
        "the last rank's port lies above 65535",
        {"spec.pools.0.ports": {"events": 65_535}, "spec.pools.0.ranks": 2},
    ),
    # Engines
    Refused(
        "an engine block that doesn't fit",
        "engineBlockTokens must be a multiple or a divisor",
        {"spec.pools.0.engineBlockTokens": 24},
    ),
    Refused(
        "a host unit that doesn't fit",
        "hostUnitTokens must be a multiple or a divisor",
        {"spec.pools.0.hostUnitTokens": 100},
    ),
    Refused(
        "extra keys of vLLM",
        "extraKeys speaks of SGLang",
        {"spec.pools.0.engine": "vLLM", "spec.pools.0.extraKeys": True},
    ),
    Refused(
        "TensorRT-LLM that connects",
        "TensorRT-LLM always binds",
        {"spec.pools.0.engine": "TensorRT-LLM", "spec.pools.0.eventsFrom": "relayBinds"},
    ),
    Refused(
        "a vLLM whose events are pulled",
        "only TensorRT-LLM's events can be pulled",
        {"spec.pools.0.engine": "vLLM", "spec.pools.0.eventsFrom": "relayPulls"},
    ),
    Refused(
        "a window group without its window",
        "should match",
        {"spec.pools.0.layerGroups": ["sliding_window:16"]},
    ),
    Refused(
        "a full group with a window",
        "should match",
        {"spec.pools.0.layerGroups": ["full_attention:16:1024"]},
    ),
    Refused(
        "a layer group of an unknown kind",
        "should match",
        {"spec.pools.0.layerGroups": ["linear:16"]},
    ),
    # Quantities and durations
    Refused(
        "tiers without the bytes of a token",
        "set speed.bytesPerToken too",
        {"spec.pools.0.tiers": [{"tier": "host", "bandwidth": "40G"}]},
    ),
    Refused(
        "a bandwidth of nothing",
        "must be more than 0",
        {
            "spec.pools.0.speed.bytesPerToken": "128Ki",
            "spec.pools.0.tiers": [{"tier": "host", "bandwidth": "0"}],
        },
    ),
    Refused(
        "bytes that are no quantity", "should match", {"spec.pools.0.speed.bytesPerToken": "much"}
    ),
    Refused("a negative quantity", "should match", {"spec.relay.resources.cpu": "-100m"}),
    Refused("a whole number of nothing", "must be more than 0", {"spec.relay.resources.cpu": 0}),
    Refused("a small relay", "at least 128Mi", {"spec.relay.resources.memory": "127Mi"}),
    Refused(
        "more requested than allowed",
        "requests.memory is more than its limits.memory",
        {"spec.scheduler.resources.requests.memory": "4Gi"},
    ),
    Refused(
        "more CPU requested than allowed",
        "requests.cpu is more than its limits.cpu",
        {"spec.scheduler.resources.limits.cpu": "100m"},
    ),
    Refused("a window of seconds", "between 1m and 24h", {"spec.scheduler.window": "30s"}),
    Refused("a window of days", "between 1m and 24h", {"spec.scheduler.window": "25h"}),
    Refused("a window of nonsense", "should match", {"spec.scheduler.window": "an hour"}),
    # Selectors and tolerations
    Refused(
        "a label that can't be one",
        "no label's name",
        {"spec.pools.0.selector.matchLabels": {"my app": "vllm"}},
    ),
    Refused(
        "a label whose domain can't be one",
        "no label's name",
        {"spec.pools.0.selector.matchLabels": {"a..b/app": "x"}},
    ),
    Refused(
        "a requirement on a label whose domain can't be one",
        "should match",
        {"spec.pools.0.selector.matchExpressions": [{"key": "a..b/app", "operator": "Exists"}]},
    ),
    Refused(
        "a label's value that can't be one",
        "should match",
        {"spec.pools.0.selector.matchLabels": {"app": "v llm"}},
    ),
    Refused(
        "a requirement on what is no label",
        "should match",
        {"spec.pools.0.selector.matchExpressions": [{"key": "-", "operator": "Exists"}]},
    ),
    Refused(
        "In without values",
        "In and NotIn need values",
        {"spec.pools.0.selector.matchExpressions": [{"key": "tier", "operator": "In"}]},
    ),
    Refused(
        "Exists with values",
        "Exists and DoesNotExist take none",
        {
            "spec.pools.0.selector.matchExpressions": [
                {"key": "tier", "operator": "Exists", "values": ["gpu"]}
            ]
        },
    ),
    Refused(
        "a toleration of nothing",
        "without a key the operator must be Exists",
        {"spec.scheduler.tolerations": [{"value": "gpu"}]},
    ),
    Refused(
        "a toleration that exists with a value",
        "Exists takes no value",
        {"spec.scheduler.tolerations": [{"key": "gpu", "operator": "Exists", "value": "a"}]},
    ),
    Refused(
        "a toleration that ends without an eviction",
        "tolerationSeconds goes with the effect NoExecute only",
        {
            "spec.scheduler.tolerations": [
                {"key": "gpu", "operator": "Exists", "tolerationSeconds": 5}
            ]
        },
    ),
    # Access
    Refused(
        "tokens in plain text",
        "a token would be readable on the network",
        {"spec.access": {"transport": "PlainText", "clients": "Token"}},
    ),
    Refused(
        "plain text without a word on clients",
        "a token would be readable on the network",
        {"spec.access": {"transport": "PlainText"}},
    ),
    Refused(
        "nobody asked over TLS",
        "transport TLS goes with clients Token or TLSOnly",
        {"spec.access": {"clients": "None"}},
    ),
    # Sizes
    Refused("no scheduler", "greater than or equal to 1", {"spec.scheduler.replicas": 0}),
    Refused("seventeen schedulers", "less than or equal to 16", {"spec.scheduler.replicas": 17}),
    Refused(
        "thirty-three pools",
        "must have at most 32 items",
        {"spec.pools": [{**_OTHER_POOL, "name": f"p{number}"} for number in range(33)]},
    ),
)

ACCEPTED = (
    Accepted(
        "the least, with the defaults",
        {},
        {
            "spec.blockTokens": 16,
            "spec.pools.0.engine": "auto",
            "spec.pools.0.ports": {"http": 8000, "events": 5557, "replay": 5657},
            "spec.relay.resources": {"cpu": "100m", "memory": "256Mi"},
            "spec.scheduler.replicas": 2,
            "spec.scheduler.resources": {
                "requests": {"cpu": "500m", "memory": "512Mi"},
                "limits": {"memory": "2Gi"},
            },
            "spec.access": {"transport": "TLS", "clients": "Token"},
        },
    ),
    Accepted("a name of 40 letters", {"metadata.name": "a" * 40}),
    Accepted(
        "an engine without replay, whatever its port",
        {"spec.pools.0.ports": {"replay": 0}, "spec.pools.0.ranks": 101},
        {"spec.pools.0.ports": {"http": 8000, "events": 5557, "replay": 0}},
    ),
    Accepted("ranks up to the replay ports", {"spec.pools.0.ranks": 100}),
    Accepted("a hybrid engine's block", {"spec.pools.0.engineBlockTokens": 528}),
    Accepted("an engine block smaller than the fleet's", {"spec.pools.0.engineBlockTokens": 8}),
    Accepted(
        "layer groups",
        {"spec.pools.0.layerGroups": ["full_attention:16", "sliding_window:16:1024", "mamba:528"]},
    ),
    Accepted(
        "tiers",
        {
            "spec.pools.0.speed.bytesPerToken": 131_072,
            "spec.pools.0.tiers": [
                {"tier": "host", "bandwidth": "40G", "latency": "3ms"},
                {"tier": "shared", "bandwidth": 8_000_000_000},
            ],
        },
    ),
    Accepted("two pools", {"spec.pools.1": _OTHER_POOL}),
    Accepted(
        "plain text, said in full", {"spec.access": {"transport": "PlainText", "clients": "None"}}
    ),
    Accepted("clients without a token", {"spec.access": {"clients": "TLSOnly"}}),
    Accepted(
        "an affinity",
        {
            "spec.scheduler.affinity": {
                "nodeAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": {
                        "nodeSelectorTerms": [
                            {"matchExpressions": [{"key": "gpu", "operator": "DoesNotExist"}]}
                        ]
                    }
                }
            }
        },
    ),
    Accepted(
        "tolerations",
        {
            "spec.scheduler.tolerations": [
                {"operator": "Exists"},
                {"key": "a", "value": "b", "effect": "NoExecute", "tolerationSeconds": 5},
            ]
        },
    ),
    Accepted("a window of a day", {"spec.scheduler.window": "23h59m60s"}),
)
