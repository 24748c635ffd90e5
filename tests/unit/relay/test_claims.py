"""What is claimed of engines is proven by what the claims name, and written down as it is claimed."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from servingfleet_relay.adapters.claims import Claim, Grade
from servingfleet_relay.adapters.registry import ADAPTERS
from tests.contract.test_recordings import RECORDINGS
from tests.recordings import ROOT

CLAIMS = [(name, claim) for name, adapter in ADAPTERS.items() for claim in adapter.profile.claims]


def functions(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(
    ("engine", "claim"),
    CLAIMS,
    ids=[f"{name}-{claim.feature.name}-{claim.since}" for name, claim in CLAIMS],
)
def test_an_exact_claim_names_what_proves_it(engine: str, claim: Claim) -> None:
    assert bool(claim.proofs) == (claim.grade is Grade.EXACT)
    assert claim.note or claim.grade is Grade.EXACT
    for proof in claim.proofs:
        path, _, test = proof.partition("::")
        assert proof in RECORDINGS or (test in functions(path) if test else False), proof


def test_every_recording_proves_something() -> None:
    proofs = {proof for _, claim in CLAIMS for proof in claim.proofs}
    assert set(RECORDINGS) - proofs == {"x1-full-mode-evict"}, "that one shows a bound"


def test_an_engine_that_was_never_run_is_never_exact() -> None:
    for name, claim in CLAIMS:
        profile = ADAPTERS[name].profile
        assert not (profile.never_run and claim.grade is Grade.EXACT), claim
        assert bool(profile.never_run) != bool(profile.recorded)


def test_claims_of_one_feature_begin_one_after_the_other() -> None:
    for adapter in ADAPTERS.values():
        seen: dict[str, tuple[int, ...]] = {}
        for claim in adapter.profile.claims:
            assert claim.since > seen.get(claim.feature, (-1,)) or not claim.since, claim
            seen[claim.feature] = claim.since


def test_the_pages_are_what_the_code_says() -> None:
    check = [sys.executable, str(ROOT / "docs" / "generate.py"), "--check"]
    told = subprocess.run(check, capture_output=True, text=True, check=False)
    assert (told.returncode, told.stdout) == (0, "")
