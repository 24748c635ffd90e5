"""`servingfleet replay` from end to end, on small made-up load: what it prints, writes, refuses, and how it exits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from servingfleet_cli.__main__ import main
from servingfleet_sim.replay import cases
from servingfleet_sim.replay.definitions import DEFINITIONS

ROOT = Path(__file__).parents[3]
LOAD = "generated:conversations=8,starts_per_s=4,turns=3,answer_tokens=20"
FLEET = """
pools:
  - {name: fast, gpu: h100, ranks: 2, gpu_tokens: 100000}
  - {name: slow, gpu: l40s, gpu_tokens: 100000}
"""


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    path = tmp_path / "fleet.yaml"
    path.write_text(FLEET)
    return path


def _replay(fleet: Path, *arguments: str) -> Result:
    command = ["replay", LOAD, "--fleet", str(fleet), "--jobs", "1", "--repeats", "2", *arguments]
    return CliRunner().invoke(main, command, catch_exceptions=False)


def _document(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_every_policy_and_variant_is_a_case_compared_with_the_first(fleet: Path) -> None:
    found = _document(
        _replay(
            fleet,
            *("--policy", "cost", "--policy", "oracle"),
            *("--variant", "credits-off:credit=false", "--variant", "late:lag=2,learn=0"),
            *("-o", "json"),
        )
    )
    assert [case["name"] for case in found["cases"]] == ["cost", "oracle", "credits-off", "late"]
    options = {case["name"]: case["options"] for case in found["cases"]}
    assert options["credits-off"] == {**options["cost"], "credit": False}
    assert options["late"] == {**options["cost"], "lag": 2.0, "learn": False}
    assert {each["case"] for each in found["comparisons"]} == {"oracle", "credits-off", "late"}


def test_the_document_has_what_its_schema_promises(fleet: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    found = _document(_replay(fleet, "-o", "json", "--json", str(file), "--seed", "7"))
    assert json.loads(file.read_text()) == found
    assert found["schema"] == "servingfleet.replay/1"
    assert found["seeds"] == [7, 8]
    assert found["definitions"].keys() == DEFINITIONS.keys()
    (case,) = found["cases"]
    assert case["figures"].keys() == DEFINITIONS.keys()
    assert case["figures"]["ttft_mean_s"]["value"] > 0
    assert case["figures"]["goodput"]["value"] is None
    assert all(run["agrees"] for run in case["runs"])
    assert sum(each["value"] for each in case["losses"].values()) == pytest.approx(1)
    assert found["trace"]["requests"] == case["runs"][0]["requests"] > 8


def test_the_same_command_finds_the_same_in_one_process_and_in_two(fleet: Path) -> None:
    alone = _document(_replay(fleet, "-o", "json"))
    both = _document(_replay(fleet, "-o", "json", "--jobs", "2"))
    for found in (alone, both):
        for case in found["cases"]:
            del case["figures"]["requests_per_wall_s"]
            for run in case["runs"]:
                del run["wall_s"]
    assert alone["cases"] == both["cases"]


def test_progress_reaches_the_end_in_one_process_and_in_two(
    fleet: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[int] = []
    run_cases: Any = cases.run_cases

    def listening(*arguments: Any) -> Any:
        return run_cases(*arguments[:-1], heard.append)

    monkeypatch.setattr(cases, "run_cases", listening)
    for jobs in ("1", "2"):
        heard.clear()
        requests = _document(_replay(fleet, "-o", "json", "--jobs", jobs))["trace"]["requests"]
        assert heard[-1] == 2 * requests
        assert heard == sorted(heard)


def test_a_page_is_written(fleet: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    result = _replay(fleet, "--html", str(file))
    assert result.exit_code == 0, result.output
    text = file.read_text()
    assert text.startswith("<!doctype html>")
    assert "conversations=8" in text


def test_people_get_tables(fleet: Path) -> None:
    result = _replay(fleet, "--policy", "cost", "--policy", "round-robin")
    assert result.exit_code == 0, result.output
    for text in ("seconds to first token", "less cost, same seeds", "U2 all memory", "slow"):
        assert text in result.stdout
    assert "2 repeats say little" in result.stdout


def test_requests_beyond_their_target_are_turned_away_or_late(fleet: Path) -> None:
    crowd = ("--target", "0.1", "--rate", "40", "--jitter", "0.1", "-o", "json")
    found = _document(_replay(fleet, *crowd, "--variant", "all-in:admission=false"))
    strict, open_door = (case["figures"] for case in found["cases"])
    assert strict["rejected_share"]["value"] > 0
    assert open_door["rejected_share"]["value"] == 0
    assert open_door["late_share"]["value"] > strict["late_share"]["value"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--policy", "best"), "known: approximate, cost"),
        (("--policy", "cost", "--policy", "cost"), "there twice"),
        (("--variant", "credit=false"), "expected NAME:KEY=VALUE"),
        (("--variant", "a:credit"), "expected NAME:KEY=VALUE"),
        (("--variant", "a:colour=red"), "colour"),
        (("--variant", "a:credit=perhaps"), "credit"),
        (("--variant", "a:rate=0"), "rate"),
        (("--variant", "a:policy=best"), "known: approximate, cost"),
        (("--json", "/nonexistent/report.json"), "/nonexistent"),
    ],
)
def test_a_wrong_line_is_named_and_exits_with_two(
    fleet: Path, arguments: tuple[str, ...], said: str
) -> None:
    result = _replay(fleet, *arguments)
    assert result.exit_code == 2
    assert said in result.stderr


@pytest.mark.parametrize(
    ("trace", "said"),
    [
        ("generated:colour=3", "keys: answer_s"),
        ("generated:turns=many", "turns"),
        ("generated:turns=0", "turns is 0.0; expected at least 1"),
        ("/nonexistent/trace.jsonl", "/nonexistent"),
    ],
)
def test_a_wrong_trace_is_named_and_exits_with_two(fleet: Path, trace: str, said: str) -> None:
    result = CliRunner().invoke(main, ["replay", trace, "--fleet", str(fleet)])
    assert result.exit_code == 2
    assert said in result.stderr


def test_a_wrong_fleet_is_named_and_exits_with_two(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    for text, said in (("pools: []", "pools"), ("pools: [{name: a, gpu: z80}]", "z80")):
        file.write_text(text)
        result = CliRunner().invoke(main, ["replay", LOAD, "--fleet", str(file)])
        assert result.exit_code == 2
        assert said in result.stderr


def test_the_example_fleets_are_fleets() -> None:
    for file in (ROOT / "examples" / "replay").glob("*.yaml"):
        result = _replay(file, "--repeats", "1")
        assert result.exit_code == 0, result.output
