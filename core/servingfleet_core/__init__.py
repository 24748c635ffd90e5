"""Canonical hashing, the mirror of one engine's cache and the prefix index: no I/O, no clock."""

from servingfleet_core._native import (
    HASH_VERSION,
    Delta,
    Index,
    Match,
    Mirror,
    Profile,
    Rejected,
    block_hashes,
    namespace_root,
)

__all__ = [
    "HASH_VERSION",
    "Delta",
    "Index",
    "Match",
    "Mirror",
    "Profile",
    "Rejected",
    "block_hashes",
    "namespace_root",
]
