"""What each rank does in tests/parallel: ``torchrun --nproc-per-node 2 tests/parallel_work.py OUT``.

Without torchrun the same functions give what one process alone finds. At last rank 1 kills itself. With ``cuda`` behind
OUT they only learn, both on the same card.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from morecl import cli, parallel
from morecl.errors import InputError, RanksError
from morecl.methods import METHODS
from morecl.methods.more import More
from morecl.nn.adapter import AdapterWeights
from morecl.parallel import Group
from morecl.records import Record
from morecl.run import RunRequest
from morecl.run.launch import start
from morecl.task import task_data
from tiny import create, images_of, settings_for, task

SIZES = (5, 4, 1)  # of batches: uneven parts, even ones, and one rank without a row
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in METHODS} | {
    "more, trained backbone": ("more", {"freeze_backbone": False}),
    "ncm, trained backbone": ("ncm", {"freeze_backbone": False}),
    "derpp, augmented": ("derpp", {"augment": True}),
}
ON_A_CARD = ("more", "morerp", "hat", "joint", "derpp")
RUN_SETTINGS = settings_for("more", epochs=2, memory_size=20)

Arrays = dict[str, Any]


def double_trunk(
    prefix: Tensor, norms: Any, adapters: AdapterWeights, body: Any = None, *, masks: Any = None, compiled: bool = False
) -> Tensor:
    """A network in float64 that uses norms and adapters as the real one does, row by row: (B, L, D) -> (B, D)."""
    adapters = adapters if masks is None else adapters.under(masks)
    weight, bias = norms if isinstance(norms, tuple) else (norms.weight, norms.bias)
    h = prefix.double()
    for a in range(len(adapters.w1)):
        h = F.layer_norm(h, h.shape[-1:]) * weight[a] + bias[a]
        h = h + F.linear(F.relu(F.linear(h, adapters.w1[a], adapters.b1[a])), adapters.w2[a], adapters.b2[a])
    return h.mean(1)


def gradients_of_more(group: Group | None, size: int) -> Arrays:
    """Of MORE's loss with its regulariser, for a batch of ``size`` images with unequal weights, in float64."""
    learner: Any = create("more", seed=3)
    learner.learn_task(*images_of(0, 1, each=4))  # so that masks are taken and the regulariser counts
    learner.group = group
    caught: list[Any] = []
    learner._fit = lambda loss, batches, **_: caught.append(loss)
    learner.classes.extend([2, 3])
    learner.task_sizes.append(2)
    learner._grow(2)
    learner.model.double()
    learner.network.trunk = double_trunk
    draw = torch.Generator().manual_seed(size)
    with torch.no_grad():
        for parameter in learner.model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
    learner._train(task_data(*images_of(2, 3, each=4), [2, 3], 1, 2), lambda epoch: [], 1, lambda event: None)
    tokens = learner.prepare(images_of(2, 3, each=4)[0])[torch.arange(size)]
    targets, weights = torch.arange(size) % 3, torch.rand(size, generator=draw, dtype=torch.float64)
    value = caught[0](tokens, targets, weights, torch.tensor(2.0, dtype=torch.float64))
    value.backward()
    found = {"loss": value.detach().numpy()}
    for name, parameter in learner.model.named_parameters():
        if parameter.grad is not None:
            found[name] = parameter.grad.numpy()
    return found


def gradient_of_inputs(group: Group | None, size: int) -> Arrays:
    """Where images are trained (HAL's anchors) their gradient is that of all rows on every rank."""
    draw = torch.Generator().manual_seed(size)
    x = torch.randn(size, 3, dtype=torch.float64, generator=draw).requires_grad_()
    w = torch.randn(2, 3, dtype=torch.float64, generator=draw).requires_grad_()

    def run(rows: Tensor, weights: list[Tensor]) -> Tensor:
        return (rows @ weights[0].mT).tanh()

    z = run(x, [w]) if group is None else parallel.divided(group, run, x, [w])
    (z.square().sum() + z.prod()).backward()
    assert x.grad is not None and w.grad is not None
    return {"x": x.grad.numpy(), "w": w.grad.numpy()}


