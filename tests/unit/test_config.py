"""Settings: defaults, checks, messages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from pydantic import Field, ValidationError

from morecl import presets
from morecl.config import SCORING, LearnerConfig, parse_assignments
from morecl.errors import InputError, unknown_name
from morecl.methods import METHODS, create
from morecl.methods.more import MoreConfig
from morecl.nn.device import resolve_compile, resolve_device, resolve_precision


def test_defaults() -> None:
    """The paper's for CIFAR10-5T or, where it names none, the authors' code's, but for the back-update."""
    expected = {
        "epochs": 20,
        "lr": 0.005,
        "momentum": 0.9,
        "batch_size": 64,
        "memory_batch_size": 64,
        "bottleneck": 64,
        "memory_size": 200,
        "temperature": 2,
        "c": 20,
        "s_max": 500,
        "lamb": 0.75,
        "coefficient": True,
        "back_update": True,
        "back_update_epochs": 10,
        "back_update_batch_size": 16,
        "seed": 0,
        "device": "auto",
        "backbone": "vit_mini_patch4_32",
    }
    config = MoreConfig.parse({}).model_dump()
    assert {key: config[key] for key in expected} == expected


def test_a_preset_takes_the_place_of_the_defaults_and_settings_given_win() -> None:
    assert {key: MoreConfig.parse({}).model_dump()[key] for key in presets.MORE_DEFAULT} == presets.MORE_DEFAULT
    for name, values in presets.MORE.items():
        assert values.keys() == presets.MORE_DEFAULT.keys()
        config = MoreConfig.parse({"preset": name})
        assert config.model_dump() == MoreConfig.parse({}).model_dump() | {"preset": name} | dict(values)
        assert MoreConfig(preset=name) == MoreConfig.parse(config.record()) == config
    config = MoreConfig.parse({"back_update_lr": 0.02, "preset": "paper"})
    assert (config.back_update_lr, config.back_update_momentum) == (0.02, 0.9)


