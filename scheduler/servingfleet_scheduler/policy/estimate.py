"""Expected seconds to first token of a candidate, part by part, and how far they may be off.

    seconds = queue + prefill + loads + recompute + evicted + uncertain + decodes + unproven

docs/scheduler.md says what each part is. All numbers come from the candidate: its pool's speeds times its own factor, and
the rules of its engine. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from .candidate import Candidate, Estimate, Reuse
from .rules import UNKNOWN, LoadRule, Overlap, Rules
from .speeds import PRIOR_SHARE, Speeds

_NOTHING = (0.0, 0.0, 0.0)
_WIDTH_SD = 1 / math.sqrt(12.0)
"""Standard deviation of what may lie anywhere between two ends, as a share of their distance."""


class Work(NamedTuple):
    """What one prompt takes of an engine, were it alone there."""

    tokens: int
    """To be computed."""
    seconds: float
    """Steps included; without loads that run while the prompt waits: others are computed meanwhile."""


def prefill_seconds(speeds: Speeds, computed: float, reused: float) -> float:
    """Time to compute `computed` tokens after `reused` ones: superlinear, since each attends to all before it."""
    return (
        speeds.step_s * speeds.steps(computed)
        + speeds.token_s * computed
        + speeds.attention_s * computed * (reused + computed / 2)
    )


def load_seconds(speeds: Speeds, tiers: tuple[float, ...]) -> tuple[float, float, float]:
    """Of host, disk and shared, for tokens by tier (gpu first); each in full, whatever hides it."""
    return (
        speeds.host.seconds(tiers[1]),
        speeds.disk.seconds(tiers[2]),
        speeds.shared.seconds(tiers[3]),
    )


def cut(tiers: tuple[float, ...], reused: float) -> tuple[float, ...]:
    """The first `reused` tokens by tier: faster tiers hold the beginning. More than all of them are like the GPU's."""
    taken = []
    for held in tiers:
        part = min(float(held), reused)
        reused -= part
        taken.append(part)
    taken[0] += reused
    return tuple(taken)


def work(candidate: Candidate, actual: float | None = None) -> Work:
    """`actual`: tokens reused; None: as expected."""
    reuse = candidate.reuse
    reused = reuse.expected if actual is None else actual
    plan = _plan(candidate, cut(reuse.tiers, reused))
    loads = _engine_loads(plan.loads, candidate.rules)
    return Work(
        math.ceil(reuse.prompt_tokens - plan.used), plan.prefill + sum(plan.recompute) + loads
    )


def _engine_loads(loads: tuple[float, float, float], rules: Rules) -> float:
    return sum(
        load
        for load, rule in zip(loads, rules.loads, strict=True)
        if rule.overlap is not Overlap.QUEUE
    )


def work_seconds(speeds: Speeds, reuse: Reuse, rules: Rules = UNKNOWN) -> float:
    """Time that this prompt takes once its turn has come, on an idle engine."""
    plan = _plan(
        Candidate("", 0, reuse, 0.0, certain=True, speeds=speeds, rules=rules), reuse.tiers
    )
    return plan.total


def unknown_request_seconds(speeds: Speeds) -> float:
    """Work of a request of which nothing is known but that it waits."""
    return prefill_seconds(speeds, speeds.request_tokens, 0)


