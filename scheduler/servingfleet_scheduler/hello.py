"""Is this hello, profile or delta what the protocol allows? Turns profiles into the core's.

Pure. A refusal ends the stream (SessionRefused); what only spoils one message is a word for the drop counter.
"""

from __future__ import annotations

from google.rpc import code_pb2

from servingfleet_core import HASH_VERSION
from servingfleet_core import Profile as CoreProfile
from servingfleet_protos.v1 import common_pb2, stream_pb2

from .errors import SessionRefused
from .policy.rules import LoadRule, Overlap, Rules

PROTOCOL_VERSION = 1
MAX_REPLICA_BYTES = 253
MAX_STREAM_ID_BYTES = 64
MAX_MODEL_BYTES = 512
MAX_TEXT_BYTES = 512
"""Engine, version, endpoint, reasons, label keys and values."""
MAX_LABELS = 64
MAX_RANK_FIELDS = 4
MAX_RANK_FIELD_BYTES = 64
MAX_LANES = 64
MAX_RANK = 65_535

_TIERS = frozenset(common_pb2.Tier.values()) - {common_pb2.TIER_UNSPECIFIED}
_CLASSES = frozenset(common_pb2.StateClass.values()) - {common_pb2.STATE_CLASS_UNSPECIFIED}
_STATES = frozenset(common_pb2.StreamState.values()) - {common_pb2.STREAM_STATE_UNSPECIFIED}
_FORMS = frozenset(common_pb2.KeyForm.values())
_CAPS = frozenset(stream_pb2.TierRule.Cap.values())
_OVERLAPS = {
    stream_pb2.TierRule.OVERLAP_UNSPECIFIED: Overlap.NONE,
    stream_pb2.TierRule.OVERLAP_QUEUE: Overlap.QUEUE,
    stream_pb2.TierRule.OVERLAP_COMPUTE: Overlap.COMPUTE,
}


def malformed(reason: str, message: str) -> SessionRefused:
    """The relay sent what no relay should: its author must act."""
    return SessionRefused(code_pb2.INVALID_ARGUMENT, reason, message)


def check_hello(hello: stream_pb2.Hello, *, block_tokens: int, max_ranks: int) -> None:
    """Raises SessionRefused: INVALID_ARGUMENT if malformed, FAILED_PRECONDITION if it is of another fleet."""
    if hello.protocol_version != PROTOCOL_VERSION:
        raise SessionRefused(
            code_pb2.FAILED_PRECONDITION,
            "PROTOCOL_VERSION",
            f"relay speaks protocol {hello.protocol_version}, this scheduler {PROTOCOL_VERSION}: "
            "install the same release",
        )
    _check_size("replica", hello.replica, 1, MAX_REPLICA_BYTES)
    _check_size("stream_id", hello.stream_id, 1, MAX_STREAM_ID_BYTES)
    _check_size("model", hello.model, 1, MAX_MODEL_BYTES)
    _check_size("endpoint", hello.endpoint, 0, MAX_TEXT_BYTES)
    _check_size("resume_instance", hello.resume_instance, 0, MAX_STREAM_ID_BYTES)
    if len(hello.labels) > MAX_LABELS:
        raise malformed("HELLO_LABELS", f"{len(hello.labels)} labels; at most {MAX_LABELS}")
    for key, value in hello.labels.items():
        _check_size("labels", key, 1, MAX_TEXT_BYTES)
        _check_size("labels", value, 0, MAX_TEXT_BYTES)
    if hello.block_tokens != block_tokens:
        raise SessionRefused(
            code_pb2.FAILED_PRECONDITION,
            "BLOCK_SIZE",
            f"relay hashes blocks of {hello.block_tokens} tokens, this scheduler {block_tokens}: "
            "set both to the same",
        )
    if hello.hash_version != HASH_VERSION:
        raise SessionRefused(
            code_pb2.FAILED_PRECONDITION,
            "HASH_VERSION",
            f"relay hashes by {hello.hash_version!r}, this scheduler by {HASH_VERSION!r}: "
            "install the same release",
        )
    if not 1 <= len(hello.ranks) <= max_ranks:
        raise malformed("HELLO_RANKS", f"{len(hello.ranks)} ranks; expected 1 to {max_ranks}")
    seen: set[int] = set()
    for rank in hello.ranks:
        if rank.rank in seen:
            raise malformed("HELLO_RANKS", f"rank {rank.rank} is declared twice")
        if rank.rank > MAX_RANK:
            raise malformed("HELLO_RANKS", f"rank {rank.rank}; at most {MAX_RANK}")
        if rank.state not in _STATES:
            raise malformed("HELLO_RANKS", f"rank {rank.rank} is in unknown state {rank.state}")
        seen.add(rank.rank)


