"""Joined pairs for tests of figures."""

from __future__ import annotations

from hypothesis import strategies as st

from servingfleet_core.figures import Sums


@st.composite
def pairs(draw: st.DrawFn) -> dict[str, int]:
    prompt = draw(st.integers(1, 200_000))
    lower, predicted, upper = sorted(draw(st.tuples(*[st.integers(0, prompt)] * 3)))
    return {
        "prompt": prompt,
        "best": draw(st.integers(predicted, prompt)),
        "lower": lower,
        "predicted": predicted,
        "upper": upper,
        "expected": draw(st.integers(0, upper)),
        "actual": draw(st.integers(0, prompt)),
    }


def summed(rows: list[dict[str, int]]) -> Sums:
    sums = Sums()
    for row in rows:
        sums.add_pair(**row)
    return sums
