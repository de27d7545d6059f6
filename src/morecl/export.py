"""A learner as one ONNX file, which answers without morecl and PyTorch.

The file holds all of a prediction but resizing: normalisation, the networks of all tasks, and the rule of MORE or
MORE-RP. Input and outputs, N images of S x S pixels and C classes:

    images      uint8   (N, S, S, 3)  RGB, resized and cropped; N is free
    scores      float32 (N, C)        the largest wins
    label       int64   (N,)          its column; what the columns mean is in the metadata
    confidence  float32 (N,)          softmax(scores / temperature) at the label
    ood_score   float32 (N,)          higher = less known
    unknown     bool    (N,)          ood_score > threshold; only if there is a threshold

The entry ``morecl`` of the file's metadata is JSON: see :func:`metadata`.

- All networks run as one, the batch repeated for each task: the backbone is in the file once, and the graph of many
  tasks is hardly larger than that of one.
- Blocks are float32. Scores are float64 inside, as in the rules: the inverse of a covariance has a condition number of
  up to 1e9, which float32 cannot hold.
- MORE-RP asks few networks about an image. The graph computes all of them and drops what would not have been asked, so
  the answers are the same.
"""

from __future__ import annotations

import copy
import json
import math
import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

import morecl
from morecl.errors import InputError
from morecl.files import atomic_path, expanded
from morecl.images import ImageArray
from morecl.kernel_ridge import KernelRidge, gaussian_kernel
from morecl.labels import encode
from morecl.methods.base import Learner
from morecl.methods.more import More, MoreRule
from morecl.methods.more_rule import Heads
from morecl.methods.morerp import NOT_ASKED, MorerpRule, combine
from morecl.nn.network import AdaptedViT
from morecl.nn.preprocess import Preprocess
from morecl.nn.tokens import Tokens
from morecl.scoring import Features, Rule

FORMAT = "morecl.onnx/1"
OPSET = 18  # onnxruntime reads it from version 1.14 on
LARGEST = 2**31 - 2**20  # bytes of constants: protobuf allows 2 GiB, the graph takes some of it
LOWEST = torch.finfo(torch.float32).min  # score of a class that takes no part
CHECKED_IMAGES = 8
TOLERANCE = 1e-3  # relative to the scale of an image's scores
DECIDED = 1e-3  # two tasks whose log probabilities are closer than this may change places in MORE-RP's ranking


def export(
    learner: Learner, path: str | os.PathLike[str], *, threshold: float | None = None, temperature: float = 1.0
) -> None:
    """Write ``learner``, of method MORE or MORE-RP, to the ONNX file ``path``. An existing file is replaced.

    The file is compared with the learner on random images before it gets its name. Both compute in float32 on the CPU;
    on a GPU in half precision, the learner itself gives slightly different numbers.

    Args:
        threshold: an image with a higher OOD score is unknown; ``None``: the file has no output ``unknown``.
        temperature: of the softmax that turns scores into a confidence.

    Raises:
        InputError: the learner cannot be exported, a number or the path is not usable, or packages are missing.
        RuntimeError: the file does not answer as the learner does. It is not kept.
    """
    target = expanded(path)
    _check(learner, target, threshold, temperature)
    onnxruntime = _import_packages()
    plain = _on_cpu(cast(More, learner))
    graph = _Graph(plain, threshold, temperature).eval()
    if (size := graph.constant_bytes()) > LARGEST:
        raise InputError(
            f"{target} would be larger than the 2 GiB that one ONNX file can hold ({size / 2**30:.1f} GiB); "
            "use a smaller backbone"
        )
    model = _to_onnx(graph)
    entry = model.metadata_props.add()
    entry.key, entry.value = "morecl", json.dumps(metadata(plain, threshold, temperature), allow_nan=False)
    with atomic_path(target) as temporary:
        temporary.write_bytes(model.SerializeToString(deterministic=True))
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(temporary, options, providers=["CPUExecutionProvider"])
        images = _random_images(plain.backbone.input.size)
        names = [output.name for output in session.get_outputs()]
        answers = dict(zip(names, session.run(None, {"images": images}), strict=True))
        if reason := difference(plain, images, answers):
            raise RuntimeError(f"{target} was not written, because it would not answer as the learner does: {reason}")


