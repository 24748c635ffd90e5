"""A comparison of replays as one HTML page that needs no network: plots by plotly, and its tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

import plotly.graph_objects as go
from plotly.colors import qualitative
from plotly.subplots import make_subplots

from .definitions import DEFINITIONS
from .digest import GRID
from .document import Comparing
from .losses import MEANING, Loss
from .repeats import Case, Interval, as_text

COLOURS: Sequence[str] = qualitative.Safe
"""Told apart by colour-blind people, too."""

CEILINGS = {
    "ceiling_u1": "U1 endless cache",
    "ceiling_u2": "U2 all memory, Belady",
    "ceiling_u3": "U3 all memory, LRU",
    "ceiling_u4": "U4 greedy, perfect knowledge",
}

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 68rem; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px }
th, td { border-bottom: 1px solid #ddd; padding: .2rem .6rem; text-align: right; white-space: nowrap }
th:first-child, td:first-child { text-align: left }
td.text { text-align: left; white-space: normal; color: #666 }
pre { background: #f4f4f4; padding: .8rem; white-space: pre-wrap }
.wide { overflow-x: auto }
"""


def page(found: Comparing) -> str:
    """The whole document."""
    plots = [
        ("Time to first token", _distribution(found.cases)),
        ("Against " + found.baseline.name, _differences(found)),
        ("Reuse", _reuse(found.cases)),
        ("Where prompt tokens went", _losses(found.cases)),
        ("The course of a run", _course(found.cases)),
        ("What was said and what came", _calibration(found.cases)),
    ]
    parts = [
        f"<h2>{escape(title)}</h2>{_embedded(plot, n)}" for n, (title, plot) in enumerate(plots)
    ]
    facts = ", ".join(f"{key} {value}" for key, value in found.trace.items())
    runs = len(found.baseline.runs)
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>servingfleet replay</title>"
        f"<style>{_STYLE}</style><h1>servingfleet replay</h1><pre>{escape(found.command)}</pre>"
        f"<p>{escape(facts)}. {runs} repeats of each, arrivals jittered by seed; means with 95% "
        f"t-intervals over repeats.</p>{''.join(parts)}<h2>All figures</h2>"
        f"<div class=wide>{_figures(found.cases)}</div></html>\n"
    )


def _embedded(plot: go.Figure, number: int) -> str:
    plot.update_layout(template="plotly_white", margin={"t": 30, "b": 50}, height=420)
    # The id would be random: the same figures give the same page.
    text: str = plot.to_html(
        include_plotlyjs=number == 0,
        full_html=False,
        div_id=f"plot{number}",
        config={"displaylogo": False},
    )
    return text


def _distribution(cases: Iterable[Case]) -> go.Figure:
    plot = go.Figure()
    for case, colour in _coloured(cases):
        plot.add_scatter(
            x=_shown(case.ttft_s), y=GRID, name=case.name, mode="lines", line={"color": colour}
        )
    plot.update_xaxes(title="seconds to first token", type="log")
    plot.update_yaxes(title="of 100 requests", range=[0, 100.5])
    return plot


def _differences(found: Comparing) -> go.Figure:
    plot = go.Figure()
    names = ("ttft_mean_s", "ttft_p95_s", "ttft_p99_s")
    for (case, colour), compared in zip(
        list(_coloured(found.cases))[1:], found.against_baseline().values(), strict=True
    ):
        shown = [each for name in names for each in compared if each.figure == name]
        plot.add_scatter(
            x=list(names),
            y=_shown(each.difference.value for each in shown),
            error_y=_errors([each.difference for each in shown]),
            name=case.name,
            mode="markers",
            marker={"color": colour, "size": 9},
        )
    plot.add_hline(y=0, line={"color": "#888"})
    plot.update_layout(scattermode="group")
    plot.update_yaxes(title=f"seconds more than {found.baseline.name}")
    return plot


def _reuse(cases: Sequence[Case]) -> go.Figure:
    plot = go.Figure()
    for name, colour in zip(("reused_fraction", "fleet_ceiling"), COLOURS, strict=False):
        values = [case.figures[name] for case in cases]
        plot.add_bar(
            x=[case.name for case in cases],
            y=_shown(each.value for each in values),
            error_y=_errors(values),
            name=name,
            marker={"color": colour},
        )
    for number, (name, text) in enumerate(CEILINGS.items()):
        values = [case.figures[name] for case in cases]
        plot.add_scatter(
            x=[case.name for case in cases],
            y=_shown(each.value for each in values),
            name=text,
            mode="markers",
            marker={"symbol": "line-ew-open", "size": 40, "color": COLOURS[number + 2]},
        )
    plot.update_yaxes(title="of prompt tokens", tickformat=".0%", rangemode="tozero")
    return plot