def learned(group: Group | None, variant: str, device: str = "cpu") -> Arrays:
    """Two tasks with a last batch of one image: all that was learned, features before and after the second task, and
    the answers."""
    method, changes = VARIANTS[variant]
    learner = create(method, seed=1, eval_batch_size=4, device=device, **changes)
    learner.checked_images = 0
    learner.join(group)
    fresh = task([0, 1, 2, 3], [0, 1, 2, 3], 2, draw=5)[0]
    losses: list[float] = []
    images, labels = task([0, 1], [0, 1], 5)
    learner.learn_task(images[:9], labels[:9], lambda event: losses.append(event.loss))
    before = learner.features(fresh)
    images, labels = task([2, 3], [2, 3], 5)
    learner.learn_task(images[:9], labels[:9], lambda event: losses.append(event.loss))
    found = {f"state {key}": value.detach().cpu().numpy() for key, value in learner.state().items()}
    if group is not None:
        group.require_same(learner.state(), "in this test")
    return found | {
        "before": before,
        "after": learner.features(fresh),
        "scores": learner.scores(fresh),
        "losses": np.array(losses),
    }


def disagreements(group: Group) -> dict[str, str]:
    """What is said when ranks differ in one fact of two, and in one tensor of two."""
    group.agree({"data": "same"})
    group.require_same({"mask": torch.ones(3)}, "after task 1")
    told = {}
    try:
        group.agree({"data": "same", "finished tasks": group.rank})
    except InputError as error:
        told["agree"] = str(error)
    weights = torch.zeros(3)
    weights[1] = 1e-38 * group.rank
    try:
        group.require_same({"mask": torch.ones(3), "weights": weights}, "after task 1")
    except RanksError as error:
        told["require_same"] = str(error)
    return told


def run(out: Path) -> Record:
    """A whole run of MORE on digits."""
    request = RunRequest(
        method="more", benchmark="digits-5t", settings=RUN_SETTINGS, tasks=2, train_per_class=5, test_per_class=4
    )
    return start(request, out)


def main(out: Path) -> None:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    with parallel.joined() as group:
        assert group is not None
        (out / f"told-{group.rank}.json").write_text(json.dumps(disagreements(group)))
        for size in SIZES:
            np.savez(out / f"gradients-{size}-{group.rank}.npz", **gradients_of_more(group, size))
            np.savez(out / f"inputs-{size}-{group.rank}.npz", **gradient_of_inputs(group, size))
        for variant in VARIANTS:
            started = time.perf_counter()
            np.savez(out / f"{variant}-{group.rank}.npz", **learned(group, variant))
            if group.main:
                print(f"{variant}: {time.perf_counter() - started:.2f} s")
    record = run(out / "run")
    assert record.ranks == 2
    run_until_killed(out / "killed")


def main_on_a_card(out: Path) -> None:
    with parallel.joined() as group:
        assert group is not None
        for variant in ON_A_CARD:
            np.savez(out / f"{variant}-{group.rank}.npz", **learned(group, variant, "cuda"))


def run_until_killed(out: Path) -> None:
    """The same run from the command line. Rank 1 kills itself in the middle of the second task."""
    original = More._back_update

    def back_update(self: More, *given: Any) -> None:
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        original(self, *given)

    More._back_update = back_update  # type: ignore[method-assign]
    settings = [text for key, value in RUN_SETTINGS.items() for text in ("--set", f"{key}={value}")]
    small = ["--tasks", "2", "--train-per-class", "5", "--test-per-class", "4"]
    sys.argv = ["morecl", "run", "digits-5t", *small, *settings, "--out", str(out)]
    cli.main()


if __name__ == "__main__":
    (main_on_a_card if sys.argv[2:] == ["cuda"] else main)(Path(sys.argv[1]))