def metadata(learner: Learner, threshold: float | None, temperature: float) -> dict[str, Any]:
    """What the file says about itself. ``classes`` are labels as :func:`morecl.labels.encode` writes them."""
    backbone = learner.backbone
    return {
        "format": FORMAT,
        "morecl": morecl.__version__,
        "method": learner.name,
        "backbone": backbone.architecture or Path(backbone.name).name,
        "classes": [encode(label) for label in learner.classes],
        "task_of_class": learner.task_of_column().tolist(),
        "image_size": backbone.input.size,
        "resize": {"shorter_side": backbone.input.resize, "filter": "bicubic", "then": "centre crop"},
        "threshold": threshold,
        "temperature": temperature,
    }


def difference(learner: Learner, images: ImageArray, answers: dict[str, Any]) -> str | None:
    """How the file's ``answers`` differ from those of the learner on ``images`` (N, S, S, 3); ``None`` if they do not.

    Scores may differ by ``TOLERANCE`` times the largest of the image in absolute value, OOD scores by ``TOLERANCE``
    times the largest of all. Where two classes are closer than that the label may differ; where MORE-RP could have
    asked one task as well as another, all may.
    """
    with torch.no_grad():
        features = Features(learner, Tokens(learner.network, _normalisation(learner), images), one_pass=False)
        output = learner.answer(features)
        decided = _decided(learner.rule, features).numpy()
    wanted, known = output.scores.numpy(), output.known.numpy()
    compared = wanted > LOWEST / 2  # not forgotten
    if (other := ((answers["scores"] > LOWEST / 2) != compared).any(1) & decided).any():
        return f"image {int(other.argmax())}: other classes take part"
    scale = np.abs(np.where(compared, wanted, 0)).max(1)  # (N,)
    chosen = np.take_along_axis(wanted, answers["label"][:, None], 1)[:, 0]
    gaps = {
        "scores": (np.abs(np.where(compared, answers["scores"] - wanted, 0)).max(1), scale),
        "ood_score": (np.abs(answers["ood_score"] + known), np.full_like(scale, np.abs(known).max())),
        "label": (wanted.max(1) - chosen, 2 * scale),  # both classes may be off
    }
    for name, (gap, unit) in gaps.items():
        room = TOLERANCE * unit.clip(min=1e-6)
        if (bad := ~(gap <= room) & decided).any():  # also NaN
            image = int(bad.argmax())
            return f"image {image}: {name} differs by {gap[image]:.2g}, allowed is {room[image]:.2g}"
    return None


def can_export(learner: Learner) -> bool:
    """Whether the learner's method can be exported."""
    return isinstance(learner, More) and type(learner.rule) in _RULES


def _check(learner: Learner, target: Path, threshold: float | None, temperature: float) -> None:
    if not can_export(learner):
        name = getattr(learner, "name", type(learner).__name__)
        raise InputError(f"a learner of method {name!r} cannot be exported to ONNX; 'more' and 'morerp' can")
    if not learner.task_sizes:
        raise InputError("nothing has been learned yet: call learn_task before export")
    if threshold is not None and not _is_finite(threshold):
        raise InputError(f"threshold must be a finite number or None, not {threshold!r}")
    if not _is_finite(temperature) or temperature <= 0:
        raise InputError(f"temperature must be a finite number above 0, not {temperature!r}")
    if target.is_dir():
        raise InputError(f"{target} is a folder; give the name of a file, such as {target / 'model.onnx'}")
    if not target.parent.is_dir():
        raise InputError(f"{target} cannot be written: there is no folder {target.parent}; make it first")


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float | np.floating | np.integer) and math.isfinite(value)


def _import_packages() -> Any:
    """onnxruntime, after making sure that what torch's exporter needs is there too."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # or onnxruntime reports to Microsoft; a user's setting wins
    try:
        import onnx  # noqa: F401
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise InputError(
            f"export to ONNX needs a package that is not installed ({error.name}): pip install 'morecl[export]'"
        ) from error
    return onnxruntime


# ---- the learner, without what only a GPU can do --------------------------------------------------------------


def _on_cpu(learner: More) -> More:
    """``learner`` itself if it computes in float32 on the CPU, else a copy that does."""
    if learner.device.type == "cpu" and learner.dtype == torch.float32:
        return learner
    config = learner.config.model_copy(update={"device": "cpu", "precision": "fp32", "compile": "off"})
    backbone = replace(learner.backbone, vit=copy.deepcopy(learner.backbone.vit).cpu())
    plain = type(learner)(config, backbone)
    state = {key: value.detach().cpu() for key, value in learner.state().items()}
    plain.restore(learner.classes, learner.task_sizes, state)
    return plain


def _frozen_network(learner: More) -> AdaptedViT:
    """The learner's network; if the backbone was trained, one with what it has become."""
    if learner.body is None:
        return learner.network
    vit = copy.deepcopy(learner.network.vit)
    vit.load_state_dict(learner.body.state_dict(), strict=False)  # the norms come from the tasks
    return AdaptedViT(vit)


