"""What a run is asked to do: as the user said it, and with everything resolved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from morecl.catalogue import SHIPPED
from morecl.config import LearnerConfig
from morecl.data import Division, Recipe, check_stream, load_recipe
from morecl.data.datasets import FOLDER
from morecl.data.folder import is_hidden
from morecl.errors import InputError, first_problem
from morecl.methods import method_class
from morecl.run.folder import RUN
from morecl.run.settings import effective_settings, recipe_settings, unsearched_rate


class RunRequest(BaseModel):
    """A run as the user asked for it; saved as ``run.json``, and all that ``resume`` needs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: str
    benchmark: str
    settings: dict[str, Any] = {}  # the user's; the rest comes from the recipe and the method's defaults
    class_order: str = "0"
    seed: int = 0
    data_root: str | None = None
    tasks: Division | None = None
    train_per_class: int | None = None
    test_per_class: int | None = None
    validation: float | None = None
    directory: str = ""  # base of the relative paths above; the current directory if empty
    plan: dict[str, Any] = {}  # data, tasks and the recipe's settings when the run began, see `ResolvedRun.plan`
    keep_checkpoints: bool = False  # keep the checkpoint of every task, also after the last

    @property
    def benchmark_name(self) -> str:
        """In records and tables: of a recipe file or a folder the name alone, wherever it was called from."""
        prefix, path = self._place
        return self.benchmark if path is None else f"{prefix}{path.resolve().name}"

    @property
    def _place(self) -> tuple[str, Path | None]:
        """``folder:`` or nothing, and the path of the benchmark, if it is a folder or a recipe file."""
        prefix = FOLDER if self.benchmark.startswith(FOLDER) and self.benchmark != FOLDER else ""
        if not prefix and not self.benchmark.endswith(".toml"):
            return "", None
        return prefix, Path.cwd() / self.directory / Path(self.benchmark.removeprefix(prefix)).expanduser()

    def resolve(self) -> ResolvedRun:
        """Resolve paths and load the recipe.

        Raises:
            InputError: the benchmark does not exist or is not valid.
        """
        base = Path.cwd() / self.directory
        prefix, path = self._place
        benchmark = self.benchmark if path is None else f"{prefix}{path}"
        return ResolvedRun(
            request=self,
            benchmark=benchmark,
            recipe=load_recipe(benchmark),
            given=resolve_backbone(self.settings, base),
            data_root=None if self.data_root is None else base / Path(self.data_root).expanduser(),
        )


