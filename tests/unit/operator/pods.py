"""Pods and fleets for the operator's tests."""

from __future__ import annotations

from typing import Any

from servingfleet_operator.settings import OperatorSettings
from servingfleet_operator.spec import Fleet, parse

SETTINGS = OperatorSettings(
    instance="ops.servingfleet",
    namespace="ops",
    fullname="servingfleet",
    relay_image="registry.example/relay:1",
    scheduler_image="registry.example/scheduler:1",
    image_pull_secrets=("registry",),
    allowed_images=("registry.example/*",),
)


def fleet(*pools: dict[str, Any], **spec: Any) -> Fleet:
    """A fleet named demo; without pools with one that selects app=vllm."""
    return parse(
        {
            "metadata": {"name": "demo", "namespace": "serving", "uid": "u-1", "generation": 1},
            "spec": {
                "model": {"name": "org/model"},
                "pools": list(pools) or [{"name": "main", "selector": selector(app="vllm")}],
                **spec,
            },
        }
    )


def selector(**labels: str) -> dict[str, Any]:
    return {"matchLabels": labels}


def pod(*args: str, command: list[str] | None = None, **container: Any) -> dict[str, Any]:
    """A pod with app=vllm, whose only container runs `vllm serve` with these words, or the command given."""
    return {
        "metadata": {"name": "vllm-0", "namespace": "serving", "labels": {"app": "vllm"}},
        "spec": {
            "containers": [
                {
                    "name": "engine",
                    "image": "registry.example/engine:1",
                    "command": ["vllm", "serve"] if command is None else command,
                    "args": list(args),
                    **container,
                }
            ]
        },
    }