def _normalisation(learner: Learner) -> Preprocess:
    """The learner's preprocessing of images that are already resized and cropped."""
    spec = learner.backbone.input
    return Preprocess(replace(spec, resize=spec.size), torch.device("cpu"))


# ---- the graph ------------------------------------------------------------------------------------------------


class _Graph(nn.Module):
    """What is traced. No tensor is registered: those that are used become constants of the graph, each once."""

    def __init__(self, learner: More, threshold: float | None, temperature: float):
        super().__init__()
        self.learner, self.threshold, self.temperature = learner, threshold, temperature
        self.normalise = _normalisation(learner)
        self.network = _frozen_network(learner)
        norms = [net.norms for net in learner.tasks]
        self.norms = (
            torch.stack([part.weight.detach() for part in norms], 1),  # (A + 1, G, D)
            torch.stack([part.bias.detach() for part in norms], 1),
        )
        self.adapters = learner._folded(learner.tasks)
        with torch.no_grad():
            self.heads = Heads.of(learner.tasks, range(len(learner.tasks)))
        self.answer = _RULES[type(learner.rule)]

    def constant_bytes(self) -> int:
        """Bytes of the constants, but for a few small ones."""
        rule = self.learner.rule
        parts = [*self.network.vit.state_dict().values(), *self.norms, *self.adapters, *self.heads]
        if isinstance(rule, MorerpRule):
            ridge = rule.ridge
            parts += (
                [ridge.features, ridge.dual] if isinstance(ridge, KernelRidge) else [ridge.projection, ridge.weight]
            )
        return sum(part.nbytes for part in parts)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        scores, known = self.answer(self.learner.rule, self.heads, self._features(images))
        outputs = {
            "scores": scores.float(),
            "label": scores.argmax(1),
            "confidence": (scores / self.temperature).softmax(1).amax(1).float(),
            "ood_score": (-known).float(),
        }
        if self.threshold is not None:
            outputs["unknown"] = -known > self.threshold
        return outputs

    def _features(self, images: Tensor) -> Tensor:
        """Features and patches under each network: uint8 (N, S, S, 3) -> (G, N, 2 D)."""
        tasks = len(self.learner.tasks)
        x = self.network.stem(self.normalise(images))  # (N, L, D)
        repeated = x.expand(tasks, *x.shape).reshape(-1, *x.shape[1:])  # (G N, L, D)
        features = self.network.trunk(repeated, self.norms, self.adapters, plain=True, patches=True)
        return features.view(tasks, -1, 2 * self.network.dim)


Answer = Callable[[Any, Heads, Tensor], tuple[Tensor, Tensor]]


def _more(rule: MoreRule, heads: Heads, features: Tensor) -> tuple[Tensor, Tensor]:
    """:class:`MoreRule`: scores (N, C) and how well known (N,), float64, from features (G, N, 2 D)."""
    scores = _without_forgotten(rule, _more_scores(rule, heads, features))
    return scores, scores.amax(1)


def _morerp(rule: MorerpRule, heads: Heads, features: Tensor) -> tuple[Tensor, Tensor]:
    """:class:`MorerpRule`: scores (N, C) and how well known (N,), float64, from features (G, N, 2 D)."""
    outputs = _ridge_outputs(rule, features[int(rule.source)])  # (N, C)
    ridge = (float(rule.ridge.sharpness) * outputs).log_softmax(1)
    scores = _more_scores(rule, heads, features).clamp(min=torch.finfo(torch.float64).tiny).log()
    if rule.asked is not None and rule.asked < len(rule.sizes):
        chosen = _task_probabilities(rule, ridge).topk(rule.asked, dim=1).indices  # (N, asked)
        asked = (chosen[:, :, None] == rule.task_of).any(1)  # (N, C)
        scores = torch.where(asked, scores, NOT_ASKED)
    scores = _without_forgotten(rule, scores)
    known = scores.amax(1) + rule.known_weight * outputs.amax(1)
    of_tasks = torch.where(_own(rule), scores[:, None], LOWEST).amax(2)
    return _without_forgotten(rule, combine(scores, ridge, rule.weight, of_tasks)), known


