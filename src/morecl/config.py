"""Settings of a learner: frozen and checked. An unknown key is an error that suggests the nearest known one."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from morecl.catalogue import SHIPPED
from morecl.errors import InputError, unknown_name
from morecl.presets import Preset

LARGEST = 2**20  # upper bound of whole numbers whose field has none

# A setting's role, kept in `json_schema_extra` of its field. Runs that differ only in settings with one of the first
# three roles are the same experiment. Any other setting makes a different one, including those that affect scoring.
Role = Literal["repetition", "machine", "weights", "scoring", "lasting"]
REPETITION: dict[str, Any] = {"role": "repetition"}  # distinguishes repeated runs
MACHINE: dict[str, Any] = {"role": "machine"}  # where and how fast it runs, not what is computed
WEIGHTS: dict[str, Any] = {"role": "weights"}  # a path, which depends on the machine; records have the weights' hash
SCORING: dict[str, Any] = {"role": "scoring"}  # how answers are computed from features, not what is trained
LASTING: dict[str, Any] = {"role": "lasting"}  # decides what is kept of every task, so it cannot change between tasks


class LearnerConfig(BaseModel):
    """Settings of every method. Defaults suit CIFAR10-5T; benchmark recipes override them.

    A method with ``presets`` has a setting ``preset``: the name of one, whose values take the place of the defaults.
    """

    presets: ClassVar[Mapping[str, Preset]] = {}
    older: ClassVar[Mapping[str, Any]] = {}  # what learners had that were saved without a setting, if not its default
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    backbone: str = Field(SHIPPED, description="timm name, checkpoint file, or NAME@FILE", json_schema_extra=WEIGHTS)
    image_size: int | None = Field(None, ge=4, le=4096, description="input size in pixels; default: the backbone's")
    pretrained: bool = Field(True, description="false: start from random weights")
    freeze_backbone: bool = Field(
        True,
        description="false: train the backbone too; methods that protect earlier tasks do so in the first task only",
    )
    seed: int = Field(0, ge=0, lt=2**63, json_schema_extra=REPETITION)
    device: str = Field("auto", description="auto, cpu, cuda, cuda:1, mps, ...", json_schema_extra=MACHINE)
    precision: Literal["auto", "fp32", "bf16"] = Field("auto", description="auto: bf16 on a GPU that has it, else fp32")
    compile: Literal["auto", "on", "off"] = Field("auto", description="auto: compile and capture steps on a CUDA GPU")
    eval_batch_size: int | None = Field(
        None, ge=1, description="images per forward pass outside training", json_schema_extra=MACHINE
    )

    @classmethod
    def preset_settings(cls, settings: Mapping[str, Any]) -> Preset:
        """The values of the preset that ``settings`` name, none if they name none.

        Raises:
            InputError: there is no such preset.
        """
        name = settings.get("preset")
        if name is None or not cls.presets:
            return {}
        if str(name) not in cls.presets:
            raise unknown_name("preset", str(name), cls.presets)
        return cls.presets[str(name)]

    @model_validator(mode="before")
    @classmethod
    def _expand_preset(cls, settings: Any) -> Any:
        return {**cls.preset_settings(settings), **settings} if isinstance(settings, Mapping) else settings

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_bool_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        annotation = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and {int, float} & {annotation, *get_args(annotation)}:
            raise ValueError("Input should be a number, not true or false")
        return value

    @field_validator("*")
    @classmethod
    def _refuse_huge_number(cls, value: Any, info: ValidationInfo) -> Any:
        rules = cls.model_fields[str(info.field_name)].metadata
        bounded = any(hasattr(rule, "le") or hasattr(rule, "lt") for rule in rules)
        if type(value) is int and value > LARGEST and not bounded:
            raise ValueError(f"Input should be less than or equal to {LARGEST}")
        return value

    @classmethod
    def parse(cls, settings: Mapping[str, Any]) -> Self:
        """A config with ``settings``, checked, and defaults for the rest."""
        for key in settings:
            if key not in cls.model_fields:
                raise unknown_name("setting", key, cls.model_fields)
        cls.preset_settings(settings)  # refuses an unknown one
        try:
            return cls(**settings)
        except ValidationError as error:
            problems = [f"{'.'.join(map(str, e['loc']))}={e['input']!r}: {e['msg']}" for e in error.errors()]
            raise InputError(f"bad setting: {'; '.join(problems).replace('Value error, ', '')}") from error

    @classmethod
    def with_role(cls, *roles: Role) -> frozenset[str]:
        """Names of the settings with one of ``roles``."""
        extra = {name: field.json_schema_extra for name, field in cls.model_fields.items()}
        return frozenset(name for name, e in extra.items() if isinstance(e, dict) and e.get("role") in roles)

    @classmethod
    def choose(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The ``settings`` that this method has and that take effect: a method that trains nothing has no epochs."""
        known = {key: value for key, value in settings.items() if key in cls.model_fields}
        idle = set() if cls.parse(known).trains else SgdConfig.training_settings()
        return {key: value for key, value in known.items() if key not in idle}

    @classmethod
    def refuse_idle(cls, method: str, wanted: Mapping[str, Any], others: Mapping[str, Any] | None = None) -> None:
        """Raise :class:`InputError` if a setting in ``wanted`` has no effect, given the ``others``."""
        effective = cls.choose({**(others or {}), **wanted})
        if idle := [key for key in wanted if key in cls.model_fields and key not in effective]:
            raise InputError(
                f"method {method!r} trains nothing on a frozen backbone: {', '.join(idle)} would change nothing. "
                "Leave it out, or train the backbone too with freeze_backbone=false"
            )

    def switched_off(self, *, further: bool = False) -> dict[str, str]:
        """Settings that change nothing in a run, and the other one that makes it so: ``{"c": "coefficient=false"}``.

        ``further``: nor where further images of known classes are learned.
        """
        return {}

    def refuse_switched_off(self, given: Collection[str], *, further: bool = False) -> None:
        """Raise :class:`InputError` if one of the settings that the user has ``given`` is :meth:`switched_off`."""
        off = self.switched_off(further=further)
        by_cause: dict[str, list[str]] = {}
        for key in (key for key in given if key in off):
            by_cause.setdefault(off[key], []).append(key)
        if by_cause:
            told = [f"{', '.join(keys)} would change nothing with {cause}" for cause, keys in by_cause.items()]
            causes = " or ".join(cause.partition("=")[0] for cause in by_cause)
            raise InputError(f"{', and '.join(told)}. Leave it out, or change {causes}")

    def refuse_classes(self, count: int) -> None:
        """Raise :class:`InputError` if the method cannot learn so many classes with these settings."""

    @property
    def trains(self) -> bool:
        """Whether the method trains anything by gradient descent."""
        return not self.freeze_backbone

    def record(self) -> dict[str, Any]:
        """All settings as JSON values, for a record; of the backbone's path only the file name."""
        return self.model_dump(mode="json") | {"backbone": Path(self.backbone).name}