def core_profile(profile: stream_pb2.Profile, *, block_tokens: int) -> CoreProfile:
    """Raises SessionRefused for lanes or tier rules that the core can't read."""
    if len(profile.lanes) > MAX_LANES:
        raise malformed("PROFILE_LANES", f"{len(profile.lanes)} lanes; at most {MAX_LANES}")
    for name in ("engine", "engine_version"):
        _check_size(name, getattr(profile, name), 0, MAX_TEXT_BYTES)
    if len(profile.rank_fields) > MAX_RANK_FIELDS:
        raise malformed(
            "PROFILE_RANK_FIELDS", f"{len(profile.rank_fields)} fields; at most {MAX_RANK_FIELDS}"
        )
    for name in profile.rank_fields:
        _check_size("rank_fields", name, 1, MAX_RANK_FIELD_BYTES)
    if profile.key_form not in _FORMS:
        raise malformed("PROFILE_KEY_FORM", f"unknown key form {profile.key_form}")
    numbers: set[int] = set()
    for lane in profile.lanes:
        _check_lane(lane, block_tokens)
        if lane.lane in numbers:
            raise malformed("PROFILE_LANES", f"lane {lane.lane} is declared twice")
        numbers.add(lane.lane)
    tiers: set[int] = set()
    for rule in profile.tiers:
        if rule.tier not in _TIERS or rule.tier in tiers or rule.cap not in _CAPS:
            raise malformed(
                "PROFILE_TIERS", f"rule for tier {rule.tier} with cap {rule.cap}: unknown or second"
            )
        if rule.overlap not in _OVERLAPS or not 0.0 <= rule.overlap_share <= 1.0:
            raise malformed(
                "PROFILE_TIERS",
                f"rule for tier {rule.tier} with overlap {rule.overlap} and a share of "
                f"{rule.overlap_share}: unknown, or not between 0 and 1",
            )
        tiers.add(rule.tier)
    try:
        return CoreProfile(
            [
                (
                    lane.lane,
                    lane.tier,
                    lane.state_class,
                    lane.group,
                    lane.window_tokens,
                    lane.unit_tokens,
                    lane.upper_in_predicted,
                )
                for lane in profile.lanes
            ],
            [
                (
                    rule.tier,
                    rule.cap == stream_pb2.TierRule.CAP_PROMPT,
                    rule.less_units,
                    rule.extends,
                )
                for rule in profile.tiers
            ],
            stores={lane.lane: lane.store_id for lane in profile.lanes if lane.store_id},
        )
    except (ValueError, OverflowError) as error:
        raise malformed("PROFILE", f"the core refuses the profile: {error}") from error


def rules_of(profile: stream_pb2.Profile) -> Rules:
    """What a profile that `core_profile` took says about time."""
    said = {
        rule.tier: LoadRule(_OVERLAPS[rule.overlap], rule.overlap_share, rule.always_loads)
        for rule in profile.tiers
    }
    host, disk, shared = (
        said.get(tier, LoadRule())
        for tier in (common_pb2.TIER_HOST, common_pb2.TIER_DISK, common_pb2.TIER_SHARED)
    )
    return Rules(profile.mixed_steps, (host, disk, shared))


def lanes_agree(before: stream_pb2.Profile, after: stream_pb2.Profile) -> bool:
    """A lane number keeps its meaning for the session: what it holds was read under it."""
    known = {lane.lane: _meaning(lane) for lane in before.lanes}
    return all(known.get(lane.lane, _meaning(lane)) == _meaning(lane) for lane in after.lanes)


def _meaning(lane: stream_pb2.Lane) -> tuple[int, int, int, str]:
    return lane.tier, lane.state_class, lane.group, lane.store_id


def known_state(state: int) -> bool:
    """A stream state that a relay may send."""
    return state in _STATES


def _check_lane(lane: stream_pb2.Lane, block_tokens: int) -> None:
    if lane.lane >= MAX_LANES:
        raise malformed("PROFILE_LANES", f"lane {lane.lane}; expected below {MAX_LANES}")
    if lane.tier not in _TIERS or lane.state_class not in _CLASSES:
        raise malformed(
            "PROFILE_LANES",
            f"lane {lane.lane} has tier {lane.tier} and state class {lane.state_class}: unknown",
        )
    if bool(lane.window_tokens) != (lane.state_class == common_pb2.STATE_CLASS_WINDOW):
        raise malformed(
            "PROFILE_LANES",
            f"lane {lane.lane} has a window of {lane.window_tokens} tokens "
            f"in state class {lane.state_class}",
        )
    _check_size("store_id", lane.store_id, 0, MAX_TEXT_BYTES)
    if lane.store_id and lane.tier != common_pb2.TIER_SHARED:
        raise malformed(
            "PROFILE_LANES", f"lane {lane.lane} shows a store and is of tier {lane.tier}"
        )
    unit = lane.unit_tokens
    if unit == 0 or (unit % block_tokens and block_tokens % unit):
        raise malformed(
            "PROFILE_UNIT",
            f"lane {lane.lane} has units of {unit} tokens, neither a multiple nor a divisor of "
            f"the block size {block_tokens}",
        )


def _check_size(name: str, value: str, least: int, most: int) -> None:
    size = len(value.encode())
    if not least <= size <= most:
        raise malformed(
            f"HELLO_{name.upper()}", f"{name} has {size} bytes; expected {least} to {most}"
        )
