"""Writes docs/crd.md, the reference of a ServingFleet, from its schema: `python crds/reference.py [--check]`.

--check: writes nothing, and fails if the page is not what the schema says.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

SCHEMA = Path(__file__).parent / "servingfleet.yaml"
PAGE = Path(__file__).parent.parent / "docs" / "crd.md"

Node = Mapping[str, Any]


def page(definition: Node) -> str:
    """The whole page."""
    names = definition["spec"]["names"]
    version = definition["spec"]["versions"][0]
    root = version["schema"]["openAPIV3Schema"]
    group = f"{definition['spec']['group']}/{version['name']}"
    short, categories = ", ".join(names["shortNames"]), ", ".join(names["categories"])
    parts = [
        f"# {names['kind']}",
        "<!-- Generated from crds/servingfleet.yaml by crds/reference.py: change it there. -->",
        f"`{group}`, namespaced; short name `{short}`, category `{categories}`. "
        + f"`kubectl explain {names['singular']}.spec` says the same.",
        root["description"],
        _refusals(root),
        "## Columns of `kubectl get`",
        _table(
            ("Column", "Shows", "With `-o wide` only"),
            (
                (
                    column["name"],
                    column.get("description") or f"`{column['jsonPath']}`",
                    "yes" if column.get("priority") else "",
                )
                for column in version["additionalPrinterColumns"]
            ),
        ),
    ]
    for name in ("spec", "status"):
        parts += _objects(name, root["properties"][name], depth=2)
    return "\n\n".join(parts) + "\n"


def _objects(path: str, node: Node, depth: int) -> Iterator[str]:
    """A section for an object with its fields, then one for each object inside it."""
    fields = node["properties"]
    required = set(node.get("required", ()))
    yield f"{'#' * min(depth, 4)} `{path}`"
    if depth == 2:
        yield _text(node)
    if "x-kubernetes-validations" in node:
        yield _refusals(node)
    yield _table(
        ("Field", "Type", "Default", "Meaning"),
        (
            (f"`{name}`", _type(field), _default(field, name in required), _meaning(field))
            for name, field in fields.items()
        ),
    )
    for name, field in fields.items():
        inner, suffix = (field["items"], "[]") if "items" in field else (field, "")
        if "properties" in inner:
            yield from _objects(f"{path}.{name}{suffix}", inner, depth + 1)


def _type(node: Node) -> str:
    if node.get("x-kubernetes-int-or-string"):
        return "quantity"
    if "items" in node:
        key = node.get("x-kubernetes-list-map-keys")
        unique = f", unique by `{key[0]}`" if key else ""
        unique = ", no value twice" if node.get("x-kubernetes-list-type") == "set" else unique
        return f"list of {_type(node['items'])}{unique}"
    if "additionalProperties" in node:
        return f"map of {_type(node['additionalProperties'])}"
    return str(node.get("format") if node.get("format") == "date-time" else node["type"])


def _default(node: Node, required: bool) -> str:
    if required:
        return "required"
    value = node.get("default")
    if value is None or value == {}:
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _meaning(node: Node) -> str:
    parts = [_text(node), *(f"{bound[:1].upper()}{bound[1:]}." for bound in _bounds(node))]
    if "properties" not in node and "x-kubernetes-validations" in node:
        parts.append(_refusals(node))
    return " ".join(filter(None, parts))


def _bounds(node: Node) -> Iterator[str]:
    if "enum" in node:
        yield "one of " + ", ".join(f"`{value}`" for value in node["enum"] if value != "")
    if "minimum" in node and "maximum" in node:
        yield f"{node['minimum']} to {node['maximum']}"
    if "maxItems" in node:
        yield f"{node.get('minItems', 0)} to {node['maxItems']} items"
    if "maxProperties" in node:
        yield f"{node.get('minProperties', 0)} to {node['maxProperties']} entries"


def _refusals(node: Node) -> str:
    """The rules that hold across fields, by the words with which the API server refuses what breaks them."""
    messages = [f'"{rule["message"]}"' for rule in node["x-kubernetes-validations"]]
    if len(messages) == 1:
        return f"Refused otherwise: {messages[0]}."
    return "\n".join(["Refused otherwise:", "", *(f"- {message}" for message in messages)])


def _text(node: Node) -> str:
    """The description, without the default that stands in a column of its own."""
    return str(node.get("description", "")).partition(" By default ")[0].strip()


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main(arguments: list[str]) -> int:
    """Returns the exit status: 1 where --check finds another page."""
    wanted = page(yaml.safe_load(SCHEMA.read_text()))
    if arguments != ["--check"]:
        PAGE.write_text(wanted)
        return 0
    found = PAGE.read_text() if PAGE.exists() else ""
    if found == wanted:
        return 0
    sys.stderr.writelines(
        difflib.unified_diff(
            found.splitlines(keepends=True),
            wanted.splitlines(keepends=True),
            "docs/crd.md",
            "schema",
        )
    )
    print("docs/crd.md is not what the schema says: run python crds/reference.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
