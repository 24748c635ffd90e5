"""What is claimed of each engine and release, feature by feature, and what proves it: `docs/engines.md` is written from it.

Pure data. A claim of EXACT names what holds it to an engine's own reports: a recording of one that ran, or a test on
constructed bytes where only the bytes differ from a recorded release's.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Grade(StrEnum):
    """How much of what an engine reports is known before."""

    EXACT = "exact"
    """Predicted, lower and upper bound are what it reports, but for the exceptions that the engine's page names."""
    BOUNDED = "bounded"
    """What it reports lies between the bounds; what is predicted may be less, or is no promise."""
    REFUSED = "refused"
    """Not indexed, and told: routed by load."""


class Feature(StrEnum):
    """What an engine may have or do."""

    PROMPTS = "prompts, shared prefixes, conversations"
    COPIES = "several copies of a block, eviction"
    SALTS = "cache salts"
    ADAPTERS = "adapters (LoRA) by name"
    KEYS = "other keys of a request (extra_key)"
    MEDIA = "images and embeddings"
    WINDOWS = "sliding-window layers"
    CHUNKED = "chunked local attention"
    RECURRENT = "recurrent layers"
    OFFLOAD = "host tier of the engine's own"
    CONNECTORS = "host tier of LMCache or Mooncake"
    SHARED = "stores that replicas share"
    STORAGE = "disk and storage tiers"
    DRAFTS = "speculative decoding, EAGLE-like"
    NGRAM = "speculative decoding, n-gram"
    LOOKAHEAD = "hashes that cover later tokens"
    RANKS = "data-parallel ranks"
    RESETS = "resets and restarts"
    LOGPROBS = "prompt_logprobs"
    FULL_REPORTS = 'kv_cache_report_mode "full"'


@dataclass(frozen=True, slots=True)
class Claim:
    """A grade of one feature, from one release on until a later claim of the same feature."""

    feature: Feature
    grade: Grade
    since: tuple[int, ...] = ()
    """(): from the oldest that is read."""
    note: str = ""
    proofs: tuple[str, ...] = ()
    """Recordings by their folder, tests as "file::name"."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """Requests of an engine's recordings: how many were predicted to the token, and why the others were not."""

    requests: int
    exact: int
    others: tuple[tuple[str, int], ...]
    """Cause, as `servingfleet verify` names it, and how many."""


VLLM_REPLAYED = Replayed(385, 375, (("a cache reset that the idle engine had not announced", 10),))
SGLANG_REPLAYED = Replayed(
    39, 36, (("a part of a canonical block, of which only whole ones are known", 3),)
)

EXACT, BOUNDED, REFUSED = Grade.EXACT, Grade.BOUNDED, Grade.REFUSED

_WIRE = "tests/unit/relay/test_vllm_wire.py"
_PAGES = "tests/contract/test_sglang_streams.py"

VLLM: tuple[Claim, ...] = (
    Claim(
        *(Feature.PROMPTS, EXACT),
        proofs=(
            *("a-shared-prefix", "a2-text-chat", "d2-replay-rollover", "z-inproc-base"),
            *("m-bytes-hash-sha256cbor",),
            f"{_WIRE}::test_a_store_reads_the_same_from_arrays_of_every_length",
        ),
    ),
    Claim(*(Feature.COPIES, EXACT), proofs=("b-eviction",)),
    Claim(
        *(Feature.SALTS, REFUSED),
        note="not on the wire: salted prompts look plain. Don't use them with these releases",
    ),
    Claim(*(Feature.SALTS, EXACT, (0, 17)), proofs=("a-shared-prefix", "g-lora-salt")),
    Claim(
        *(Feature.ADAPTERS, BOUNDED), note="told by a number that no client sends: held as opaque"
    ),
    Claim(*(Feature.ADAPTERS, EXACT, (0, 14)), proofs=("g-lora-salt",)),
    Claim(
        *(Feature.MEDIA, REFUSED),
        note="not on the wire: prompts with equal placeholders look alike",
    ),
    Claim(*(Feature.MEDIA, BOUNDED, (0, 17)), note="counted, and never matched"),
    Claim(
        *(Feature.WINDOWS, BOUNDED),
        note="events switch the hybrid manager off: the model keeps everything, as one group",
    ),
    Claim(*(Feature.WINDOWS, REFUSED, (0, 20)), note="groups are numbered and not named"),
    Claim(
        *(Feature.WINDOWS, EXACT, (0, 22)),
        note="with window layers only: where the prompts were sent by this fleet",
        proofs=(
            *("f1-gemma3-swa-hybrid", "f2-gemma3-hybrid-manager-off", "f3-mistral-all-swa"),
            *("x3-offload-gemma3-placeholder", "x6-conc-gemma3"),
        ),
    ),
    Claim(*(Feature.CHUNKED, REFUSED), note="groups are not named"),
    Claim(
        *(Feature.CHUNKED, BOUNDED, (0, 22)),
        note="where --layer-group tells the size of a chunk, which events don't; else refused",
    ),
    Claim(*(Feature.RECURRENT, REFUSED), note="groups are not named"),
    Claim(
        *(Feature.RECURRENT, EXACT, (0, 22)),
        proofs=(
            *("f5-qwen3next-gdn", "f5b-qwen3next-gdn-align", "f5c-qwen3next-gdn-block32"),
            *("x7-conc-qwen3next",),
        ),
    ),
    Claim(*(Feature.OFFLOAD, BOUNDED), note="expected; events name chunks only"),
    Claim(
        *(Feature.OFFLOAD, EXACT, (0, 24)),
        note="with --host-unit-tokens where the chunk is no block; after a reset of the GPU expected, not promised",
        proofs=(
            *("i-cpu-offload-default-events", "i2-cpu-offload-self-describing"),
            *("x2-offload-placeholder-chunk64", "x2e-chunk64-cpu-evict-selfdesc"),
        ),
    ),
    Claim(
        *(Feature.CONNECTORS, BOUNDED),
        note="expected, never promised: stores are announced early, some removals never, adapters and salts not at all",
    ),
    Claim(
        *(Feature.SHARED, BOUNDED),
        note="with --shared-store: what one replica told is expected of all that name the store, and promised by none; known "
        "for as long as a relay that told it is connected",
    ),
    Claim(*(Feature.STORAGE, BOUNDED), note="removals are never announced: possible, not expected"),
    Claim(
        *(Feature.DRAFTS, BOUNDED),
        note="one block less is reused than is held: --less-units 1 makes it exact, --canary finds it out",
    ),
    Claim(*(Feature.NGRAM, EXACT), proofs=("h-ngram-spec",)),
    Claim(
        *(Feature.LOOKAHEAD, BOUNDED, (0, 33)),
        note="one block less is expected, and nothing promised: the last block's hash covers tokens after it, which the "
        "next prompt need not have",
    ),
    Claim(*(Feature.RANKS, EXACT), proofs=("e-data-parallel",)),
    Claim(*(Feature.RESETS, EXACT), proofs=("c-reset", "j-restart")),
    Claim(*(Feature.LOGPROBS, EXACT), proofs=("x4-prompt-logprobs",)),
    Claim(
        *(Feature.FULL_REPORTS, BOUNDED, (0, 26)),
        note="repeats that may be mere reports are possible, not expected",
    ),
)