def drag_share(candidate: Candidate) -> float:
    """By which running decodes slow a prompt down: they take tokens of each step, and it reads their state too."""
    if not candidate.rules.mixed_steps:
        return 0.0
    budget = candidate.speeds.step_tokens
    decodes = min(candidate.running_requests, budget // 2)
    return decodes / (budget - decodes) + candidate.speeds.drag_share * candidate.kv_usage


def estimate(candidate: Candidate) -> Estimate:
    """Of one candidate."""
    return estimates([candidate])[0]


def estimates(candidates: Iterable[Candidate]) -> list[Estimate]:
    """Of each. Most targets hold nothing of a prompt, or the same: what is theirs alone is worked out by itself."""
    known: dict[tuple[int, int], _Priced] = {}
    listed = list(candidates)
    found = []
    before: tuple[Reuse | None, Speeds | None] = None, None
    for each in listed:
        reuse, speeds = each.reuse, each.speeds
        # By identity: comparing their numbers would take longer. `listed` keeps all of them alive.
        if reuse is not before[0] or speeds is not before[1]:
            before = reuse, speeds
            key = (id(reuse), id(speeds))
            if key not in known:
                known[key] = _price(reuse, speeds, each.quantile)
            priced = known[key]
        found.append(_loaded(each, priced) if priced.loads else _estimate(each, priced))
    return found


class _Priced(NamedTuple):
    """A reuse at a pool's speeds, as far as nothing of it comes from slower tiers."""

    prefill: float
    evicted: float
    uncertain: float
    variance: float
    """Square seconds, of what a pool's speeds and the reuse are uncertain by."""
    loads: bool
    """Slower tiers are used: then only the variances are right."""


class _Plan(NamedTuple):
    prefill: float
    loads: tuple[float, float, float]
    recompute: tuple[float, float, float]
    """What computing takes instead of loading."""
    used: float
    """Tokens reused."""

    @property
    def total(self) -> float:
        return self.prefill + sum(self.loads) + sum(self.recompute)


def _priced_at(reuse: Reuse, quantile: float) -> float:
    """Tokens of reuse that the price of uncertainty is for."""
    if quantile == 0.5:
        return reuse.expected
    if quantile < 0.5:
        least = min(reuse.lower, reuse.expected)
        return reuse.expected - (reuse.expected - least) * (1.0 - 2.0 * quantile)
    most = max(reuse.upper, reuse.expected)
    return reuse.expected + (most - reuse.expected) * (2.0 * quantile - 1.0)


def _price(reuse: Reuse, speeds: Speeds, quantile: float) -> _Priced:
    prompt = reuse.prompt_tokens

    def seconds(reused: float) -> float:
        return prefill_seconds(speeds, prompt - reused, reused)

    prefill = seconds(reuse.predicted)
    expected = prefill if reuse.expected == reuse.predicted else seconds(reuse.expected)
    at = _priced_at(reuse, quantile)
    uncertain = 0.0 if at == reuse.expected else seconds(at) - expected
    computed = prompt - reuse.expected
    pairs = computed * (reuse.expected + computed / 2)
    if speeds.covariance is None:
        variance = (PRIOR_SHARE * expected) ** 2
    else:
        variance = speeds.covariance.variance(speeds.steps(computed), computed, pairs)
    loads = any(reuse.tiers[1:])
    if loads:
        for tier, load in zip(
            (speeds.host, speeds.disk, speeds.shared),
            load_seconds(speeds, reuse.tiers),
            strict=True,
        ):
            variance += (tier.sd_share * load) ** 2
    if reuse.lower < reuse.upper:
        variance += (_WIDTH_SD * (seconds(reuse.lower) - seconds(reuse.upper))) ** 2
    return _Priced(prefill, expected - prefill, uncertain, variance, loads)


def _estimate(candidate: Candidate, priced: _Priced) -> Estimate:
    """Where nothing comes from slower tiers. Every target of every request passes here: no step more than needed."""
    prefill, evicted, uncertain, variance, _ = priced
    scale, queue_s = candidate.scale, candidate.queue_s
    work_s = prefill = scale * prefill
    decodes = unproven = 0.0
    if candidate.rules.mixed_steps:
        drag = drag_share(candidate)
        decodes = prefill * drag
        work_s += decodes
        evicted, uncertain = evicted * (1.0 + drag), uncertain * (1.0 + drag)
    if evicted or uncertain:
        evicted, uncertain = scale * evicted, scale * uncertain
        work_s += evicted + uncertain
    if candidate.unproven:
        unproven = candidate.speeds.unproven_s
    # In the order of PARTS.
    parts = (queue_s, prefill, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, evicted, uncertain, decodes, unproven)
    seconds = queue_s + work_s + unproven
    return Estimate(candidate, parts, seconds, work_s, variance, 0.0, work_s)


def _loaded(candidate: Candidate, priced: _Priced) -> Estimate:
    """Where slower tiers are used."""
    reuse, queue_s = candidate.reuse, candidate.queue_s
    unproven = candidate.speeds.unproven_s if candidate.unproven else 0.0
    plan = _plan(candidate, reuse.tiers)
    expected = plan.total
    if reuse.expected != reuse.predicted:
        expected = _plan(candidate, cut(reuse.tiers, reuse.expected)).total
    at = _priced_at(reuse, candidate.quantile)
    uncertain = 0.0
    if at != reuse.expected:
        uncertain = _plan(candidate, cut(reuse.tiers, at)).total - expected
    evicted = expected - plan.total
    work_s = plan.total + evicted + uncertain
    # A plan's seconds are those of steps with decodes.
    alone = 1.0 / (1.0 + drag_share(candidate))
    computing = plan.prefill + sum(plan.recompute)
    parts = (
        queue_s,
        plan.prefill * alone,
        *plan.loads,
        plan.recompute[0] * alone,
        plan.recompute[1] * alone,
        plan.recompute[2] * alone,
        evicted,
        uncertain,
        computing * (1.0 - alone),
        unproven,
    )
    seconds = queue_s + work_s + unproven
    engine_s = work_s - (sum(plan.loads) - _engine_loads(plan.loads, candidate.rules))
    return Estimate(candidate, parts, seconds, work_s, priced.variance, 0.0, engine_s)


def _plan(candidate: Candidate, tiers: tuple[float, ...]) -> _Plan:
    """The fastest way that the engine may go: how far it loads, and what it computes.

    A prefix is reused from its beginning, so that what is not loaded from one tier can't be from the next. Within a tier
    it is all or nothing: computing gets slower from token to token, loading does not.
    """
    speeds, scale, rules = candidate.speeds, candidate.scale, candidate.rules
    slower = scale * (1.0 + drag_share(candidate))
    prompt = candidate.reuse.prompt_tokens
    if not any(tiers[1:]):
        computing = slower * prefill_seconds(speeds, prompt - tiers[0], tiers[0])
        return _Plan(computing, _NOTHING, _NOTHING, tiers[0])
    full = load_seconds(speeds, tiers)
    held = sum(tiers)
    best: _Plan | None = None
    for last in range(3, -1, -1):
        # Loads host to `last` (1 to 3), computes what lies beyond.
        if last and not tiers[last]:
            continue
        used = sum(tiers[: last + 1])
        computing = slower * prefill_seconds(speeds, prompt - used, used)
        loads = _exposed(
            [scale * load if number < last else 0.0 for number, load in enumerate(full)],
            [scale * tier.fixed_s for tier in (speeds.host, speeds.disk, speeds.shared)],
            rules.loads,
            candidate.queue_s,
            computing,
        )
        plan = _Plan(computing, loads, _NOTHING, used)
        if best is None or plan.total < best.total:
            best = plan
        if last and rules.loads[last - 1].always:
            break
    assert best is not None
    if best.used == held:
        return best
    instead = [0.0, 0.0, 0.0]
    least = before = slower * prefill_seconds(speeds, prompt - held, held)
    for tier in (3, 2, 1):
        used = sum(tiers[:tier])
        if used < best.used:
            break
        after = slower * prefill_seconds(speeds, prompt - used, used)
        instead[tier - 1], before = after - before, after
    return _Plan(least, best.loads, (instead[0], instead[1], instead[2]), best.used)


def _exposed(
    loads: list[float],
    fixed: list[float],
    rules: tuple[LoadRule, LoadRule, LoadRule],
    queue_s: float,
    computing: float,
) -> tuple[float, float, float]:
    """What remains of each load after what hides it; what hid one tier's does not hide the next one's."""
    waiting = overlapped = 0.0
    left = [0.0, 0.0, 0.0]
    for number, (load, rule) in enumerate(zip(loads, rules, strict=True)):
        if not load:
            continue
        hidden = 0.0
        if rule.overlap is Overlap.QUEUE:
            hidden = min(load, max(0.0, rule.share * queue_s - waiting))
            waiting += hidden
        elif rule.overlap is Overlap.COMPUTE:
            room = max(0.0, rule.share * computing - overlapped)
            hidden = min(load - fixed[number], room)
            overlapped += hidden
        left[number] = load - hidden
    return (left[0], left[1], left[2])
