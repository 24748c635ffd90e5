"""What first tokens say of an engine's speed: the time between two of them, and what was computed in it.

Pure. A first token comes when the engine has computed its prompt, and it computes one step after the other. So the time
from the one before (or from the dispatch, if the engine had nothing to do) is the time of what lies between, and no queue
has to be known. First tokens of one step leave together: they are one observation of all their prompts.

What other schedulers send is computed, too: their word counts, but nothing is learned from it alone, since they do so
themselves. Time in which something ran that nobody can account for says nothing: a request that failed, was cancelled
or went elsewhere; and an engine's first requests after its start, which compile.
"""

from __future__ import annotations

import math
from bisect import insort
from dataclasses import dataclass, field
from typing import NamedTuple

SAME_STEP_S = 0.005
"""First tokens of one step are seen within this: they take the same way."""
STARTING_LABELS = 3
"""Observations of a new engine life that are left out."""
PATIENCE_S = 120.0
"""A request is given up when one that was sent so much later has had its first token: whoever is gone tells nothing more."""
MAX_OPEN = 512
"""Requests of one rank that are waited for; engines run 256 at once by default. Beyond it the oldest says nothing."""


@dataclass(slots=True)
class Sent:
    """A request on one rank, from its dispatch on. Counts are tokens."""

    at: float
    prompt: int
    tiers: tuple[int, int, int, int]
    """Predicted reuse from gpu, host, disk, shared."""
    decodes: int = 0
    """Running when it was sent."""
    kv_usage: float = 0.0
    first: float | None = None
    """When its first token came."""
    own: bool = True
    """Sent by this scheduler; of others it is known what they predict and, after a while, when it began."""
    clear: bool = True
    """Only computing stood before its first token."""
    ended: bool = False
    cached: int | None = None
    """Reused, as the engine reports. None: it does not, or nobody has told."""
    cached_tiers: tuple[int, int, int, int] | None = None


class Group(NamedTuple):
    """Prompts computed together, or one after the other between two first tokens."""

    start: float
    seconds: float
    members: tuple[Sent, ...]


@dataclass(slots=True)
class Labels:
    """The first tokens of one rank."""

    incarnation: int = 0
    _waiting: dict[str, Sent] = field(default_factory=dict)
    """Without first token, in order of dispatch."""
    _begun: dict[str, Sent] = field(default_factory=dict)
    """With one, until they end."""
    _firsts: list[Sent] = field(default_factory=list)
    """By first token; those not yet part of a group."""
    _previous: float = -math.inf
    """Last first token of the last group."""
    _unclear: list[tuple[float, float]] = field(default_factory=list)
    """Times, from and until, at which something ran of which nothing is known."""
    _skip: int = STARTING_LABELS

    def restarted(self, incarnation: int) -> None:
        """A new engine life: what was sent to the old one died with it."""
        self.incarnation = incarnation
        self._waiting.clear()
        self._begun.clear()
        self._firsts.clear()
        self._unclear.clear()
        self._previous = -math.inf
        self._skip = STARTING_LABELS

    def sent(self, decision_id: str, sent: Sent) -> None:
        """A request goes there now."""
        self._waiting[decision_id] = sent
        if len(self._waiting) > MAX_OPEN:
            oldest = next(iter(self._waiting))
            self.lost(oldest, sent.at)

    def first_token(self, decision_id: str, at: float, *, clear: bool = True) -> None:
        """The first that is told counts. `clear`: nothing else is known to have held it up."""
        sent = self._waiting.pop(decision_id, None)
        if sent is None:
            return
        sent.first, sent.clear = max(at, sent.at), clear
        self._begun[decision_id] = sent
        insort(self._firsts, sent, key=_first)
        if len(self._firsts) > 2 * MAX_OPEN:
            self._previous = max(self._previous, _first(self._firsts.pop(0)))

    def peer_sent(
        self, decision_id: str, at: float, prompt: int, predicted: int, incarnation: int
    ) -> None:
        """Another scheduler has sent a request there."""
        if incarnation != self.incarnation:
            self.restarted(incarnation)
        tiers = (predicted, 0, 0, 0)
        self.sent(decision_id, Sent(at, prompt, tiers, own=False))

    def peer_first(self, decision_id: str, at: float) -> None:
        """Its first token has come. What it reused is taken to be as predicted: nobody tells more of it."""
        sent = self._waiting.get(decision_id)
        if sent is not None and not sent.own:
            self.first_token(decision_id, at)
            self.ended(decision_id, at, sent.tiers[0])

    def ended(
        self,
        decision_id: str,
        now: float,
        cached: int | None,
        cached_tiers: tuple[int, int, int, int] | None = None,
    ) -> None:
        """Its answer is complete. Tokens reused, by tier if the engine tells."""
        sent = self._begun.pop(decision_id, None)
        if sent is None:
            self.lost(decision_id, now)
            return
        sent.ended, sent.cached, sent.cached_tiers = True, cached, cached_tiers

    def lost(self, decision_id: str, now: float) -> None:
        """It failed, was cancelled, ran elsewhere, or nobody tells."""
        sent = self._waiting.pop(decision_id, None)
        if sent is not None:
            # First come, first served: it was computed before the first token of whoever came after it.
            later = (_first(each) for each in self._firsts if each.at > sent.at)
            self.unclear(sent.at, min(now, next(later, now)))
            return
        sent = self._begun.pop(decision_id, None)
        if sent is not None:
            # Its prompt was computed, but nobody knows how much of it.
            sent.ended = True

    def unclear(self, since: float, until: float) -> None:
        """Something ran there at some time between of which nothing is known."""
        self._unclear.append((since, until))
        if len(self._unclear) > MAX_OPEN:
            (since, until), (other, later) = self._unclear[:2]
            self._unclear[:2] = [(min(since, other), max(until, later))]

    def take(self, step_s: float) -> list[Group]:
        """Groups that are complete. `step_s`: seconds of a step without tokens."""
        found = []
        window = max(SAME_STEP_S, step_s / 2)
        firsts = self._firsts
        self._give_up()
        while firsts:
            count, last = 1, _first(firsts[0])
            while count < len(firsts) and _first(firsts[count]) <= _first(firsts[0]) + window:
                last = _first(firsts[count])
                count += 1
            oldest = next(iter(self._waiting.values()), None)
            # Its first token may turn out to be one of these.
            wait = (oldest is not None and oldest.at <= last) or not all(
                each.ended for each in firsts[:count]
            )
            if wait and len(firsts) <= MAX_OPEN:
                break
            members = tuple(firsts[:count])
            del firsts[:count]
            own = [_first(each) for each in members if each.own]
            # Others' first tokens are seen later than they come, and not always by as much.
            last = own[-1] if own else last
            start = max(min(each.at for each in members), self._previous)
            self._previous = max(self._previous, last)
            known = not wait and all(each.clear and each.cached is not None for each in members)
            if not own or not known or last <= start or self._disturbed(start, last):
                continue
            if self._skip:
                self._skip -= 1
                continue
            found.append(Group(start, last - start, members))
        return found

    def _give_up(self) -> None:
        while self._firsts and self._waiting:
            decision_id, oldest = next(iter(self._waiting.items()))
            if self._firsts[-1].at - oldest.at <= PATIENCE_S:
                return
            self.lost(decision_id, _first(self._firsts[-1]))

    def _disturbed(self, start: float, end: float) -> bool:
        self._unclear = [each for each in self._unclear if each[1] > start]
        return any(since < end for since, _ in self._unclear)


def _first(sent: Sent) -> float:
    assert sent.first is not None
    return sent.first
