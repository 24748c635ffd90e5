"""Which cluster is used, and why: no cluster needed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cluster.sources import NoCluster, Runs, choose


def docker(answers: dict[str, str]) -> Runs:
    """Runs nothing: a command that starts with a key fails for that reason."""

    def run(command: list[str], patience_s: float) -> str:
        line = " ".join(command)
        return next((why for start, why in answers.items() if line.startswith(start)), "")

    return run


@pytest.fixture
def kubeconfig(tmp_path: Path) -> Path:
    file = tmp_path / "config"
    file.touch()
    return file


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: f"/usr/bin/{tool}")


def test_a_cluster_that_the_user_points_at_is_used_before_any_other(kubeconfig: Path) -> None:
    for name in ("SERVINGFLEET_KUBECONFIG", "KUBECONFIG"):
        chosen = choose({name: str(kubeconfig)}, docker({}))
        assert (chosen.kind, chosen.kubeconfig) == ("given", kubeconfig)
        assert name in chosen.why


def test_our_own_variable_comes_before_kubectl_s(kubeconfig: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.touch()
    given = {"KUBECONFIG": str(other), "SERVINGFLEET_KUBECONFIG": str(kubeconfig)}
    assert choose(given, docker({})).kubeconfig == kubeconfig


def test_a_kubeconfig_that_is_not_there_is_an_error_and_not_a_reason_to_go_on(
    tmp_path: Path,
) -> None:
    with pytest.raises(NoCluster, match="does not exist"):
        choose({"KUBECONFIG": str(tmp_path / "missing")}, docker({}))


@pytest.mark.usefixtures("installed")
def test_kind_is_used_where_docker_can_pull_its_image() -> None:
    assert choose({}, docker({})).kind == "kind"
    assert choose({}, docker({"docker image inspect": "No such image"})).kind == "kind"


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    "answers",
    [
        {"docker info": "Cannot connect to the Docker daemon"},
        {"docker image inspect": "No such image", "docker pull": "denied"},
    ],
)
def test_without_a_docker_that_can_pull_the_cluster_is_our_own_and_says_why(
    answers: dict[str, str],
) -> None:
    chosen = choose({}, docker(answers))
    assert chosen.kind == "own"
    assert list(answers.values())[-1] in chosen.why


def test_a_wish_goes_before_the_order(kubeconfig: Path) -> None:
    given = {"KUBECONFIG": str(kubeconfig)}
    assert choose({**given, "SERVINGFLEET_CLUSTER": "own"}, docker({})).kind == "own"


def test_a_wish_that_cannot_be_met_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    with pytest.raises(NoCluster, match="'kind' is not on the PATH"):
        choose({"SERVINGFLEET_CLUSTER": "kind"}, docker({}))
    with pytest.raises(NoCluster, match="neither"):
        choose({"SERVINGFLEET_CLUSTER": "given"}, docker({}))
