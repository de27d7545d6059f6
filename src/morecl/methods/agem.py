"""A-GEM: Efficient Lifelong Learning with A-GEM (Chaudhry, Ranzato, Rohrbach, Elhoseiny; ICLR 2019).

The memory is not trained on; it only constrains. Let g be the gradient of the task's batch and g_ref that of a random
batch from memory. A step along g is taken as it is if it does not raise the memory's loss (to first order). Otherwise
it is replaced by the nearest one that does not (Eq. 11 of that paper):

    g~ = g                                       if g . g_ref >= 0
    g~ = g - (g . g_ref) / (g_ref . g_ref) g_ref otherwise, so that g~ . g_ref = 0

g runs over all trained parameters together: adapters, norms and the head.

Deviations:

- Batches of 64 (the original: 10), several epochs instead of one pass.
- SGD has momentum, as for all methods here; the original has none. So by default the whole step is projected,
  momentum * v + g in place of g. ``project="gradient"`` projects g alone, as published and as other libraries do; what
  momentum keeps is then not projected, and the veto loses its effect (digits-5t at 16 px, on a held-out fifth of the
  training images: ACA 16 instead of 62).
- One head over all classes seen (class-incremental) instead of one per task.
- Balanced memory; frozen pre-trained backbone with trained adapters and norms. ``freeze_backbone=False`` trains the
  backbone in every task; g then runs over it too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal, cast

import torch
from pydantic import Field
from torch import Tensor

from morecl.config import TrainingConfig
from morecl.methods.base import TaskData, count
from morecl.methods.single_head import SingleHeadLearner
from morecl.progress import Listener
from morecl.random import generator
from morecl.training import Batch, paired_batches


class AgemConfig(TrainingConfig):
    memory_size: int = Field(200, ge=0, description="images in the replay memory, all classes together")
    memory_batch_size: int = Field(
        256, ge=1, description="images for the reference gradient; the whole memory if it has fewer"
    )
    project: Literal["step", "gradient"] = Field(
        "step", description="what is projected: the whole step with its momentum, or, as published, the gradient alone"
    )

    def switched_off(self, *, further: bool = False) -> dict[str, str]:
        return {} if self.memory_size else dict.fromkeys(("memory_batch_size", "project"), "memory_size=0")


@torch.no_grad()
def project(gradients: Sequence[Tensor], reference: Sequence[Tensor]) -> None:
    """Eq. 11, in place: remove from ``gradients`` what points against ``reference``. Does not wait for the device."""
    product = torch.stack([(g * r).sum() for g, r in zip(gradients, reference, strict=True)]).sum()
    length = torch.stack([r.square().sum() for r in reference]).sum()
    factor = torch.where(product < 0, product / length, 0.0)
    torch._foreach_sub_(list(gradients), torch._foreach_mul(list(reference), factor))


class Agem(SingleHeadLearner):
    name: ClassVar[str] = "agem"
    Config = AgemConfig
    config: AgemConfig

    def _learn(self, task: TaskData, listener: Listener) -> None:
        config = self.config
        tokens = self.prepare(task.images)
        columns = task.columns.to(self.device)
        replay = self.prepare(self.memory.images)
        replay_columns = torch.from_numpy(self.memory.columns).to(self.device)
        optimizer = self._optimizer()
        parameters: list[Tensor] = list(self.model.parameters())
        velocity = optimizer.tensors()[len(parameters) :]

        def batches(epoch: int) -> Iterator[Batch]:
            draw = generator(config.seed, "epoch", task.index, epoch)
            size = min(config.memory_batch_size, len(replay))
            pairs = paired_batches(len(tokens), config.batch_size, len(replay), size, draw, self.device)
            shown, again = self._shown(tokens, task, epoch), self._shown(replay, task, epoch, "replay")
            shown.ahead([own for own, _ in pairs])
            for own, other in pairs:
                yield shown[own], columns[own], *((again[other], replay_columns[other]) if len(other) else ())

        def loss(x: Tensor, y: Tensor, *reference: Tensor) -> Tensor:
            return self._cross_entropy(x, y)

        def project_step(x: Tensor, y: Tensor, *reference: Tensor) -> None:
            if not reference:
                return
            against = torch.autograd.grad(self._cross_entropy(*reference), parameters)
            gradients = [cast(Tensor, p.grad) for p in parameters]
            if config.project == "gradient":
                project(gradients, against)
                return
            kept = torch._foreach_mul(velocity, config.momentum)
            torch._foreach_add_(gradients, kept)  # the step that would be taken
            project(gradients, against)
            torch._foreach_sub_(gradients, kept)  # the optimiser adds them again

        with self._clock("train"):
            self._fit(loss, batches, task=task, listener=listener, optimizer=optimizer, after_backward=project_step)
        self._remember(task)

    def entries(self) -> dict[str, int]:
        """With what training needs besides: reference gradient, momentum's part and what is removed, each of the length
        of all that is trained. The MORE paper counts these, too."""
        return super().entries() | {"statistics": 3 * count(self.model)}