@dataclass(frozen=True)
class ResolvedRun:
    """A request with absolute paths and its recipe: what the program works with."""

    request: RunRequest
    benchmark: str  # a name, or an absolute path
    recipe: Recipe
    given: dict[str, Any]  # the user's settings; a backbone's file as an absolute path
    data_root: Path | None

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The recipe's settings, as of the run's beginning, overridden by the user's. Raises as :meth:`check` does.

        The file of a backbone that a recipe names is relative to the recipe's.
        """
        of_recipe = self.request.plan.get("settings")
        if of_recipe is None:
            of_recipe = self._recipe_settings
        if self.recipe.source:
            of_recipe = resolve_backbone(of_recipe, Path(self.recipe.source).parent)
        return effective_settings(self.request.method, self.given, of_recipe, self.request.seed)

    @cached_property
    def _recipe_settings(self) -> dict[str, Any]:
        """As the recipe is now."""
        return recipe_settings(self.request.method, self.recipe, self.given)

    def stream_options(self, side: int) -> dict[str, Any]:
        """What :func:`morecl.data.build_stream` gets beside the recipe; a folder's images are stored at ``side``."""
        request = self.request
        return {
            "data_root": self.data_root,
            "class_order": request.class_order,
            "seed": request.seed,
            "tasks": request.tasks,
            "train_per_class": request.train_per_class,
            "test_per_class": request.test_per_class,
            "folder_size": side,
            "validation": request.validation,
        }

    @property
    def unsearched_rate(self) -> float | None:
        """The learning rate, if nobody chose it for this method and backbone. Raises as :meth:`check` does."""
        return unsearched_rate(self.request.method, self.recipe, self.given)

    @cached_property
    def config(self) -> LearnerConfig:
        """All settings of the method, checked, with defaults. Raises as :meth:`check` does."""
        return method_class(self.request.method).Config.parse(self.settings)

    def check_folder(self, out: Path) -> None:
        """Raise :class:`InputError` if a run in ``out`` would lie among its images, where it would become a class."""
        if not self.recipe.dataset.startswith(FOLDER):
            return
        images = Path(self.recipe.dataset.removeprefix(FOLDER)).expanduser().resolve()
        if not out.resolve().is_relative_to(images):
            return
        inside = out.resolve().relative_to(images).parts
        if not inside or not is_hidden(inside[0]):
            raise InputError(
                f"the run in {out} would lie in {images}, whose folders are the classes of the data set; choose a "
                "folder elsewhere with --out"
            )

    def check(self) -> None:
        """Raise :class:`InputError` if a setting is unknown, has no effect, or has a bad value, or if the classes
        cannot be divided as asked. No image is read.
        """
        self.config.refuse_switched_off(self.given)
        if self.config.backbone != SHIPPED:
            from morecl.nn.backbone import check_spec  # imports timm, which takes seconds

            check_spec(self.config.backbone)
        asked = self.request
        if asked.validation is not None and asked.test_per_class is not None:
            raise InputError(
                "test_per_class would change nothing with validation: training images that are held out are scored "
                "instead of the test images. Leave one of them out"
            )
        check_stream(
            self.recipe,
            class_order=asked.class_order,
            seed=asked.seed,
            tasks=asked.tasks,
            validation=asked.validation,
        )

    @property
    def plan(self) -> dict[str, Any]:
        """Data, tasks and the recipe's settings as of the run's beginning; of now if it has not begun."""
        return self.request.plan or self.current_plan

    @property
    def current_plan(self) -> dict[str, Any]:
        """The same by the recipe as it is now, and the request."""
        recipe = self.recipe
        keys = ("tasks", "train_per_class", "test_per_class")
        asked = {key: getattr(self.request, key) for key in keys}
        numbers = {key: getattr(recipe, key) if value is None else value for key, value in asked.items()}
        data = {key: getattr(recipe, key) for key in ("dataset", "classes", "folder_size")}
        return data | numbers | {"settings": self._recipe_settings}

    def recipe_changed(self) -> bool:
        """Since the run began. What the plan of an older run does not have is not compared."""
        now = self.current_plan
        return any(now[key] != value for key, value in self.plan.items() if key in now)


def preset_notes(run: ResolvedRun) -> list[str]:
    """What is left of a preset whose settings are all switched off; raises as :meth:`ResolvedRun.check` does."""
    off = run.config.switched_off()
    preset = run.config.preset_settings(run.given)
    if not preset or not preset.keys() <= off.keys():
        return []
    cause, name = off[next(iter(preset))], run.given["preset"]
    return [f"no back-update ({cause}): preset={name} only takes epochs and rate of the recipe's [settings]"]


def rate_notes(runs: Iterable[ResolvedRun]) -> list[str]:
    """For methods whose learning rate nobody has chosen: a line for each benchmark and rate."""
    found: dict[tuple[str, float], dict[str, None]] = {}  # methods in the order of their runs
    for run in runs:
        rate = run.unsearched_rate
        if rate is not None:
            found.setdefault((run.recipe.name, rate), {})[run.request.method] = None
    return [
        f"no rate was searched for {', '.join(methods)} on {benchmark} with this backbone: "
        f"{'it trains' if len(methods) == 1 else 'they train'} at {rate:g}"
        for (benchmark, rate), methods in found.items()
    ]


def read_request(out: Path) -> RunRequest:
    """The request in ``out/run.json``."""
    try:
        return RunRequest.model_validate_json((out / RUN).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"{out} holds no run (no {RUN})") from error
    except ValidationError as error:
        raise InputError(f"{out / RUN} cannot be read: {first_problem(error)}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{out / RUN} cannot be read: {error}") from error


def resolve_backbone(settings: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """``settings`` with the file of a backbone, if it is one, as found from ``base``."""
    if not isinstance(settings.get("backbone"), str):
        return dict(settings)
    from morecl.nn.backbone import located  # imports timm, which takes seconds

    return {**settings, "backbone": located(settings["backbone"], base)}
