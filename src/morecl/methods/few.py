"""How MORE and MORE-RP answer for a few images without waiting for the device, so that a CUDA graph can hold all of it
(:mod:`morecl.nn.capture`).

What was learned is brought together once: networks for one pass, heads for one computation. The learner keeps
that until it learns more; to avoid a cycle it is passed on every call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from morecl.kernel_ridge import KernelRidge
from morecl.methods.more_rule import Heads
from morecl.scoring import Output

if TYPE_CHECKING:
    from morecl.methods.more import More
    from morecl.methods.morerp import Morerp

# Networks up to which MORE-RP computes all of them in one pass, and then ranks them. One image on an H200, ViT-Ti at
# 224 px: with 5, 10 and 20 networks 1.3, 1.6 and 1.8 ms; 2.4 ms in two passes.
ALL_AT_ONCE = 32


class FewImages:
    """MORE's answers: all networks that have classes left in one pass, then all heads."""

    def __init__(self, learner: More):
        self.among = [k for k, is_left in enumerate(learner.rule.remaining().tolist()) if is_left]
        self.networks = len(self.among)  # that see each image in one pass
        tasks = [learner.tasks[k] for k in self.among]
        self.together = learner._all_together() if len(tasks) == len(learner.tasks) else learner._together(tasks)
        self.heads = Heads.of(learner.tasks, self.among)
        self._single = (tasks[0].norms, learner._adapters_of(tasks[0])) if len(tasks) == 1 else None

    @staticmethod
    def bytes_for(learner: More) -> int:
        """Upper bound on the device memory that this needs, in bytes."""
        return learner._together_bytes() + 8 * Heads.size(learner.tasks)

    def __call__(self, learner: More, images: Tensor) -> Output:
        """Of uint8 images (N, H, W, 3) on the device."""
        x = learner.network.prefix(learner.preprocess(images))
        return learner.rule.together(self.heads, self._features(learner, x))

    def _features(self, learner: More, x: Tensor, *, patches: bool = False) -> Tensor:
        """Under all networks: (G, N, D); with ``patches`` (G, N, 2 D), see :meth:`AdaptedViT.trunk`."""
        if self._single is not None:
            return learner.network.trunk(x, *self._single, learner.body, patches=patches)[None]
        return learner._in_one_pass(x, self.together, patches=patches)


class FewRanked(FewImages):
    """MORE-RP's answers. Few networks are computed in one pass, before it is known which of them count. Of many, the
    one that feeds the ridge classifier is computed first; then those that it ranks highest, in a pass for which their
    weights are gathered on the device."""

    def __init__(self, learner: Morerp):
        super().__init__(learner)
        rule = learner.rule
        source, of_all = int(rule.source), len(self.among)
        self._asked = min(rule.asked or of_all, of_all)
        self._place = self.among.index(source) if source in self.among and of_all <= ALL_AT_ONCE else None
        self.networks = of_all if self._place is not None else self._asked
        self._feeding = learner.tasks[source].norms, learner._adapters_of(learner.tasks[source])
        self._reference = rule.ridge.reference() if isinstance(rule.ridge, KernelRidge) else None  # must not be freed

    @staticmethod
    def bytes_for(learner: More) -> int:
        ridge = learner.rule.ridge
        kept = ridge.features.numel() if isinstance(ridge, KernelRidge) else 0
        return FewImages.bytes_for(learner) + 4 * kept

    def __call__(self, learner: Morerp, images: Tensor) -> Output:  # type: ignore[override]
        rule = learner.rule
        x = learner.network.prefix(learner.preprocess(images))
        if self._place is None:
            z = learner.network.trunk(x, *self._feeding, learner.body, patches=True)
        else:
            all_features = self._features(learner, x, patches=True)
            z = all_features[self._place]
        outputs, ridge = rule.compare(z)
        chosen = rule.best(self.heads, ridge, self._asked)  # (N, asked)
        if self._place is None:
            scores = self._of_gathered(learner, x, chosen)
        else:
            of_all = rule.log_scores(self.heads, all_features[..., : learner.network.dim]).transpose(0, 1)
            scores = of_all.gather(1, chosen[..., None].expand(-1, -1, of_all.shape[2]))
        return rule.combined(outputs, ridge, rule.in_columns(self.heads, scores, chosen))

    def _of_gathered(self, learner: Morerp, x: Tensor, chosen: Tensor) -> Tensor:
        """Logarithms of MORE's scores (N, asked, M) of the ``chosen`` tasks, each image under its own networks."""
        groups = chosen.flatten()
        repeated = x[:, None].expand(-1, self._asked, *x.shape[1:]).flatten(0, 1)  # one group each: (N asked, ...)
        features = learner.network.trunk(repeated, *self.together.take(groups), learner.body)
        scores = learner.rule.log_scores(self.heads.take(groups), features[:, None])  # (N asked, 1, M)
        return scores.view(*chosen.shape, -1)
