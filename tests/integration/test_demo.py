"""`servingfleet demo` and `top`: a whole fleet, its report, and nothing left behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from servingfleet_sim import bound
from servingfleet_sim.local_fleet import local_fleet, mixed_engines
from servingfleet_sim.processes import Process, ProcessFailed
from servingfleet_sim.wire import free_ports
from tests.integration.fleet import Fleet
from tests.recordings import recordings_dir

PATIENCE_S = 60.0


async def started(*arguments: str) -> asyncio.subprocess.Process:
    """The command in a process group of its own, which its children share."""
    return await asyncio.create_subprocess_exec(
        *(*bound.command("servingfleet_cli"), *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )


async def run(*arguments: str) -> tuple[int, str, str]:
    """Exit status, standard output, standard error; nothing that it started is left."""
    child = await started(*arguments)
    out, err = await child.communicate()
    assert not group_lives(child.pid)
    assert child.returncode is not None
    return child.returncode, out.decode(), err.decode()


def group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def recount(logs: Path) -> dict[str, int]:
    """What the engines of one policy wrote of the requests that they answered."""
    rows: list[dict[str, Any]] = []
    for truth in logs.glob("*.truth.jsonl"):
        rows += [json.loads(line) for line in truth.read_text().splitlines()]
    finished = [r for r in rows if r["what"] == "finished" and r["outcome"] == "finished"]
    return {
        "requests": len(finished),
        "prompt": sum(row["prompt_tokens"] for row in finished),
        "cached": sum(row["cached_tokens"] for row in finished),
    }


async def test_the_demos_report_adds_up_with_the_engines_own_accounts(tmp_path: Path) -> None:
    arguments = ["demo", "--minutes", "0.7", "--seed", "7", "--logs", str(tmp_path), "-o", "json"]
    status, out, err = await run(*arguments)
    assert status == 0, err
    report = json.loads(out)
    assert report["agrees"] is True
    assert report["policy"]["policy"] == "cost"
    assert report["control"]["policy"] == "round-robin"
    replicas = report["replicas"]
    assert [replica["ranks"] for replica in replicas] == [1, 1, 1, 2, 1, 1]
    assert {replica["pool"]: replica["block_tokens"] for replica in replicas} == {
        "vllm": 16,
        "sglang": 32,
        "trtllm": 32,
        "vllm-window": 16,
        "vllm-state": 528,
    }
    for name in ("policy", "control"):
        arm = report[name]
        counted = recount(tmp_path / name)
        figures = arm["figures"]
        assert counted["requests"] > 5
        assert arm["ledger"] == arm["engines"] == counted
        assert arm["requests"]["finished"] == arm["requests"]["asked"] == counted["requests"]
        assert figures["reused_fraction"]["numerator"] == counted["cached"]
        assert figures["reused_fraction"]["denominator"] == counted["prompt"]
        assert figures["index_coverage"]["denominator"] == counted["cached"]
        assert figures["join_rate"]["numerator"] == figures["join_rate"]["denominator"]
        assert arm["unexplained"] == []
        assert set(arm["models"]) == {"emulated", "emulated-window", "emulated-state"}
        parts = [model["figures"]["reused_fraction"] for model in arm["models"].values()]
        assert sum(part["numerator"] for part in parts) == counted["cached"]
        pools = [pool[arm["policy"]] for pool in report["pools"].values()]
        if arm["policy"] == "round-robin":  # the other may do without a pool for so short a time
            assert all(pool["pairs"] for pool in pools)
        assert sum(pool["pairs"] for pool in pools) == counted["requests"]
        assert sum(pool["actual"] for pool in pools) == counted["cached"]


@pytest.mark.parametrize("numbers", [(signal.SIGINT,), (signal.SIGTERM, signal.SIGINT)])
async def test_an_interrupted_demo_leaves_no_process(
    tmp_path: Path, numbers: tuple[signal.Signals, ...]
) -> None:
    child = await started("demo", "--logs", str(tmp_path))
    async with asyncio.timeout(PATIENCE_S):
        # Under load: an engine has scheduled a request.
        while not any('"scheduled"' in p.read_text() for p in tmp_path.glob("*/*.truth.jsonl")):  # noqa: ASYNC110, ASYNC240 - another process
            await asyncio.sleep(0.05)
        assert group_lives(child.pid)
        for number in numbers:
            child.send_signal(number)
        _, err = await child.communicate()
    assert child.returncode == 128 + numbers[0]
    assert not group_lives(child.pid)
    assert b"Traceback" not in err


@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux tells a process of its parent's end"
)
async def test_a_demo_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    child = await started("demo", "--logs", str(tmp_path))
    async with asyncio.timeout(PATIENCE_S):
        while not any('"scheduled"' in p.read_text() for p in tmp_path.glob("*/*.truth.jsonl")):  # noqa: ASYNC110, ASYNC240 - another process
            await asyncio.sleep(0.05)
        child.kill()
        await child.wait()
        while group_lives(child.pid):  # noqa: ASYNC110 - its children, whom another process reaps
            await asyncio.sleep(0.01)


async def test_an_engine_that_dies_ends_the_fleet_and_its_log_is_shown(tmp_path: Path) -> None:
    processes: list[Process] = []

    async def lose_an_engine() -> None:
        async with local_fleet(mixed_engines(4), "cost", tmp_path) as fleet:
            processes.extend(fleet.processes)
            next(p for p in processes if "emulator" in p.name).child.kill()
            await fleet.watch()

    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(ProcessFailed, match=r"emulator .* ended with status -9"):
            await lose_an_engine()
    assert len(processes) == 9
    assert all(process.child.returncode is not None for process in processes)


async def test_a_fleet_that_can_not_start_leaves_no_process(tmp_path: Path) -> None:
    with pytest.raises(ProcessFailed, match="no-such-policy"):
        async with local_fleet(mixed_engines(4), "no-such-policy", tmp_path):
            pass


async def test_logs_of_an_earlier_run_are_not_mixed_with_new_ones(tmp_path: Path) -> None:
    (tmp_path / "control").mkdir()
    status, _, err = await run("demo", "--logs", str(tmp_path))
    assert status == 2
    assert "--logs" in err


async def test_folders_are_played_as_recorded_engines() -> None:
    source = str(recordings_dir() / "a-shared-prefix")
    status, out, _ = await run("demo", source, "-o", "json")
    assert status == 0
    (replica,) = json.loads(out)["replicas"]
    assert replica["wrong"] == 0
    assert replica["requests"] > 10
    status, _, err = await run("demo", source, "--seed", "3")
    assert status == 2
    assert "--seed" in err


async def test_top_prints_one_frame_of_any_fleet(fleet: Fleet) -> None:
    replica = "model=m,replica=gpu-0,endpoint=10.0.0.1:8000,ranks=2"
    scheduler = await fleet.scheduler("--static-replica", replica)
    status, out, _ = await run("top", "--scheduler", scheduler.target, "--once")
    assert status == 0
    assert "m: 0.0 requests/s" in out
    assert "gpu-0" in out
    assert "no relay" in out


async def test_top_says_that_no_scheduler_answers() -> None:
    nobody = f"127.0.0.1:{free_ports(1)}"
    status, _, err = await run("top", "--scheduler", nobody, "--once")
    assert status == 3
    assert nobody in err