class SgdConfig(LearnerConfig):
    """Settings of stochastic gradient descent, for methods that train the backbone or nothing."""

    epochs: int = Field(20, ge=1)
    lr: float = Field(0.005, gt=0, le=1e30)
    momentum: float = Field(0.9, ge=0, lt=1)
    batch_size: int = Field(64, ge=1)
    augment: bool = Field(False, description="train on random crops and mirror images, drawn anew in each epoch")

    @staticmethod
    def training_settings() -> frozenset[str]:
        """Settings that have no effect if nothing is trained."""
        return frozenset(SgdConfig.model_fields.keys() - LearnerConfig.model_fields.keys())


class TrainingConfig(SgdConfig):
    """Settings of methods that train adapters."""

    bottleneck: int = Field(64, ge=1, le=2**16, description="width of the adapters", json_schema_extra=LASTING)

    @property
    def trains(self) -> bool:
        return True


def parse_assignments(assignments: Sequence[str]) -> dict[str, Any]:
    """``["epochs=5", "coefficient=false"]`` -> ``{"epochs": 5, "coefficient": False}`` (JSON values; else text)."""
    settings: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key:
            raise InputError(f"--set wants key=value, got {assignment!r}")
        if key.strip() in settings:
            raise InputError(f"--set {key.strip()} is given twice; leave one out")
        try:
            settings[key.strip()] = json.loads(text.lower() if text.lower() in ("true", "false") else text)
        except ValueError:  # not JSON, or a number with thousands of digits
            settings[key.strip()] = text
    return settings
