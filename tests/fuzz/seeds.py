"""First inputs, made by the constructors that the unit tests use, so that no run begins at nothing."""

from __future__ import annotations

from collections.abc import Mapping

from servingfleet_protos.v1 import common_pb2, routing_pb2, stream_pb2
from servingfleet_scheduler.tokens import Decision, Tokens
from tests.unit.relay import batches
from tests.unit.scheduler.helpers import MODEL, hashes, hello, route_request

RAW, BUILT = b"\x00", b"\x01"
"""The first byte of a decoder's input: the bytes as they are, or values to be packed."""


def seeds(target: str) -> list[bytes]:
    """The first inputs of a target; none for targets that a few zeros serve as well."""
    return [bytes(8), *_SEEDS.get(target, [])]


def _blob(data: bytes) -> bytes:
    return len(data).to_bytes(2, "little") + data


def _vllm() -> list[bytes]:
    tokens = batches.tokens(2)
    stored = batches.stored([1, 2], tokens)
    arrays = [batches.stored_array(length, [1, 2], tokens) for length in batches.ARRAY_LENGTHS]
    payloads = [
        batches.payload(stored, batches.removed([1]), batches.CLEARED),
        batches.payload(batches.stored([2], batches.tokens(1), parent=1, lora_name="a")),
        batches.payload(batches.stored([b"\x01" * 32], batches.tokens(1), kv_cache_spec_kind="x")),
        batches.payload(batches.stored([1], [], block=0), length=2),
        *[batches.payload(array) for array in arrays],
        *[batches.payload(batches.removed_array(length, [1])) for length in (2, 3, 4)],
    ]
    return [RAW + payload for payload in payloads] + [BUILT + bytes(range(32))]


def _sglang() -> list[bytes]:
    stored = batches.stored([1, 2], batches.tokens(2), block=16)
    array = [*("BlockStored", [1], None, batches.tokens(1), 16, None, "GPU")]
    payloads = [
        batches.payload(stored, batches.removed([1]), batches.CLEARED),
        batches.payload(array, ["BlockRemoved", [1], "CPU_PINNED"], ["AllBlocksCleared"]),
    ]
    return [RAW + payload for payload in payloads] + [BUILT + bytes(range(32))]


def _frames() -> list[bytes]:
    parts = [*batches.live(3), *batches.reply(4), *batches.END]
    return [
        bytes([count]) + b"".join(_blob(part) for part in parts[start : start + count])
        for start, count in ((0, 3), (3, 4), (7, 4))
    ]


def _session() -> list[bytes]:
    said = hello("calm", stream_id="another").SerializeToString()
    bodies = [
        stream_pb2.RelayMessage(seq=2, counters=stream_pb2.RelayCounters(totals={"replays": 1})),
        stream_pb2.RelayMessage(
            seq=1, delta=stream_pb2.Delta(op=stream_pb2.Delta.OP_HOLD, hashes=hashes(2))
        ),
    ]
    opened = bytes([0, 1, 0, 1]) + _blob(b"")
    return [
        bytes([0, 1, 0, 1]) + _blob(said),
        *[opened + b"\x07" + _blob(body.SerializeToString()) for body in bodies],
        opened + bytes([2, 0, 0, 4, 0, 4, 0, 0, 0]) * 3,
    ]


def _route() -> list[bytes]:
    target = common_pb2.Target(replica="warm", rank=1)
    requests = [
        route_request(40, request_id="x", only=[target], max_fallbacks=2, deadline_s=1.0),
        routing_pb2.RouteRequest(
            model=MODEL, prompt=routing_pb2.Prompt(block_hashes=hashes(2), prompt_tokens=40)
        ),
        routing_pb2.RouteRequest(
            prompt=routing_pb2.Prompt(
                tokens=routing_pb2.TokenList(ids=[1, 2, 3]),
                media=[routing_pb2.MediaKey(key=b"k", token_offset=1)],
                adapter="a",
                cache_salt="s",
                prompt_logprobs=True,
            )
        ),
    ]
    return [bytes([at % 2]) + each.SerializeToString() for at, each in enumerate(requests)]


def _report() -> list[bytes]:
    request = routing_pb2.ReportRequest(
        ran_on=common_pb2.Target(replica="s1"),
        cached_by_tier=[routing_pb2.TierTokens(tier=common_pb2.TIER_GPU, tokens=8)],
        output_tokens=9,
        ttft_s=0.5,
        prompts_in_usage=2,
    )
    return [bytes([1, 0, 1, 3]) + _blob(request.SerializeToString()), bytes([1, 1, 1, 3, 0, 0]) * 2]


def _decision_ids() -> list[bytes]:
    decision = Decision("o", MODEL, "r", 1, 5.0, 7, 64, 48, 48, 64, 48, 48)
    foreign = Tokens(b"the key of another fleet").write(decision)
    return [RAW + foreign.encode(), BUILT + b"\x02ab\x01c\x03def" + bytes(20)]


_SEEDS: Mapping[str, list[bytes]] = {
    "vllm_payload": _vllm(),
    "sglang_payload": _sglang(),
    "trtllm_payload": _sglang(),
    "frames": _frames(),
    "sequence": [bytes([1, 5, 0, 0, 7, 0, 8, 8, 1, 3, 9, 0, 4, 9, 1, 0, 7, 0, 8])],
    "pipeline": [bytes([0, 0, 0]) + bytes(range(120))],
    "session": _session(),
    "route": _route(),
    "report": _report(),
    "reuse": [b"\x0a\x07model-a", b"\x11" + bytes(6) + b"\xf0\x3f"],
    "decision_ids": _decision_ids(),
    "recording": [bytes([0, 1, 1, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 7])],
}
