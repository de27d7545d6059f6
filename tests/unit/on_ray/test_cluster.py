"""What tasks ask a cluster for, and which clusters there are not."""

from __future__ import annotations

import importlib.util
import socket
from pathlib import Path
from typing import Any

import pytest

from calling import exit_code
from morecl.cli.cluster import cluster_options
from morecl.errors import InputError
from morecl.on_ray import cluster
from morecl.on_ray.cluster import ClusterOptions, connected


def nodes(*resources: dict[str, float]) -> list[dict[str, Any]]:
    dead = {"Alive": False, "Resources": {"CPU": 100.0, "GPU": 100.0}}
    return [*({"Alive": True, "Resources": has} for has in resources), dead]


TWO = nodes({"CPU": 8.0, "GPU": 2.0}, {"CPU": 3.0})


@pytest.mark.parametrize(
    ("options", "gpus", "slots"),
    [
        (ClusterOptions(), 1.0, 2),
        (ClusterOptions(gpus=0.25), 0.25, 8),
        (ClusterOptions(gpus=0.1), 0.1, 8),
        (ClusterOptions(gpus=0), 0, 11),
        (ClusterOptions(gpus=2), 2, 1),
        (ClusterOptions(gpus=0, cpus=3), 0, 3),
        (ClusterOptions(gpus=0.5, cpus=4), 0.5, 2),
    ],
)
def test_as_many_tasks_at_once_as_the_nodes_have_room_for(options: ClusterOptions, gpus: float, slots: int) -> None:
    found = cluster._checked(options, TWO)
    assert (found.gpus, found.slots, found.nodes) == (gpus, slots, 2)


def test_a_run_asks_for_a_card_only_if_it_may_use_one() -> None:
    found = cluster._checked(ClusterOptions(gpus=0.25, cpus=2), TWO)
    assert found.resources("auto") == {"num_cpus": 2, "num_gpus": 0.25}
    assert found.resources("cpu") == {"num_cpus": 2, "num_gpus": 0}
    assert found.title == "on 2 nodes of a Ray cluster, 2 CPUs, 0.25 cards each"
    assert cluster._checked(ClusterOptions(), nodes({"CPU": 1.0})).gpus == 0


@pytest.mark.parametrize("options", [ClusterOptions(gpus=3), ClusterOptions(cpus=9), ClusterOptions(gpus=1, cpus=9)])
def test_what_no_node_has_is_refused_instead_of_waited_for(options: ClusterOptions) -> None:
    with pytest.raises(InputError, match=r"no node has .*; the nodes have: 8 CPUs, 2 cards; 3 CPUs, 0 cards"):
        cluster._checked(options, TWO)


@pytest.mark.parametrize(
    ("device", "given", "gpus"), [("cpu", None, 0), (None, None, None), ("auto", None, None), ("cpu", 0.5, 0.5)]
)
def test_on_a_cpu_no_cards_are_asked_for(device: str | None, given: float | None, gpus: float | None) -> None:
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    assert cluster_options("ray", "a:1", given, 3, device) == ClusterOptions("a:1", gpus, 3)
    assert cluster_options(None, None, None, None, device) is None


SUITE = ["suite", "smoke", "--out", "out"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*SUITE, "--on", "rya"], "unknown place after --on 'rya'; did you mean 'ray'?"),
        ([*SUITE, "--address", "a:1", "--cpus-per-run", "2"], "--address, --cpus-per-run is for a Ray cluster"),
        ([*SUITE, "--on", "ray", "--jobs", "2"], "--jobs is for this machine"),
        ([*SUITE, "--on", "ray", "--gpus-per-run", "1.5"], "a share of one card, such as 0.25, or whole cards"),
        ([*SUITE, "--on", "ray", "--address", "ray://a:1"], "Ray's client is not supported"),
        (["tune", "digits-5t", "--lr", "1", "--epochs", "1", "--out", "out", "--gpus-per-run", "1"], "add --on ray"),
        (["predict", "model", "x.png", "--address", "a:1"], "add --on ray"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert exit_code(monkeypatch, *arguments) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [SUITE, ["tune", "digits-5t", "--lr", "1", "--epochs", "1", "--out", "out"], ["predict", "model", "x.png"]],
)
def test_without_ray_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "ray" else find(name, *rest))
    monkeypatch.chdir(tmp_path)
    assert exit_code(monkeypatch, *arguments, "--on", "ray") == 2
    assert "pip install 'morecl[ray]'" in " ".join(capsys.readouterr().err.split())


def test_the_environment_names_a_cluster_too(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    for address, message in (("ray://a:1", "client is not supported"), ("nowhere", "no Ray cluster at nowhere")):
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(InputError, match=message), connected(ClusterOptions()):
            raise AssertionError("connected")


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1:nonsense", "127.0.0.1:{closed}", "no.such.host.invalid:1"])
def test_an_address_where_nobody_listens_is_named_at_once(address: str) -> None:
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        given = address.format(closed=unused.getsockname()[1])
    with (
        pytest.raises(InputError, match=f"there is no Ray cluster at {given} .*`ray start --head` starts one"),
        connected(ClusterOptions(given)),
    ):
        raise AssertionError("connected")