@pytest.mark.parametrize("value", ["papr", "ours", 3, True, ["paper"]])
def test_an_unknown_preset_is_refused(value: Any) -> None:
    with pytest.raises(InputError, match=r"unknown preset .*Known: authors, paper"):
        MoreConfig.parse({"preset": value})


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_default_is_valid_and_survives_json(method: str) -> None:
    cls = METHODS[method].Config
    config = cls.parse({})
    assert cls.parse(config.model_dump(mode="json")) == config
    with pytest.raises(ValidationError):
        config.seed = 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epoch": 3}, "unknown setting 'epoch'; did you mean 'epochs'"),
        ({"memorysize": 3}, "did you mean 'memory_size'"),
        ({"xyz": 3}, "unknown setting 'xyz'.*Known: .*epochs"),
        ({"epochs": 0}, "epochs=0"),
        ({"epochs": 1.5}, "epochs=1.5"),
        ({"epochs": "many"}, "epochs='many'"),
        ({"lr": -1}, "lr=-1"),
        ({"lr": float("nan")}, "lr=nan"),
        ({"momentum": 1.0}, "momentum=1.0"),
        ({"memory_size": -1}, "memory_size=-1"),
        ({"coefficient": "perhaps"}, "coefficient='perhaps'"),
        ({"precision": "fp8"}, "precision='fp8'"),
        ({"seed": -1}, "seed=-1"),
        ({"epochs": True}, "epochs=True: Input should be a number, not true or false"),
        ({"lr": False}, "lr=False: Input should be a number"),
        ({"image_size": True}, "image_size=True: Input should be a number"),
        ({"image_size": 4097}, "image_size=4097: Input should be less than or equal to 4096"),
        *(
            ({key: 2**20 + 1}, f"^bad setting: {key}=1048577: Input should be less than or equal to 1048576$")
            for key in ("epochs", "batch_size", "eval_batch_size", "memory_size", "memory_batch_size")
        ),
        ({"back_update_epochs": 10**30}, "back_update_epochs=10{30}: .*less than or equal to 1048576"),
        ({"lr": 0, "epochs": 0}, "lr=0.*epochs=0|epochs=0.*lr=0"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        create("more", **settings)


def test_large_numbers_that_are_not_absurd() -> None:
    config = MoreConfig.parse({"seed": 2**63 - 1, "image_size": 4096, "memory_size": 2**20, "c": 2**21, "epochs": 1e3})
    assert (config.seed, config.image_size, config.memory_size) == (2**63 - 1, 4096, 2**20)
    assert (config.c, config.epochs) == (2.0**21, 1000)


def test_unknown_method() -> None:
    with pytest.raises(InputError, match=r"unknown method 'mroe'; did you mean 'more'\?"):
        create("mroe")


def test_unknown_name_without_a_near_one() -> None:
    assert str(unknown_name("colour", "qqq", ["red", "blue"])) == "unknown colour 'qqq'. Known: blue, red."


@pytest.mark.parametrize(
    ("name", "known", "near"),
    [
        ("learning_rate", MoreConfig.model_fields, "lr"),
        ("learning_rate", ["eval_batch_size"], None),
        ("buffer_size", MoreConfig.model_fields, "memory_size"),
        ("nope", ["smoke", "svhn", "table-main"], None),
        ("kd_wait", ["batch_size", "kd_weight"], "kd_weight"),
        ("MORE", METHODS, "more"),
        ("cifar10", ["cifar10-5t", "cifar100-10t", "cifar10-5t-1k"], "cifar10-5t"),
    ],
)
def test_only_names_that_are_near_are_suggested(name: str, known: Iterable[str], near: str | None) -> None:
    message = str(unknown_name("thing", name, known))
    assert f"did you mean {near!r}?" in message if near else "did you mean" not in message


def test_assignments() -> None:
    given = [
        "epochs=5",
        "lr=1e-3",
        "coefficient=False",
        "back_update=true",
        "backbone=a=b",
        "image_size=null",
        "c = 3",
    ]
    assert parse_assignments(given) == {
        "epochs": 5,
        "lr": 1e-3,
        "coefficient": False,
        "back_update": True,
        "backbone": "a=b",
        "image_size": None,
        "c": 3,
    }
    digits = "9" * 5000  # more than Python turns into a number
    assert parse_assignments([f"epochs={digits}"]) == {"epochs": digits}


@pytest.mark.parametrize("text", ["epochs", "=5", ""])
def test_bad_assignments(text: str) -> None:
    with pytest.raises(InputError, match="key=value"):
        parse_assignments([text])


def test_devices() -> None:
    assert resolve_device("cpu") == torch.device("cpu")
    assert resolve_device("auto").type in ("cpu", "cuda")
    for name in ("gpu", "cuda:99", "tpu:0", "meta", "xla", "mps:7", "cpu:1", ""):
        with pytest.raises(InputError, match=f"^device '{name}' cannot be used here: there is only cpu.{{,200}}$"):
            resolve_device(name)
    assert resolve_precision("auto", torch.device("cpu")) == torch.float32
    assert resolve_precision("bf16", torch.device("cpu")) == torch.bfloat16


def test_devices_that_other_machines_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: None)
    assert resolve_device("cuda:1") == torch.device("cuda:1")
    for name in ("mps", "cuda:2"):
        with pytest.raises(InputError, match=f"^device '{name}' cannot be used here: there is only cpu, cuda, cuda:1$"):
            resolve_device(name)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert resolve_device("mps") == torch.device("mps")

    def busy(*_: Any, **__: Any) -> None:
        raise RuntimeError("all CUDA-capable devices are busy\nCompile with ...")

    monkeypatch.setattr(torch, "empty", busy)
    with pytest.raises(InputError, match=r"^device 'cuda' cannot be used here: all CUDA-capable devices are busy$"):
        resolve_device("cuda")


def test_a_record_does_not_contain_the_backbones_folder() -> None:
    assert MoreConfig.parse({"backbone": "some/folder/vit.safetensors"}).record()["backbone"] == "vit.safetensors"
    config = MoreConfig.parse({"lr": 0.25})
    assert config.record() == config.model_dump(mode="json")


class ScoredConfig(LearnerConfig):
    coefficient: bool = Field(True, json_schema_extra=SCORING)


def test_roles_name_their_settings() -> None:
    assert ScoredConfig.with_role("scoring") == {"coefficient"}
    assert LearnerConfig.with_role("scoring") == frozenset()
    assert ScoredConfig.with_role("repetition", "weights") == {"seed", "backbone"}
    assert ScoredConfig.with_role("machine") == {"device", "eval_batch_size"}


def test_a_setting_that_would_change_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="'ncm' trains nothing on a frozen backbone: epochs, lr would change nothing"):
        create("ncm", epochs=3, lr=0.1, seed=1)
    assert create("ncm", epochs=3, freeze_backbone=False, device="cpu").config.trains


def test_code_is_compiled_where_asked_or_on_a_gpu_and_only_with_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda:0")
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}" if name == "clang" else None)
    monkeypatch.delenv("CC", raising=False)
    assert resolve_compile("auto", gpu) and resolve_compile("on", cpu)
    assert not resolve_compile("auto", cpu) and not resolve_compile("off", gpu)
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert not resolve_compile("auto", gpu) and not resolve_compile("off", gpu)
    with pytest.raises(InputError, match="compile=on needs a C compiler"):
        resolve_compile("on", gpu)
    monkeypatch.setenv("CC", "/opt/cc")
    assert resolve_compile("auto", gpu)