def _losses(cases: Sequence[Case]) -> go.Figure:
    plot = go.Figure()
    for loss, colour in zip(Loss, COLOURS, strict=False):
        plot.add_bar(
            y=[case.name for case in cases],
            x=_shown(case.losses[loss].value for case in cases),
            name=f"{loss}: {MEANING[loss]}",
            orientation="h",
            marker={"color": colour},
        )
    plot.update_layout(barmode="stack", legend={"orientation": "h", "y": -0.25})
    plot.update_xaxes(title="of prompt tokens of finished requests", tickformat=".0%")
    plot.update_yaxes(autorange="reversed")
    return plot


def _course(cases: Iterable[Case]) -> go.Figure:
    plot = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.08)
    for case, colour in _coloured(cases):
        at = [moment.at_s for moment in case.course]
        shared = {"name": case.name, "line": {"color": colour}, "legendgroup": case.name}
        plot.add_scatter(
            x=at, y=_shown(m.ttft_s for m in case.course), mode="lines", row=1, col=1, **shared
        )
        shares = (m.rejected / m.requests if m.requests else math.nan for m in case.course)
        plot.add_scatter(
            x=at, y=_shown(shares), mode="lines", showlegend=False, row=2, col=1, **shared
        )
    plot.update_yaxes(title="mean s to first token", rangemode="tozero", row=1, col=1)
    plot.update_yaxes(title="rejected", tickformat=".0%", rangemode="tozero", row=2, col=1)
    plot.update_xaxes(title="second of the run when first asked", row=2, col=1)
    return plot


def _calibration(cases: Iterable[Case]) -> go.Figure:
    plot = make_subplots(rows=1, cols=2, horizontal_spacing=0.12)
    for case, colour in _coloured(cases):
        for col, bins in enumerate((case.reuse_bins, case.seconds_bins), start=1):
            full = [each for each in bins if each.weight]
            plot.add_scatter(
                x=[each.said / each.weight for each in full],
                y=[each.came / each.weight for each in full],
                text=[f"{each.requests} requests" for each in full],
                name=case.name,
                legendgroup=case.name,
                showlegend=col == 1,
                mode="lines+markers",
                marker={"color": colour},
                row=1,
                col=col,
            )
    for col, ends in enumerate(([0, 1], [0.03, 128]), start=1):
        grey = {"color": "#888", "dash": "dot"}
        plot.add_scatter(x=ends, y=ends, mode="lines", line=grey, showlegend=False, row=1, col=col)
    plot.update_xaxes(title="expected reuse / prompt", tickformat=".0%", row=1, col=1)
    plot.update_yaxes(title="reused / prompt", tickformat=".0%", row=1, col=1)
    plot.update_xaxes(title="estimated s to first token", type="log", row=1, col=2)
    plot.update_yaxes(title="real s to first token", type="log", row=1, col=2)
    return plot


def _figures(cases: Sequence[Case]) -> str:
    head = "".join(f"<th>{escape(case.name)}</th>" for case in cases)
    rows = []
    for name, definition in DEFINITIONS.items():
        values = [case.figures[name] for case in cases]
        if all(math.isnan(each.value) for each in values):
            continue
        cells = "".join(f"<td>{escape(as_text(each, definition.unit))}</td>" for each in values)
        rows.append(f"<tr><td>{name}</td>{cells}<td class=text>{escape(definition.text)}</td></tr>")
    return f"<table><tr><th>figure</th>{head}<th></th></tr>{''.join(rows)}</table>"


def _coloured(cases: Iterable[Case]) -> Iterable[tuple[Case, str]]:
    return ((case, COLOURS[number % len(COLOURS)]) for number, case in enumerate(cases))


def _errors(intervals: Iterable[Interval]) -> dict[str, object]:
    return {"array": _shown(each.high - each.value for each in intervals)}


def _shown(values: Iterable[float]) -> list[float | None]:
    """A gap where nothing tells a value."""
    return [None if math.isnan(value) else value for value in values]