SGLANG: tuple[Claim, ...] = (
    Claim(
        *(Feature.PROMPTS, REFUSED),
        note="pages are hashed without what is before them: quarantined",
    ),
    Claim(
        *(Feature.PROMPTS, EXACT, (0, 5, 6)),
        note="of pages smaller than a canonical block, to the block",
        proofs=(
            *("s1-sglang-page16", "s2-sglang-page1"),
            f"{_PAGES}::test_of_tokens_the_last_is_computed_anew",
        ),
    ),
    Claim(*(Feature.COPIES, EXACT, (0, 5, 6)), proofs=("s1-sglang-page16",)),
    Claim(
        *(Feature.SALTS, BOUNDED, (0, 5, 6)),
        note="neither in the hash nor on the wire: all is an upper bound once a first page comes twice",
    ),
    Claim(*(Feature.SALTS, EXACT, (0, 5, 20)), proofs=("s1-sglang-page16",)),
    Claim(
        *(Feature.ADAPTERS, REFUSED, (0, 5, 6)),
        note="pages share hashes with the base model's: what is held is an upper bound from then on",
    ),
    Claim(*(Feature.ADAPTERS, BOUNDED, (0, 5, 23)), note="expected, never promised"),
    Claim(
        *(Feature.KEYS, BOUNDED, (0, 5, 6)),
        note="not on the wire: declare --extra-keys; in the dynamo format held as opaque",
    ),
    Claim(*(Feature.MEDIA, BOUNDED, (0, 5, 6)), note="tokens of the engine's own: never matched"),
    Claim(
        *(Feature.WINDOWS, BOUNDED, (0, 5, 6)),
        note="state is evicted in silence: possible, not expected",
    ),
    Claim(
        *(Feature.CHUNKED, BOUNDED, (0, 5, 6)),
        note="state is evicted in silence: possible, not expected",
    ),
    Claim(
        *(Feature.RECURRENT, BOUNDED, (0, 5, 6)),
        note="state is evicted in silence: possible, not expected",
    ),
    Claim(
        *(Feature.OFFLOAD, BOUNDED, (0, 5, 10)),
        note="HiCache: read from the engine's code and run on its tree; no model was",
    ),
    Claim(*(Feature.STORAGE, BOUNDED, (0, 5, 10)), note="not announced: more may be reused"),
    Claim(
        *(Feature.DRAFTS, EXACT, (0, 5, 11)),
        proofs=(
            *("s3-sglang-eagle-bigram-page16", "sx-eagle"),
            f"{_PAGES}::test_of_pairs_the_last_but_one_token_is_the_last_that_counts",
        ),
    ),
    Claim(*(Feature.RANKS, BOUNDED, (0, 5, 6)), note="never run"),
    Claim(*(Feature.RESETS, EXACT, (0, 5, 6)), proofs=("s1-sglang-page16",)),
)

TRTLLM: tuple[Claim, ...] = (
    Claim(*(Feature.PROMPTS, BOUNDED), note="expected, never promised: it was never run"),
    Claim(
        *(Feature.COPIES, BOUNDED),
        note="blocks that leave the reuse tree unannounced stay expected",
    ),
    Claim(
        *(Feature.SALTS, BOUNDED),
        note="published: not on the wire, don't use them; pulled: told by newer releases",
    ),
    Claim(
        *(Feature.ADAPTERS, REFUSED),
        note="published: held as opaque; pulled: not on the wire, base model only",
    ),
    Claim(*(Feature.MEDIA, BOUNDED), note="counted, and never matched"),
    Claim(*(Feature.WINDOWS, BOUNDED), note="only the largest window is read"),
    Claim(*(Feature.OFFLOAD, BOUNDED), note="pulled events only"),
    Claim(*(Feature.RANKS, BOUNDED), note="each with numbers of its own"),
    Claim(*(Feature.RESETS, BOUNDED), note="a cache that is created again is a new one"),
)
