"""Settings of a learner: frozen, checked, and an unknown key is an error that names the nearest known one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from morecl.catalogue import SHIPPED
from morecl.errors import InputError, unknown_name

LARGEST = 2**20  # of a whole number whose field names no bound of its own

# What a setting is to an experiment. Two runs whose settings differ only in fields with a role are the same experiment;
# every other setting makes it another one.
Role = Literal["repetition", "machine", "weights", "scoring"]
REPETITION: dict[str, Any] = {"role": "repetition"}  # tells repeated runs apart
MACHINE: dict[str, Any] = {"role": "machine"}  # where and how fast it runs, not what is computed
SCORING: dict[str, Any] = {"role": "scoring"}  # changes how answers are made, not what is trained
WEIGHTS: dict[str, Any] = {"role": "weights"}  # a path that depends on the machine; a record has the weights' hash


class LearnerConfig(BaseModel):
    """What every method understands. Defaults are the paper's for CIFAR10-5T; benchmark recipes override them."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    backbone: str = Field(
        SHIPPED, description="timm name, path of a checkpoint, or NAME@PATH", json_schema_extra=WEIGHTS
    )
    image_size: int | None = Field(
        None, ge=4, le=4096, description="input size in pixels; the backbone's own if not given"
    )
    pretrained: bool = Field(True, description="false: start from random weights")
    freeze_backbone: bool = Field(
        True,
        description="false: the backbone is trained too; by more, morerp, row, tpl, hat, owm, ncm, csc in task 1 only",
    )
    seed: int = Field(0, ge=0, lt=2**63, json_schema_extra=REPETITION)
    device: str = Field("auto", description="auto, cpu, cuda, cuda:1, mps, ...", json_schema_extra=MACHINE)
    precision: Literal["auto", "fp32", "bf16"] = Field("auto", description="auto: bf16 where a GPU has it, else fp32")
    compile: Literal["auto", "on", "off"] = Field("auto", description="auto: compiled, captured steps on a CUDA GPU")
    eval_batch_size: int | None = Field(
        None, ge=1, description="images per forward pass outside training", json_schema_extra=MACHINE
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        annotation = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and {int, float} & {annotation, *get_args(annotation)}:
            raise ValueError("Input should be a number, not true or false")
        return value

    @field_validator("*")
    @classmethod
    def _no_absurd_number(cls, value: Any, info: ValidationInfo) -> Any:
        rules = cls.model_fields[str(info.field_name)].metadata
        bounded = any(hasattr(rule, "le") or hasattr(rule, "lt") for rule in rules)
        if type(value) is int and value > LARGEST and not bounded:
            raise ValueError(f"Input should be less than or equal to {LARGEST}")
        return value

    @classmethod
    def parse(cls, settings: Mapping[str, Any]) -> Self:
        """Check ``settings`` and fill in the defaults."""
        for key in settings:
            if key not in cls.model_fields:
                raise unknown_name("setting", key, cls.model_fields)
        try:
            return cls(**settings)
        except ValidationError as error:
            problems = [f"{'.'.join(map(str, e['loc']))}={e['input']!r}: {e['msg']}" for e in error.errors()]
            raise InputError(f"bad setting: {'; '.join(problems).replace('Value error, ', '')}") from error

    @classmethod
    def with_role(cls, *roles: Role) -> frozenset[str]:
        """Names of the settings that have one of ``roles``."""
        extra = {name: field.json_schema_extra for name, field in cls.model_fields.items()}
        return frozenset(name for name, e in extra.items() if isinstance(e, dict) and e.get("role") in roles)

    @classmethod
    def choose(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Those of ``settings`` that are known here and have an effect: what trains nothing has no epochs."""
        known = {key: value for key, value in settings.items() if key in cls.model_fields}
        without = set() if cls.parse(known).trains else SgdConfig.training_settings()
        return {key: value for key, value in known.items() if key not in without}

    @classmethod
    def refuse_idle(cls, method: str, wanted: Mapping[str, Any], others: Mapping[str, Any] | None = None) -> None:
        """Raise :class:`InputError` if a user ``wanted`` a setting that would change nothing, given the ``others``."""
        effective = cls.choose({**(others or {}), **wanted})
        if idle := [key for key in wanted if key in cls.model_fields and key not in effective]:
            raise InputError(
                f"method {method!r} trains nothing on a frozen backbone: {', '.join(idle)} would change nothing. "
                "Leave it out, or train the backbone too with freeze_backbone=false"
            )

    @property
    def trains(self) -> bool:
        """Whether anything is trained by gradient descent."""
        return not self.freeze_backbone

    def record(self) -> dict[str, Any]:
        """What a record says of the settings: all, but not in which folder of this machine the backbone lay."""
        return self.model_dump(mode="json") | {"backbone": Path(self.backbone).name}


class SgdConfig(LearnerConfig):
    """How stochastic gradient descent goes. As it is: for methods that train the backbone or nothing."""

    epochs: int = Field(20, ge=1)
    lr: float = Field(0.005, gt=0, le=1e30)
    momentum: float = Field(0.9, ge=0, lt=1)
    batch_size: int = Field(64, ge=1)

    @staticmethod
    def training_settings() -> frozenset[str]:
        """Settings without effect where nothing is trained."""
        return frozenset(SgdConfig.model_fields.keys() - LearnerConfig.model_fields.keys())


class TrainingConfig(SgdConfig):
    """Methods that train adapters."""

    bottleneck: int = Field(64, ge=1, le=2**16, description="width of the adapters")

    @property
    def trains(self) -> bool:
        return True


def parse_assignments(assignments: Sequence[str]) -> dict[str, Any]:
    """``["epochs=5", "coefficient=false"]`` -> ``{"epochs": 5, "coefficient": False}`` (JSON values, else text)."""
    settings: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key:
            raise InputError(f"--set wants key=value, got {assignment!r}")
        try:
            settings[key.strip()] = json.loads(text.lower() if text.lower() in ("true", "false") else text)
        except ValueError:  # no JSON, or a number of thousands of digits
            settings[key.strip()] = text
    return settings
