"""The schema of a ServingFleet, and how to hold values and Python types against it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
import yaml
from msgspec import inspect

from servingfleet_operator.quantities import DURATION_PATTERN, QUANTITY_PATTERN, Duration, Quantity

DEFINITION: Mapping[str, Any] = yaml.safe_load(
    (Path(__file__).parents[3] / "crds" / "servingfleet.yaml").read_text()
)
VERSION: Mapping[str, Any] = DEFINITION["spec"]["versions"][0]
ROOT: Mapping[str, Any] = VERSION["schema"]["openAPIV3Schema"]
SPEC: Mapping[str, Any] = ROOT["properties"]["spec"]
STATUS: Mapping[str, Any] = ROOT["properties"]["status"]

_BOUNDS = (
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "pattern",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
)


def fields(node: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every field below a node, with its path."""
    for name, field in node.get("properties", {}).items():
        yield f"{path}.{name}", field
        yield from fields(field, f"{path}.{name}")
        yield from fields(field.get("items", {}), f"{path}.{name}[]")


def shape(node: Mapping[str, Any]) -> dict[str, Any]:
    """What a node of the schema says of values, without words and rules."""
    if node.get("x-kubernetes-int-or-string"):
        said: dict[str, Any] = {"type": "quantity"}
    else:
        said = {"type": node["type"]}
    said |= {bound: node[bound] for bound in _BOUNDS if bound in node}
    if "enum" in node:
        said["enum"] = list(node["enum"])
    if "properties" in node:
        said["properties"] = {name: shape(field) for name, field in node["properties"].items()}
        said["required"] = sorted(node.get("required", ()))
    if "items" in node:
        said["items"] = shape(node["items"])
    if isinstance(node.get("additionalProperties"), Mapping):
        said["values"] = shape(node["additionalProperties"])
    if node.get("x-kubernetes-preserve-unknown-fields"):
        said["values"] = "any"
    if "default" in node:
        said["default"] = node["default"]
    return said


def shape_of(kind: inspect.Type) -> dict[str, Any]:
    """The same of a Python type."""
    match kind:
        case inspect.UnionType():
            (kind,) = (each for each in kind.types if not isinstance(each, inspect.NoneType))
            return shape_of(kind)
        case inspect.CustomType(cls=cls) if cls is Quantity:
            return {"type": "quantity", "pattern": QUANTITY_PATTERN, "maxLength": 32}
        case inspect.CustomType(cls=cls) if cls is Duration:
            return {"type": "string", "pattern": DURATION_PATTERN, "maxLength": 32}
        case inspect.StrType():
            bounds = ("minLength", kind.min_length), ("maxLength", kind.max_length)
            return _bounded("string", *bounds, ("pattern", kind.pattern))
        case inspect.IntType():
            return _bounded("integer", ("minimum", kind.ge), ("maximum", kind.le))
        case inspect.BoolType():
            return {"type": "boolean"}
        case inspect.EnumType():
            return {"type": "string", "enum": [each.value for each in kind.cls]}
        case inspect.VarTupleType():
            bounds = ("minItems", kind.min_length), ("maxItems", kind.max_length)
            return {**_bounded("array", *bounds), "items": shape_of(kind.item_type)}
        case inspect.DictType():
            bounds = ("minProperties", kind.min_length), ("maxProperties", kind.max_length)
            any_value = isinstance(kind.value_type, inspect.AnyType)
            values = "any" if any_value else shape_of(kind.value_type)
            return {**_bounded("object", *bounds), "values": values}
        case inspect.StructType():
            return {
                "type": "object",
                "properties": {
                    each.encode_name: shape_of(each.type) | _default(each) for each in kind.fields
                },
                "required": sorted(each.encode_name for each in kind.fields if each.required),
            }
    raise TypeError(kind)


def _bounded(kind: str, *bounds: tuple[str, object]) -> dict[str, Any]:
    return {"type": kind, **{name: value for name, value in bounds if value is not None}}


def _default(field: inspect.Field) -> dict[str, Any]:
    value = field.default
    if field.default_factory is not msgspec.NODEFAULT:
        value = field.default_factory()
    if value is msgspec.NODEFAULT or value in ("", None, (), {}):
        # What is not there and what is empty are one to the operator.
        return {}
    if isinstance(value, msgspec.Struct):
        return {"default": {}}
    return {"default": value.value if isinstance(value, Enum) else value}


def problems(value: Any, node: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Where an API server would refuse or prune the value, its CEL rules apart."""
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
    if "type" in node and not isinstance(value, kinds[node["type"]]):
        yield f"{path}: {value!r} is no {node['type']}"
        return
    if "enum" in node and value not in node["enum"]:
        yield f"{path}: {value!r} is none of {node['enum']}"
    if "pattern" in node and not re.search(node["pattern"], value):
        yield f"{path}: {value!r} does not match {node['pattern']}"
    if isinstance(value, str) and len(value) > node.get("maxLength", len(value)):
        yield f"{path}: {len(value)} characters"
    if isinstance(value, list):
        if len(value) > node.get("maxItems", len(value)):
            yield f"{path}: {len(value)} items"
        for number, item in enumerate(value):
            yield from problems(item, node["items"], f"{path}[{number}]")
    if isinstance(value, int) and value < node.get("minimum", value):
        yield f"{path}: {value}"
    if isinstance(value, dict):
        for name in node.get("required", ()):
            if name not in value:
                yield f"{path}.{name}: missing"
        for name, inner in value.items():
            if name in node["properties"]:
                yield from problems(inner, node["properties"][name], f"{path}.{name}")
            else:
                yield f"{path}.{name}: unknown"
