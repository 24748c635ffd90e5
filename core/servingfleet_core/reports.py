"""Reuse reports on the wire: sums to messages and back, and the answers of several schedulers as one.

Pure. Every figure and interval comes from sums that add up, so that a fleet's are exactly those that one scheduler would
give for all its pairs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from servingfleet_protos.v1 import fleet_pb2

from .figures import SUM_NAMES, Sums, figures

_FIELDS = tuple(name for name in SUM_NAMES if name in fleet_pb2.ReuseSums.DESCRIPTOR.fields_by_name)
_PRODUCTS = tuple(name for name in SUM_NAMES if name not in _FIELDS)


class NotAddable(ValueError):
    """A report lacks sums that its figures are made of: its scheduler is of another release."""


def reuse_report(
    model: str, replica: str, sums: Sums, set_aside: Mapping[str, int], min_pairs: int
) -> fleet_pb2.ReuseReport:
    """The figures of some sums, with the sums. An empty `replica`: all of the model's."""
    return fleet_pb2.ReuseReport(
        model=model,
        replica=replica,
        figures=[
            fleet_pb2.Figure(
                name=figure.name,
                value=figure.value,
                low=figure.low,
                high=figure.high,
                numerator=figure.numerator,
                denominator=figure.denominator,
                pairs=figure.pairs,
                definition=figure.definition,
            )
            for figure in figures(sums, min_pairs)
        ],
        sums=to_proto(sums),
        set_aside=set_aside,
    )


def to_proto(sums: Sums) -> fleet_pb2.ReuseSums:
    """Every sum, those of products by name."""
    message = fleet_pb2.ReuseSums(products={name: getattr(sums, name) for name in _PRODUCTS})
    for name in _FIELDS:
        setattr(message, name, getattr(sums, name))
    return message


def from_proto(message: fleet_pb2.ReuseSums) -> Sums:
    """Raises NotAddable where a sum of products is missing."""
    missing = [name for name in _PRODUCTS if name not in message.products]
    if missing:
        raise NotAddable(
            f"the report has no sums of products {', '.join(missing)}: install one release"
        )
    fields = {name: getattr(message, name) for name in _FIELDS}
    return Sums(**fields, **{name: message.products[name] for name in _PRODUCTS})


@dataclass(slots=True)
class _Row:
    sums: Sums = field(default_factory=Sums)
    set_aside: Counter[str] = field(default_factory=Counter)


def added(answers: Iterable[fleet_pb2.GetReuseResponse]) -> fleet_pb2.GetReuseResponse:
    """One answer for all. It spans the longest window and asks for the most pairs of them. Raises NotAddable.

    A scheduler that started later speaks for less time: its window is shorter, its sums are all there is. One that was
    asked twice, under two addresses, counts once.
    """
    rows: dict[tuple[str, str], _Row] = {}
    total = fleet_pb2.GetReuseResponse()
    instances: list[str] = []
    for answer in answers:
        if answer.instance_id in instances:
            continue
        for report in answer.reports:
            row = rows.setdefault((report.model, report.replica), _Row())
            row.sums.add(from_proto(report.sums))
            row.set_aside.update(report.set_aside)
        total.window_s = max(total.window_s, answer.window_s)
        total.min_pairs = max(total.min_pairs, answer.min_pairs)
        instances.append(answer.instance_id)
    total.instance_id = ",".join(instances)
    total.reports.extend(
        reuse_report(model, replica, row.sums, row.set_aside, total.min_pairs)
        for (model, replica), row in sorted(rows.items())
    )
    return total
