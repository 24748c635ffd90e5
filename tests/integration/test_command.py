"""The `servingfleet` command, as a person or a script meets it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from servingfleet_protos.v1 import routing_pb2
from servingfleet_sim import bound
from servingfleet_sim.recordings import read
from servingfleet_sim.wire import free_ports
from tests.integration.fleet import Fleet
from tests.recordings import recordings_dir

TOKENS = ",".join(str(token) for token in range(100))


async def run(*arguments: str) -> tuple[int, str, str]:
    """Exit status, standard output, standard error."""
    child = await asyncio.create_subprocess_exec(
        *(*bound.command("servingfleet_cli"), *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await child.communicate()
    return child.returncode or 0, out.decode(), err.decode()


@pytest.fixture
async def target(fleet: Fleet) -> str:
    """A scheduler that knows one replica of two ranks, and no relay."""
    replica = "model=m,replica=gpu-0,endpoint=10.0.0.1:8000,ranks=2"
    return (await fleet.scheduler("--static-replica", replica)).target


async def test_route_answers_without_any_relay_and_says_so(target: str) -> None:
    status, out, _ = await run("route", "--scheduler", target, "--model", "m", "--tokens", TOKENS)
    assert status == 0
    assert "no relay is connected" in out
    assert "gpu-0" in out
    assert "10.0.0.1:8000" in out


async def test_json_is_the_protocols_own_field_names(target: str) -> None:
    asked = ["--scheduler", target, "--model", "m", "--tokens", TOKENS, "-o", "json"]
    status, out, _ = await run("route", *asked)
    answer = json.loads(out)
    assert status == 0
    assert answer["target"]["replica"] == "gpu-0"
    assert answer["prediction"]["prompt_tokens"] == 100
    assert answer["basis"] == "BASIS_NO_STREAMS"


async def test_explain_shows_every_rank_and_the_terms_of_its_cost(target: str) -> None:
    asked = ["--scheduler", target, "--model", "m", "--tokens", TOKENS]
    status, out, _ = await run("explain", *asked)
    assert status == 0
    assert out.count("gpu-0") == 2
    assert "prefill s" in out


async def test_a_deadline_that_nobody_meets_is_a_no_with_the_time_to_wait(target: str) -> None:
    asked = ["--scheduler", target, "--model", "m", "--tokens", TOKENS, "--deadline", "0.000001"]
    status, _, err = await run("route", *asked)
    assert status == 1
    assert "DEADLINE_UNREACHABLE" in err
    assert "try again in" in err


async def test_an_unknown_model_is_a_refusal_that_names_the_reason(target: str) -> None:
    asked = ["--scheduler", target, "--model", "none", "--tokens", TOKENS]
    status, _, err = await run("route", *asked)
    assert status == 4
    assert "MODEL_UNKNOWN" in err


async def test_an_empty_prompt_is_refused_by_its_field(target: str) -> None:
    asked = ["--scheduler", target, "--model", "m", "--tokens", ""]
    status, _, err = await run("route", *asked)
    assert status == 4
    assert "prompt.tokens_le32" in err


async def test_a_missing_scheduler_has_its_own_exit_code() -> None:
    nobody = f"127.0.0.1:{free_ports(1)}"
    status, _, err = await run("replicas", "--scheduler", nobody)
    assert status == 3
    assert f"no scheduler answers at {nobody}" in err


async def test_a_replica_is_drained_and_taken_back(target: str) -> None:
    status, out, _ = await run("drain", "gpu-0", "--scheduler", target)
    assert status == 0
    assert "gpu-0 is drained by cli; 0 requests" in out
    for command in (["replicas"], ["top", "--once"]):
        _, out, _ = await run(*command, "--scheduler", target)
        assert "draining" in out
    asked = ["--scheduler", target, "--model", "m", "--tokens", TOKENS]
    status, _, err = await run("route", *asked)
    assert status == 4
    assert "2 draining: cli" in err
    status, out, _ = await run("drain", "gpu-0", "--undo", "--scheduler", target)
    assert "gpu-0 is in use" in out
    assert (await run("route", *asked))[0] == 0
    status, _, err = await run("drain", "gpu-9", "--scheduler", target)
    assert (status, "REPLICA_UNKNOWN" in err) == (4, True)


async def test_a_scheduler_that_is_away_does_not_keep_a_drain_from_the_others(target: str) -> None:
    nobody = f"127.0.0.1:{free_ports(1)}"
    schedulers = ("--scheduler", nobody, "--scheduler", target)
    status, out, err = await run("drain", "gpu-0", *schedulers, "-o", "json")
    assert json.loads(out) == {target: {"draining_by": ["cli"]}}
    assert (status, f"no scheduler answers at {nobody}" in err) == (3, True)
    status, out, _ = await run("drain", "gpu-0", "--undo", *schedulers)
    assert (status, f"{target}: gpu-0 is in use" in out) == (3, True)


async def test_reuse_and_replicas_show_what_was_played(fleet: Fleet) -> None:
    scheduler = await fleet.scheduler()
    player = await fleet.player(read(recordings_dir() / "a-shared-prefix"), scheduler)
    assert [verdict async for verdict in player.play()]
    _, reuse, _ = await run("reuse", "--scheduler", scheduler.target)
    assert "768 / 1604" in reuse
    assert "set aside: shared_usage 3" in reuse
    _, replicas, _ = await run("replicas", "--scheduler", scheduler.target)
    assert "a-shared-prefix" in replicas
    assert "live" in replicas


async def test_reuse_adds_up_what_several_schedulers_counted(fleet: Fleet) -> None:
    targets = []
    for pairs in (12, 9):
        scheduler = await fleet.scheduler("--static-replica", "model=m,replica=r")
        targets += ["--scheduler", scheduler.target]
        prompt = routing_pb2.Prompt(tokens_le32=bytes(4 * 100))
        for _ in range(pairs):
            asked = routing_pb2.RouteRequest(model="m", prompt=prompt)
            decision = await scheduler.router.Route(asked, timeout=10)
            outcome = routing_pb2.ReportRequest(
                decision_id=decision.decision_id, prompt_tokens=100, cached_tokens=50
            )
            await scheduler.router.Report(outcome, timeout=10)
    status, out, _ = await run("reuse", *targets)
    assert status == 0
    assert "2 schedulers, added up" in out
    assert "21 outcomes of 21 decisions" in out
    assert "50.0%" in out, "12 and 9 pairs are too few apart, and enough together"
    status, out, _ = await run("reuse", *targets, *targets[:2], "-o", "json")
    (report,) = json.loads(out)["reports"]
    assert report["sums"]["pairs"] == "21", "one that is asked twice counts once"
    status, _, err = await run("reuse", *targets, "--scheduler", f"127.0.0.1:{free_ports(1)}")
    assert status == 3
    assert "no scheduler answers" in err


async def test_verify_passes_a_recording_and_fails_a_falsified_one(tmp_path: Path) -> None:
    source = recordings_dir() / "z-inproc-base"
    status, out, _ = await run("verify", str(source))
    assert status == 0
    assert "WRONG" not in out
    for name in ("events.jsonl", "requests.jsonl"):
        rows = [json.loads(line) for line in (source / name).read_text().splitlines()]
        if name == "requests.jsonl":
            rows[2]["cached_tokens"] -= 32
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    status, out, _ = await run("verify", str(tmp_path), "-o", "json")
    assert status == 1
    (result,) = json.loads(out)
    assert [row["n"] for row in result["verdicts"] if row["wrong"]] == [2]