_RULES: dict[type, Answer] = {MoreRule: _more, MorerpRule: _morerp}


def _more_scores(rule: MoreRule, heads: Heads, features: Tensor) -> Tensor:
    """Eq. 7 of all tasks, side by side: (G, N, 2 D) -> (N, C)."""
    _, scores = rule._of_tasks(heads, features[..., : heads.weight.shape[1]])
    return heads.in_columns(scores.transpose(0, 1), 0.0)


def _ridge_outputs(rule: MorerpRule, features: Tensor) -> Tensor:
    """The ridge classifier's outputs, the lowest number for classes that are forgotten: (N, 2 D) -> (N, C), float64."""
    ridge = rule.ridge
    if isinstance(ridge, KernelRidge):
        scaled = features.float() / ridge.scale.float()
        outputs = gaussian_kernel(scaled, ridge.features.float()) @ ridge.dual
    else:
        outputs = ridge.random_features(features) @ ridge.weight
    return _without_forgotten(rule, outputs.double())


def _own(rule: MoreRule) -> Tensor:
    """Whether a class belongs to a task: (G, C)."""
    return rule.task_of == torch.arange(len(rule.sizes), device=rule.task_of.device)[:, None]


def _task_probabilities(rule: MorerpRule, ridge: Tensor) -> Tensor:
    """Logarithm of each task's share in the ridge classifier's probabilities: (N, C) -> (N, G)."""
    return torch.where(_own(rule), ridge[:, None], LOWEST).logsumexp(2)


def _decided(rule: Rule, features: Features) -> Tensor:
    """(N,): whether MORE-RP's choice of the networks it asks is clear; for MORE always."""
    if not isinstance(rule, MorerpRule) or rule.asked is None or rule.asked >= len(rule.sizes):
        return torch.ones(len(features), dtype=torch.bool)
    outputs = _ridge_outputs(rule, features(rule.network))
    by_task = _task_probabilities(rule, (float(rule.ridge.sharpness) * outputs).log_softmax(1))
    best = by_task.topk(rule.asked + 1, dim=1).values
    nothing_left = best[:, -1] <= LOWEST / 2  # all classes of the next task are forgotten
    return (best[:, -2] - best[:, -1] > DECIDED) | nothing_left


def _without_forgotten(rule: MoreRule, scores: Tensor) -> Tensor:
    """``scores`` (N, C) with the lowest value for classes that were forgotten."""
    return scores.masked_fill(rule.forgotten, LOWEST)


# ---- from the graph to the file -------------------------------------------------------------------------------


def _to_onnx(graph: _Graph) -> Any:
    """``graph`` as an ``onnx.ModelProto``."""
    images = torch.from_numpy(_random_images(graph.learner.backbone.input.size))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names = list(graph(images))
        program = torch.onnx.export(
            graph,
            (images,),
            input_names=["images"],
            output_names=names,
            dynamic_shapes={"images": {0: torch.export.Dim("N")}},
            opset_version=OPSET,
            dynamo=True,
            verbose=False,
        )
    model = cast(Any, program).model_proto
    model.producer_name, model.producer_version = "morecl", morecl.__version__
    for part in (model, model.graph, *model.graph.node, *model.graph.value_info, *model.graph.initializer):
        part.ClearField("metadata_props")  # torch writes source lines and paths of this machine there
        part.ClearField("doc_string")
    return model


def _random_images(side: int) -> ImageArray:
    """Noise, and colours with a little noise: (n, side, side, 3)."""
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (CHECKED_IMAGES, side, side, 3))
    colours = rng.integers(0, 256, (CHECKED_IMAGES, 1, 1, 3))
    plain = np.arange(CHECKED_IMAGES)[:, None, None, None] % 2 == 1
    return np.where(plain, (7 * colours + noise) // 8, noise).astype(np.uint8)
