"""Label selectors, as the API server reads them. Pure.

A selector is a conjunction of requirements; here it is a set of them, whoever wrote it: a pool, or a NetworkPolicy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from .spec import Selector, SelectorOperator


class Requirement(NamedTuple):
    """One condition on one label."""

    key: str
    operator: str
    values: tuple[str, ...] = ()

    def holds(self, labels: Mapping[str, str]) -> bool:
        """A label that is absent satisfies NotIn, as it does in the API server."""
        match self.operator:
            case SelectorOperator.IN:
                return labels.get(self.key) in self.values
            case SelectorOperator.NOT_IN:
                return labels.get(self.key) not in self.values
            case SelectorOperator.EXISTS:
                return self.key in labels
            case SelectorOperator.DOES_NOT_EXIST:
                return self.key not in labels
        # An operator of a later API: a selector that can't be read selects nothing.
        return False

    def manifest(self) -> dict[str, Any]:
        """As an item of `matchExpressions`."""
        item: dict[str, Any] = {"key": self.key, "operator": str(self.operator)}
        return {**item, "values": list(self.values)} if self.values else item


def of_pool(selector: Selector) -> tuple[Requirement, ...]:
    """What a pool's selector requires, in a fixed order."""
    return tuple(
        sorted(
            {
                *(
                    Requirement(key, SelectorOperator.IN, (value,))
                    for key, value in selector.match_labels.items()
                ),
                *(
                    Requirement(each.key, each.operator, tuple(sorted(set(each.values))))
                    for each in selector.match_expressions
                ),
            }
        )
    )


def of_manifest(selector: Mapping[str, Any]) -> tuple[Requirement, ...]:
    """What a metav1.LabelSelector requires. {} requires nothing, and so selects everything."""
    return (
        *(
            Requirement(key, SelectorOperator.IN, (value,))
            for key, value in (selector.get("matchLabels") or {}).items()
        ),
        *(
            Requirement(each["key"], each["operator"], tuple(each.get("values") or ()))
            for each in selector.get("matchExpressions") or ()
        ),
    )


def matches(requirements: Iterable[Requirement], labels: Mapping[str, str]) -> bool:
    """Every requirement holds."""
    return all(each.holds(labels) for each in requirements)


def labels_of(resource: Mapping[str, Any]) -> Mapping[str, str]:
    """The labels of an object."""
    return (resource.get("metadata") or {}).get("labels") or {}
