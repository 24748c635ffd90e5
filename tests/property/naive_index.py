"""The prefix index as sets, and the resume function as its definition reads: slow, and plainly right.

Shares no code with the core. Times are tokens, blocks are counted from 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

GPU = 1
ATTENTION, WINDOW, RECURRENT = 1, 2, 3
CONFIRMED, UPPER = 1, 2


@dataclass(frozen=True)
class Lane:
    number: int
    tier: int
    state_class: int
    group: int
    window: int
    unit: int
    upper_in_predicted: bool
    store: str = ""
    """A store that others load from, too."""

    def packed(self) -> tuple[int, int, int, int, int, int, bool]:
        return (
            self.number,
            self.tier,
            self.state_class,
            self.group,
            self.window,
            self.unit,
            self.upper_in_predicted,
        )


@dataclass(frozen=True)
class Rule:
    tier: int
    whole_prompt: bool = False
    less_units: int = 0
    extends: bool = True

    def packed(self) -> tuple[int, bool, int, bool]:
        return (self.tier, self.whole_prompt, self.less_units, self.extends)


@dataclass(frozen=True)
class Profile:
    lanes: tuple[Lane, ...] = ()
    rules: tuple[Rule, ...] = ()

    def rule(self, tier: int) -> Rule:
        return next((rule for rule in self.rules if rule.tier == tier), Rule(tier))


@dataclass
class Credit:
    replica: int
    rank: int
    hashes: tuple[int, ...]
    prompt: int
    state: range
    """Blocks that count in window and recurrent lanes; in `upper` those before count, too."""
    at: float | None
    superseded: set[int] = field(default_factory=set)


@dataclass
class Rank:
    trusted: bool
    complete: bool
    held: dict[int, dict[int, int]] = field(default_factory=dict)  # lane: {hash: confidence}
    used: dict[int, dict[int, float]] = field(default_factory=dict)  # lane: {hash: time}, if known
    evicted: dict[int, list[float | None]] = field(default_factory=dict)  # tier: idle times


@dataclass(frozen=True)
class Answer:
    replica: int
    rank: int
    lower: int
    predicted: int
    upper: int
    tiers: tuple[int, int, int, int]
    credited: int


class NaiveIndex:
    def __init__(self, block_tokens: int) -> None:
        self.block = block_tokens
        self.profiles: dict[int, Profile] = {}
        self.ranks: dict[tuple[int, int], Rank] = {}
        self.credits: dict[str, Credit] = {}
        self.credited: dict[tuple[int, int, int], float] = {}
        """By replica, rank and hash: the last use that any credit told of, while one of them is open."""
        self.latest = 0.0
        """When the last use was or will be."""

    def set_profile(self, replica: int, profile: Profile) -> None:
        self.profiles[replica] = profile
        numbers = {lane.number for lane in profile.lanes}
        for (of, _), rank in self.ranks.items():
            if of == replica:
                rank.held = {lane: held for lane, held in rank.held.items() if lane in numbers}
                rank.used = {lane: used for lane, used in rank.used.items() if lane in numbers}

    def remove_replica(self, replica: int) -> None:
        del self.profiles[replica]
        for key in [key for key in self.ranks if key[0] == replica]:
            self.close_credits(*key)
            del self.ranks[key]

    def set_rank(self, replica: int, rank: int, trusted: bool, complete: bool) -> None:
        known = self.ranks.setdefault((replica, rank), Rank(trusted, complete))
        known.trusted, known.complete = trusted, complete

    def hold(
        self,
        replica: int,
        rank: int,
        lane: int,
        confidence: int,
        hashes: Iterable[int],
        now: float | None = None,
    ) -> int:
        held = self.ranks[replica, rank].held.setdefault(lane, {})
        hashes = list(hashes)
        if now is not None:
            used = self.ranks[replica, rank].used.setdefault(lane, {})
            used.update({value: now for value in hashes if value not in held})
        new = {value for value in hashes if held.get(value) != confidence}
        held.update(dict.fromkeys(hashes, confidence))
        if self._ends_credits(self.profiles[replica], lane, confidence):
            for credit in self.credits.values():
                if (credit.replica, credit.rank) == (replica, rank):
                    credit.superseded.update(hashes)
        return len(new)

    @staticmethod
    def _ends_credits(profile: Profile, number: int, confidence: int) -> bool:
        gpu = [lane for lane in profile.lanes if lane.tier == GPU]
        spoken = [lane for lane in gpu if lane.state_class == ATTENTION] or gpu
        return any(
            lane.number == number and (confidence == CONFIRMED or lane.upper_in_predicted)
            for lane in spoken
        )

    def drop(
        self,
        replica: int,
        rank: int,
        lane: int,
        hashes: Iterable[int],
        now: float | None = None,
    ) -> int:
        known = self.ranks[replica, rank]
        held = known.held.get(lane, {})
        gone = {value for value in hashes if value in held}
        for value in gone:
            del held[value]
            used = known.used.get(lane, {}).pop(value, None)
            moved = any(value in other for other in known.held.values())
            if now is not None and not moved:
                tier = next(
                    each.tier for each in self.profiles[replica].lanes if each.number == lane
                )
                idle = None if used is None or self.latest > now else now - used
                known.evicted.setdefault(tier, []).append(idle)
        return len(gone)

    def touch(self, replica: int, rank: int, hashes: Iterable[int], now: float) -> None:
        known = self.ranks[replica, rank]
        self.latest = max(self.latest, now)
        everything = [held for each in self.ranks.values() for held in each.held.values()]
        for value in hashes:
            if not any(value in held for held in everything):
                return
            for lane, held in known.held.items():
                if value in held:
                    used = known.used.setdefault(lane, {})
                    used[value] = max(now, used.get(value, now))

    def tail(
        self, replica: int, rank: int, value: int
    ) -> tuple[int, list[float | None], float | None]:
        """Of a block: the slowest tier that holds it (0: none does), when each lane there used it (None: nobody
        knows), and when any of them last used anything."""
        known = self.ranks[replica, rank]
        holding = [
            lane
            for lane in self.profiles[replica].lanes
            if value in known.held.get(lane.number, {})
        ]
        if not holding:
            counts = any(
                (each.replica, each.rank) == (replica, rank)
                and value in each.hashes
                and value not in each.superseded
                for each in self.credits.values()
            )
            last = self.credited.get((replica, rank, value))
            return GPU * counts, [last] if counts else [], last
        tier = max(lane.tier for lane in holding)
        lanes = [lane.number for lane in holding if lane.tier == tier]
        used = [known.used.get(lane, {}).get(value) for lane in lanes]
        ever = [time for lane in lanes for time in known.used.get(lane, {}).values()]
        return tier, used, max(ever, default=None)

    def clear(self, replica: int, rank: int, lane: int | None) -> int:
        held = self.ranks[replica, rank].held
        lanes = list(held) if lane is None else [lane]
        for number in lanes:
            self.ranks[replica, rank].used.pop(number, None)
        if lane is None:
            self.ranks[replica, rank].evicted.clear()
        return sum(len(held.pop(number, {})) for number in lanes)

    def open_credit(
        self,
        decision: str,
        replica: int,
        rank: int,
        hashes: Sequence[int],
        prompt: int,
        at: float | None = None,
    ) -> bool:
        if decision in self.credits:
            return False
        state = self.kept_state(self.profiles[replica], prompt)
        self.credits[decision] = Credit(replica, rank, tuple(hashes), prompt, state, at)
        for value in hashes if at is not None else ():
            key = (replica, rank, value)
            self.credited[key] = max(at or 0.0, self.credited.get(key, 0.0))
        return True

    def kept_state(self, profile: Profile, prompt: int) -> range:
        first, last = [], []
        for lane in profile.lanes:
            if lane.tier != GPU or lane.state_class == ATTENTION:
                continue
            units = -(-max(0, lane.window - 1) // lane.unit) if lane.state_class == WINDOW else 1
            end = max(0, prompt - 1) // lane.unit * lane.unit
            first.append(max(0, end - units * lane.unit) // self.block)
            last.append(end // self.block)
        if not first:
            return range(max(0, prompt - 1) // self.block)
        return range(min(first), max(last))

    def close_credit(self, decision: str) -> bool:
        closed = self.credits.pop(decision, None)
        if closed is None:
            return False
        place = (closed.replica, closed.rank)
        named = {
            value
            for each in self.credits.values()
            if (each.replica, each.rank) == place
            for value in each.hashes
        }
        for value in set(closed.hashes) - named:
            self.credited.pop((*place, value), None)
        return True

    def close_credits(self, replica: int, rank: int) -> int:
        names = [
            name
            for name, credit in self.credits.items()
            if (credit.replica, credit.rank) == (replica, rank)
        ]
        for name in names:
            self.close_credit(name)
        return len(names)

    def holdings(self, replica: int, rank: int, lane: int, confidence: int) -> list[int]:
        held = self.ranks[replica, rank].held.get(lane, {})
        return sorted(value for value, known in held.items() if known == confidence)

    def entries(self) -> int:
        return sum(len(held) for rank in self.ranks.values() for held in rank.held.values())

    def blocks(self) -> int:
        held = [held for rank in self.ranks.values() for held in rank.held.values()]
        return len({value for values in held for value in values})

    def match(self, hashes: Sequence[int], prompt: int, no_reuse: bool) -> list[Answer]:
        answers = []
        for replica, rank in sorted(self.ranks):
            known = self.ranks[replica, rank]
            question = Question(self, replica, rank, hashes, prompt)
            lower = predicted = upper = (0, 0, 0, 0)
            if not no_reuse:
                if known.trusted:
                    lower = question.resumed("lower")
                    predicted = question.resumed("predicted")
                possible = question.resumed("upper")
                upper = (question.most(known.trusted), 0, 0, 0)
                if known.trusted:
                    # More on a fast tier can leave less than a unit to a slower one.
                    views = (lower, predicted, possible)
                    lower = min(views, key=sum)
                    upper = max(views, key=sum) if known.complete else upper
                    predicted = min(predicted, possible, key=sum)
            answers.append(
                Answer(
                    replica,
                    rank,
                    sum(lower),
                    sum(predicted),
                    sum(upper),
                    predicted,
                    sum(predicted) - sum(lower),
                )
            )
        return answers


class Question:
    """What one rank can resume of one prompt."""

    def __init__(
        self, index: NaiveIndex, replica: int, rank: int, hashes: Sequence[int], prompt: int
    ) -> None:
        self.block = index.block
        self.hashes = hashes
        self.prompt = prompt
        self.profile = index.profiles[replica]
        self.lanes = self.profile.lanes or (Lane(-1, GPU, ATTENTION, 0, 0, index.block, False),)
        self.held = index.ranks[replica, rank].held
        self.told = {
            (lane.store, lane.group): [
                known.held.get(other.number, {})
                for (of, _), known in index.ranks.items()
                if known.trusted
                for other in index.profiles[of].lanes
                if (other.store, other.group) == (lane.store, lane.group)
            ]
            for lane in self.lanes
            if lane.store
        }
        self.credits = [
            credit
            for credit in index.credits.values()
            if (credit.replica, credit.rank) == (replica, rank)
        ]

    def credited(self, lane: Lane, block: int, view: str) -> bool:
        value = self.hashes[block]
        for credit in self.credits:
            if value in credit.superseded or value not in credit.hashes:
                continue
            at = credit.hashes.index(value)
            if lane.state_class == ATTENTION or at in credit.state:
                return True
            if view == "upper" and at < credit.state.stop:
                return True
        return False

    def present(self, lane: Lane, block: int, view: str) -> bool:
        if block >= len(self.hashes):
            return False
        told = self.told.get((lane.store, lane.group), [self.held.get(lane.number, {})])
        levels = {held[self.hashes[block]] for held in told if self.hashes[block] in held}
        known = min(levels, default=None)  # confirmed by anybody
        if known == CONFIRMED:
            return True
        if view == "lower":
            return False
        if lane.tier == GPU and self.credited(lane, block, view):
            return True
        return known == UPPER and (view == "upper" or lane.upper_in_predicted)

    def resumed(self, view: str) -> tuple[int, int, int, int]:
        """Tokens by tier."""
        groups = {lane.group for lane in self.lanes}
        tiers = sorted({lane.tier for lane in self.lanes})
        split = {1: 0, 2: 0, 3: 0, 4: 0}
        claim, partial = 0, False
        for tier in tiers:
            rule = self.profile.rule(tier)
            lanes = [lane for lane in self.lanes if lane.tier == tier]
            if tier != tiers[0] and not rule.extends:
                continue
            units = [lane.unit for lane in lanes]
            step = next(n for n in range(1, 10**6) if all(n % unit == 0 for unit in units))
            cap = self.prompt if rule.whole_prompt else max(0, self.prompt - 1)
            cap -= cap % step
            less = rule.less_units * step
            if {lane.group for lane in lanes} != groups:
                continue
            small = step < self.block
            bridge = view == "upper" and small and partial
            reach = max(claim, self.boundary(lanes, view, claim, cap, step, less, bridge))
            if reach - claim < step:
                reach = claim
            partial = view == "upper" and small
            if partial:
                reach = max(reach, min(reach + self.block - step, cap))
            split[tier] = max(claim, reach - less) - claim
            claim += split[tier]
        return (split[1], split[2], split[3], split[4])

    def most(self, trusted: bool) -> int:
        """What the engine could report at most, whatever it holds."""
        whole = {rule.tier for rule in self.profile.rules if rule.whole_prompt}
        if not (trusted and self.profile.lanes):
            # What was learned of its units may be wrong.
            return max(0, self.prompt - (not whole))
        declared = sorted({lane.tier for lane in self.lanes})
        most = self.prompt if whole - set(declared) else 0
        for tier in declared:
            rule = self.profile.rule(tier)
            if tier != declared[0] and not rule.extends:
                continue
            units = [lane.unit for lane in self.lanes if lane.tier == tier]
            step = next(n for n in range(1, 10**6) if all(n % unit == 0 for unit in units))
            cap = self.prompt if rule.whole_prompt else max(0, self.prompt - 1)
            most = max(most, cap - cap % step - rule.less_units * step)
        return most

    def boundary(
        self,
        lanes: Sequence[Lane],
        view: str,
        claim: int,
        cap: int,
        step: int,
        less: int,
        bridge: bool,
    ) -> int:
        """The largest boundary beyond the claim on which all groups agree; 0: none."""
        for end in range(min(cap, len(self.hashes) * self.block), claim, -1):
            if end % step:
                continue
            if step < self.block and end % self.block and end != cap:
                continue  # inside a block only the cap ends a claim
            groups = {lane.group for lane in lanes}
            if all(
                self.agrees(
                    [lane for lane in lanes if lane.group == group], view, claim, end, less, bridge
                )
                for group in groups
            ):
                return end
        return 0

    def agrees(
        self, lanes: Sequence[Lane], view: str, claim: int, end: int, less: int, bridge: bool
    ) -> bool:
        unit = next(n for n in range(1, 10**6) if all(n % lane.unit == 0 for lane in lanes))
        start = -(-claim // self.block) * self.block if bridge else claim - claim % unit
        first = lanes[0]
        if first.state_class == ATTENTION:
            begin = start
        elif view == "upper" and unit < self.block:
            return True
        elif first.state_class == WINDOW:
            units = -(-max(0, first.window - 1) // unit)
            begin = max(end - units * unit - less, start)
        else:
            begin = end - unit
        blocks = range(begin // self.block, -(-end // self.block))
        if begin >= end:
            return True
        return all(any(self.present(lane, block, view) for lane in lanes) for block in blocks)
