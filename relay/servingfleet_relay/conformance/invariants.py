"""What must hold of an engine's event stream, each with what follows when it does not.

Pure data. A failure is counted under one of the `reasons` of its invariant; `docs/invariants.md` is written from this
table. `design` names the section of the engines' reference that the check comes from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Scope(StrEnum):
    """What a failure is held against."""

    STREAM = "stream"
    """All that the rank publishes."""
    TIER = "tier"
    """Of a tier other than the GPU: that tier alone. Of the GPU: the stream."""


class Action(StrEnum):
    """What follows a failure."""

    WARN = "warn"
    """Counted and told; nothing changes."""
    DROP = "drop"
    """The event is not used. What it may have said opens the upper bound, or makes one of what is held."""
    UPPER = "upper bound"
    """What is held is an upper bound."""
    RESYNC = "resync"
    """The engine is asked for its history again; what is held is cleared and built anew."""
    QUARANTINE = "quarantine"
    """Nothing is indexed until the engine restarts; the replica is routed by load."""


@dataclass(frozen=True, slots=True)
class Invariant:
    """One thing that must hold."""

    id: str
    checks: str
    scope: Scope
    actions: tuple[Action, ...]
    """In the order in which they follow when it goes on failing."""
    act: str
    """What a person can do."""
    design: str
    reasons: tuple[str, ...] = ()
    limits: str = ""
    """Where it is not checked, and why. "": it is checked wherever it can hold."""


def _row(
    number: int,
    checks: str,
    actions: tuple[Action, ...],
    act: str,
    reasons: tuple[str, ...],
    *,
    scope: Scope = Scope.STREAM,
    design: str = "",
    limits: str = "",
) -> Invariant:
    place = f"7.2 C{number}" + (f", {design}" if design else "")
    return Invariant(f"C{number}", checks, scope, actions, act, place, reasons, limits)


_UPGRADE = "take a relay that knows this release, or the release before"
_PORTS = "correct the relay's --engine-events, --ranks and --first-rank"
_REPORT = "tell the engine's maintainers, with a recording"
_REPLAY = "give the engine a replay_endpoint and more buffer_steps"

_DROP, _UPPER, _WARN = Action.DROP, Action.UPPER, Action.WARN
_RESYNC, _QUARANTINE = Action.RESYNC, Action.QUARANTINE

TABLE: tuple[Invariant, ...] = (
    _row(
        1,
        "a live message has three frames, the second of eight bytes",
        (_DROP, _QUARANTINE),
        "see what else publishes on the engine's event port",
        ("frame_count", "frame_sequence", "unreadable"),
        design="1.1",
    ),
    _row(
        2,
        "a payload is an array of a time, events and, in most releases, a rank",
        (_QUARANTINE,),
        _UPGRADE,
        (
            *("batch_shape", "batch_length_changed", "malformed_json", "malformed_msgpack"),
            *("payload_size", "truncated"),
        ),
        design="2.1",
    ),
    _row(
        3,
        "an event's tag is known",
        (_DROP, _UPPER, _QUARANTINE),
        _UPGRADE,
        ("unknown_event",),
        design="2.1",
    ),
    _row(
        4,
        "an event has the length or the keys of its release",
        (_UPPER, _QUARANTINE),
        _UPGRADE,
        (
            *("event_length", "field_missing", "field_type", "form_changed", "form_of_release"),
            *("invalid_utf8", "lookahead", "fingerprint_changed", "unknown_field"),
        ),
        design="2.2 to 2.6",
    ),
    _row(
        5,
        "hashes are of one type, sign and width",
        (_QUARANTINE,),
        _UPGRADE,
        ("hash_kind_changed", "hash_range", "hash_type", "hash_width"),
        design="2.3",
    ),
    _row(
        6,
        "a batch's number follows the one before",
        (_RESYNC,),
        _REPLAY,
        ("gap",),
        design="7.4",
    ),
    _row(
        7,
        "the first number seen is 0, or a replay brings what came before",
        (_RESYNC, _UPPER),
        _REPLAY,
        ("late_join",),
        design="7.4",
    ),
    _row(
        8,
        "a replay has no hole, and ends with its marker in time",
        (_RESYNC, _UPPER),
        _REPLAY,
        ("history_lost", "replay_failed"),
        design="7.4",
    ),
    _row(
        9,
        "a batch's time is in seconds, near our clock, and goes on",
        (_WARN, _QUARANTINE),
        "set the clocks right; a time in milliseconds is another source: correct --engine",
        ("time_back", "time_far", "time_unit"),
        design="2.9",
    ),
    _row(
        10,
        "a batch names the rank whose port it came from",
        (_QUARANTINE,),
        _PORTS,
        ("rank_untold", "wrong_rank"),
        design="1.1, 1.2",
    ),
    _row(
        11,
        "there are as many tokens as the blocks hold",
        (_UPPER, _QUARANTINE),
        _UPGRADE,
        ("block_size_unscaled", "one_token_more", "token_count"),
        scope=Scope.TIER,
        design="7.3",
    ),
    _row(
        12,
        "block sizes are those of the lane, of the settings and of the fleet",
        (_DROP, _QUARANTINE),
        "correct --engine-block-tokens or --layer-group, or choose another --block-tokens for the fleet",
        ("block_size", "partial_block", "unit_size", "unit_unknown"),
        scope=Scope.TIER,
        design="3.9, 7.3",
        limits="an engine's own block size is not compared where it does not tell one over HTTP",
    ),
    _row(
        13,
        "a store or a removal names a block",
        (_DROP, _QUARANTINE),
        _REPORT,
        ("no_hashes",),
        scope=Scope.TIER,
        design="3.8",
    ),
    _row(
        14,
        "the block before the first is known",
        (_DROP, _RESYNC, _QUARANTINE),
        _REPLAY,
        ("orphan_expired", "orphans_many", "parent_zero"),
        design="3.2, 6.2",
    ),
    _row(
        15,
        "no block is its own ancestor",
        (_DROP, _QUARANTINE),
        _REPORT,
        ("cycles", "duplicate_in_event", "self_parent"),
        design="3.2",
    ),
    _row(
        16,
        "one hash stands for the same tokens after the same tokens",
        (_QUARANTINE,),
        _UPGRADE,
        ("content_hash", "hash_conflict"),
        design="2.5, 3.3",
    ),
    _row(
        17,
        "a block without one before it is a prompt's first",
        (_UPPER,),
        "declare how requests are kept apart (--extra-keys), or " + _UPGRADE,
        ("namespace_unknown",),
        design="2.5, 3.5",
        limits="proven where hashes can be computed again (SGLang). vLLM's are seeded: a parent that went missing shows "
        "only when C14, C16 or C31 fails",
    ),
    _row(
        18,
        "a removal names a block that is held there",
        (_DROP, _RESYNC, _UPPER),
        _REPORT,
        ("removals_unknown", "removed_unknown"),
        design="3.4",
    ),
    _row(
        19,
        "where one copy is kept of each block, none is stored twice",
        (_UPPER,),
        "declare --extra-keys; keep requests with keys of their own on replicas of their own",
        ("extra_keys", "shared_hash", "shared_hashes"),
        design="3.5",
        limits="where copies are counted (vLLM) a repeat is legal, and C20 bounds it",
    ),
    _row(
        20,
        "what is held fits the engine's cache",
        (_RESYNC, _UPPER),
        _REPORT,
        ("over_capacity",),
        design="3.5",
    ),
    _row(
        21,
        "while the cache turns over, blocks are removed",
        (_UPPER,),
        _REPORT,
        ("removals_missing",),
        design="3.4",
    ),
    _row(
        22,
        "a medium is known",
        (_QUARANTINE,),
        "take a relay that knows this medium; the tier is ignored until then",
        ("medium_missing", "remote_medium", "unknown_medium"),
        scope=Scope.TIER,
        design="0.3 R6, 2.9",
    ),
    _row(
        23,
        "a removal's medium is one where the block is held",
        (_DROP,),
        _REPORT,
        ("removed_elsewhere",),
        scope=Scope.TIER,
        design="3.7",
    ),
    _row(
        24,
        "layer groups are named as the release does, and their kinds are known",
        (_UPPER, _QUARANTINE),
        "declare the groups (--layer-group), or " + _UPGRADE,
        ("fields_changed", "group_unknown", "group_unsupported", "lane_limit"),
        design="3.8",
    ),
    _row(
        25,
        "a layer group keeps its kind and its window",
        (_QUARANTINE,),
        "correct --layer-group, or " + _UPGRADE,
        ("group_changed",),
        design="3.8",
    ),
    _row(
        26,
        "keys are pairs or tokens, never both, and pairs overlap",
        (_QUARANTINE,),
        _UPGRADE,
        ("key_form_changed", "key_form_mixed", "pairs_apart", "pairs_mixed"),
        design="3.9",
    ),
    _row(
        27,
        "tokens are integers from 0 to 2^31",
        (_DROP, _QUARANTINE),
        "update LMCache, which has sent hashes as tokens",
        ("token_range", "token_type"),
        scope=Scope.TIER,
        design="2.8",
        limits="the vocabulary's size is not known here: tokens beyond it match no prompt",
    ),
    _row(
        28,
        "there are extra keys for each block, the adapter's first",
        (_UPPER,),
        _UPGRADE,
        ("extra_keys_adapter", "extra_keys_count", "keys_untold"),
        design="3.3",
    ),
    _row(
        29,
        "after a clear the cache grows from its roots",
        (_UPPER,),
        _REPLAY,
        ("parent_gone",),
        design="3.6",
    ),
    _row(
        30,
        "the host's copy is announced before the GPU's goes",
        (_WARN,),
        "expect losses on the GPU that are none for a moment",
        ("copy_late",),
        design="3.7",
        limits="each event is applied by itself, so that no order gives wrong credit",
    ),
    _row(
        31,
        "what was predicted is what the engine reports",
        (_UPPER, _QUARANTINE),
        "compare tokenizer, adapters, salts and ranks of clients and engine",
        ("feedback_off", "feedback_wrong"),
        design="4",
        limits="of predictions that rested on all that the relay knew half a second before (others: `outcomes_lagging`), and "
        "not on credits; where history is lost, only of too much",
    ),
    _row(
        32,
        "pulled entries are numbered without a hole (TensorRT-LLM)",
        (_UPPER,),
        "raise event_buffer_max_size, and let nobody else pull",
        ("entries_lost", "entry"),
        design="1.3",
    ),
    _row(
        33,
        "the numbers of LMCache's controller follow on one another",
        (),
        "",
        (),
        design="2.8",
        limits="not checked: the controller's messages hold neither tokens nor a key that an engine's events name: the relay "
        "refuses them",
    ),
    _row(
        34,
        "an engine that computes prompts announces blocks",
        (_UPPER,),
        "see that events are on, that --engine-events is the engine's port, and that prompts are longer than a block",
        ("silent",),
        design="3.8",
    ),
    _row(
        35,
        "a prompt that nobody sent before is announced as its blocks, and is reused the second time",
        (_QUARANTINE,),
        _UPGRADE,
        ("canary",),
    ),
)

INVARIANTS: Mapping[str, Invariant] = {row.id: row for row in TABLE}
BY_REASON: Mapping[str, Invariant] = {reason: row for row in TABLE for reason in row.reasons}

OURS = frozenset({"engine_unknown", "mirror_full", "unknown_answer", "unplaced"})
"""Reasons that say nothing about the engine: bounds of our own, and what we were not told."""
