"""HAT: Overcoming Catastrophic Forgetting with Hard Attention to the Task (Serra, Suris, Miron, Karatzoglou; ICML
2018), made class-incremental by HyperNet's task-id prediction (von Oswald, Henning, Sacramento, Grewe; ICLR 2020).

Each task trains the adapters under its own hard-attention masks, its own norms, and its own head of |Y^k| outputs, like
MORE but without the *ood* output, replay and back-update. HAT itself needs to know the task of a test image. Here the
image goes through every task's network, and the head with the least entropy wins:

    k* = argmin_k H(p(. | x, k)),   H(p) = -sum_c p_c log p_c;   y* = argmax_c p(c | x, k*)

Scores are the softmax outputs of all heads, those of task k* plus 1, so that they exceed all others while the order
within each task stays that of its head. The OOD score is the maximum softmax probability of the chosen head.

Deviations:

- HAT's masks apply to the adapters of a frozen ViT, not to all units; norms are per task and need no protection.
  ``freeze_backbone=False`` trains the ViT in the first task only (:mod:`morecl.methods.masked`).
- A finished task's masks are rounded to exactly {0, 1}, so the protection does not leak.
- Entropies are compared without normalisation, as in HyperNet, where all tasks have equally many classes. With tasks of
  different sizes the smaller one is favoured (its entropy is at most log |Y^k|); a task of one class always wins.
- s_max = 400 and lambda = 0.75 are HAT's own; momentum SGD without its gradient clipping and its rate schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from morecl.methods.base import TaskData
from morecl.methods.masked import MaskedLearner
from morecl.progress import Listener
from morecl.random import generator
from morecl.scoring import HeadsOf, Output, Rule


class LeastEntropy(Rule):
    """The head with the least entropy wins; see the module's text."""

    def __init__(self, heads: HeadsOf):
        super().__init__()
        self._heads = heads

    def score(self, features: Sequence[Tensor]) -> Output:
        logits = [head(z).double() for head, z in zip(self._heads(), features, strict=True)]
        entropy = torch.stack([-(x.softmax(1) * x.log_softmax(1)).sum(1) for x in logits], 1)  # (N, tasks)
        chosen = entropy.argmin(1)
        p = torch.cat([x.softmax(1) for x in logits], 1)
        task = torch.cat([torch.full((x.shape[1],), k, device=p.device) for k, x in enumerate(logits)])  # (C,)
        wins = task == chosen[:, None]  # (N, C)
        return Output(p + wins, p, p.where(wins, 0).amax(1))


class Hat(MaskedLearner):
    name: ClassVar[str] = "hat"

    def _learn(self, task: TaskData, listener: Listener) -> None:
        tokens, targets = self.prepare(task.images), task.targets.to(self.device)
        size = self.config.batch_size

        def batches(epoch: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
            draw = generator(self.config.seed, "epoch", task.index, epoch)
            own, shown = self._weighted_batches(len(tokens), size, draw), self._shown(tokens, task, epoch)
            shown.ahead([index for index, _ in own])
            for index, weight in own:
                yield shown[index], targets[index], weight

        with self._clock("train"):
            self._train(task, batches, -(-len(tokens) // size), listener)

    def _new_rule(self) -> Rule:
        return LeastEntropy(self._heads)
