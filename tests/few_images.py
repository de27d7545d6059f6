"""Learners that answer for few images, on a CPU and on a GPU, and what their answers are compared with."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

from family_members import MEMBERS
from morecl.bench.prediction import grown, spread
from morecl.catalogue import SHIPPED
from morecl.kernel_ridge import KernelRidge
from morecl.methods import few
from morecl.methods.more import More
from morecl.methods.morerp import Morerp
from morecl.scoring import Features, Output
from tiny import learner_of, teach

STREAM = ((0, 1), (2, 3), (4,), (5, 6, 9), (7, 8))
KINDS: dict[str, tuple[type[More], dict[str, Any], int]] = {  # class, settings, networks computed at once
    "more": (More, {}, 8),
    "more without coefficient": (More, {"coefficient": False}, 8),
    "morerp, all at once": (Morerp, {}, 8),
    "morerp, gathered": (Morerp, {}, 0),
    "morerp with sums": (Morerp, {"projection": 60}, 0),
    "morerp that asks all": (Morerp, {"asked": None}, 0),
    "morerp that asks one": (Morerp, {"asked": 1, "known_weight": 0.0}, 0),
    "morerp that asks enough": (Morerp, {"asked": 9}, 8),
}
every_kind = pytest.mark.parametrize("kind", KINDS)
every_backbone = pytest.mark.parametrize("name", [*MEMBERS, "trained"])


def images(count: int, seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 8, 8, 3), dtype=np.uint8)


def learner_like(kind: str, **changes: Any) -> Any:
    cls, settings, _ = KINDS[kind]
    return learner_of(cls, backbone=SHIPPED, image_size=8, memory_size=20, **settings, **changes)


@functools.cache
def learned(cls: type[More], projection: int | None) -> tuple[list[Any], list[int], dict[str, torch.Tensor]]:
    """Classes, sizes and state after five tasks, with networks that differ: a few steps leave adapters near the
    identity."""
    kind = "more" if cls is More else "morerp with sums" if projection else "morerp, gathered"
    learner = teach(learner_like(kind), *STREAM, each=4)
    with torch.no_grad():
        draw = torch.Generator().manual_seed(1)
        for part in learner.adapters.parameters():
            part.copy_(0.3 * torch.randn(part.shape, generator=draw))
        for net in learner.tasks:
            net.embedding.copy_(torch.randn(net.embedding.shape, generator=draw))
            net.norms.bias.add_(0.3 * torch.randn(net.norms.bias.shape, generator=draw))
        learner._derived.clear()
        if cls is Morerp:
            rank_differently(learner, draw)
    return learner.classes, learner.task_sizes, learner.state()


def rank_differently(learner: Any, draw: torch.Generator) -> None:
    """Give the ridge classifier weights under which images want different networks."""
    ridge = learner.rule.ridge
    if not isinstance(ridge, KernelRidge):
        ridge.weight.copy_(torch.randn(ridge.weight.shape, generator=draw))
        return
    z = learner.embed(learner.prepare(images(40, seed=9)), learner.rule.network)
    ridge.clear()
    ridge.scale.copy_((z - z.mean(0)).std())
    ridge.add(z, torch.arange(len(z)) % ridge.classes)
    ridge.dual = torch.randn(ridge.dual.shape, generator=draw)


def taught(kind: str, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Any:
    cls, settings, at_once = KINDS[kind]
    monkeypatch.setattr(few, "ALL_AT_ONCE", at_once)
    learner = learner_like(kind, **changes)
    classes, sizes, state = learned(cls, settings.get("projection"))
    learner.restore(classes, sizes, {key: value.clone() for key, value in state.items()})
    return learner


def usual(learner: Any, x: np.ndarray) -> Output:
    return learner.answer(Features(learner, learner.prepare(x), one_pass=False))


def of_few(learner: Any, x: np.ndarray) -> Output:
    answer = learner._for_few(len(x))
    assert answer is not None
    with torch.no_grad():
        return Output.unpacked(answer(torch.from_numpy(x).to(learner.device)).packed().cpu())


def assert_equal(found: Output, expected: Output, tolerance: float) -> None:
    for name, value in vars(expected).items():
        torch.testing.assert_close(vars(found)[name], value.cpu(), rtol=tolerance, atol=tolerance, msg=name)
    assert torch.equal(found.scores.argmax(1), expected.scores.cpu().argmax(1))


@functools.cache
def of_backbone(name: str, device: str) -> Any:
    """A learner of three tasks of any backbone; ``trained``: the shipped one, which the first task trains."""
    chosen = {"freeze_backbone": False} if name == "trained" else {"backbone": name, "pretrained": False}
    config = Morerp.Config.parse({"device": device, "precision": "fp32", "memory_size": 20, "image_size": 16, **chosen})
    learner = grown("morerp", config, 3)
    assert isinstance(learner, Morerp)
    spread(learner, pictures(16))
    return learner


def big(method: str, tasks: int, **settings: Any) -> Any:
    """A learner of the shipped backbone, grown without training."""
    cls = {"more": More, "morerp": Morerp}[method]
    config = cls.Config.parse({"device": "cuda", "memory_size": 20, "image_size": 32, **settings})
    learner = grown(method, config, tasks)
    if isinstance(learner, Morerp) and settings.get("projection") is None:
        spread(learner, pictures(64))
    return learner


def pictures(count: int, seed: int = 0, side: int = 32) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, side, side, 3), dtype=np.uint8)
