"""timm's ViT with an adapter behind each branch of each block, run with the parameters of one task."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.func import functional_call

from morecl.nn.adapter import Adapter

Gates = Sequence[Tensor]  # m1 (K,), m2 (D,) of each adapter in turn: 4 per block


class Norms(nn.Module):
    """One task's copy of every LayerNorm: norm1 and norm2 of each block and the last one.

    Keys are timm's names with ``-`` for the dots, which parameter names may not hold.
    """

    def __init__(self, pretrained: Mapping[str, Tensor]):
        super().__init__()
        for name, value in pretrained.items():
            self.register_parameter(name.replace(".", "-"), nn.Parameter(value.detach().clone()))

    def of(self, prefix: str) -> dict[str, Tensor]:
        """Parameters of the norms under ``prefix``, named as inside it: ``norm1.weight``, ..."""
        start = prefix.replace(".", "-") + "-"
        return {
            name.removeprefix(start).replace("-", "."): value
            for name, value in self._parameters.items()
            if name.startswith(start) and value is not None
        }


def run_block(template: nn.Module, state: dict[str, Tensor], x: Tensor, *, compiled: bool = False) -> Tensor:
    """``template(x)`` with the parameters and buffers in ``state``.

    A template that stands for all blocks of a network, with ``state`` complete, is compiled once for all of them.
    """
    run = _compiled_block() if compiled else _call_block
    return run(template, state, x)


def _call_block(template: nn.Module, state: dict[str, Tensor], x: Tensor) -> Tensor:
    return cast(Tensor, functional_call(template, state, (x,)))


@functools.cache
def _compiled_block() -> Callable[[nn.Module, dict[str, Tensor], Tensor], Tensor]:
    return cast("Callable[[nn.Module, dict[str, Tensor], Tensor], Tensor]", torch.compile(_call_block, dynamic=False))


class AdaptedViT:
    """A frozen ``vit`` with adapters put into it: ``x + A1(attn(norm1(x)))``, then ``x + A2(mlp(norm2(x)))``.

    timm's network is used as it is. The adapters stand behind ``ls1`` and ``ls2``, which timm runs last in each
    branch. Norms (and masks) of the task at hand are handed in on every call; the network keeps no notion of a
    current task. Not an ``nn.Module`` on purpose: the frozen weights are not part of anyone's state.
    """

    def __init__(self, vit: VisionTransformer, bottleneck: int | None):
        """``bottleneck``: width of the adapters; ``None`` puts none in (the network is then the backbone itself)."""
        self.vit = vit
        self.dim: int = vit.embed_dim
        self.depth = len(vit.blocks)
        self.adapters = nn.ModuleList()
        for block in vit.blocks if bottleneck else ():
            for branch in ("ls1", "ls2"):
                adapter = Adapter(self.dim, cast(int, bottleneck)).to(next(vit.parameters()).device)
                setattr(block, branch, nn.Sequential(getattr(block, branch), adapter))
                self.adapters.append(adapter)
        # what no task changes, and the adapters, by block; norms and masks join them on every call
        own = ("norm1.", "norm2.", "ls1.1.", "ls2.1.")
        blocks = [dict(block.state_dict(keep_vars=True)) for block in vit.blocks]
        self.frozen = [{key: value for key, value in block.items() if not key.startswith(own)} for block in blocks]
        self._shared = [
            state | {key: value for key, value in block.items() if key.startswith(own[2:])}
            for state, block in zip(self.frozen, blocks, strict=True)
        ]
        self.last_norm = "fc_norm" if isinstance(vit.fc_norm, nn.LayerNorm) else "norm"

    def initialise(self, generator: torch.Generator) -> None:
        for adapter in self.adapters:
            cast(Adapter, adapter).initialise(generator)

    def new_norms(self) -> Norms:
        """A task's own norms, starting from the pre-trained ones."""
        wanted = (*(f"blocks.{i}.norm{n}." for i in range(self.depth) for n in (1, 2)), f"{self.last_norm}.")
        return Norms({name: value for name, value in self.vit.named_parameters() if name.startswith(wanted)})

    def stem(self, images: Tensor) -> Tensor:
        """The part no task changes: patches, class token, positions. (B, 3, S, S) -> (B, L, D)."""
        vit = self.vit
        return cast(Tensor, vit.norm_pre(vit._pos_embed(vit.patch_embed(images))))

    def trunk(
        self, tokens: Tensor, norms: Norms | None = None, gates: Gates | None = None, *, compiled: bool = False
    ) -> Tensor:
        """The blocks and the last norm. (B, L, D) -> features (B, D), float32.

        ``norms`` and ``gates`` are those of one task; without them the backbone's own norms and open masks are used.
        """
        x = tokens
        for i, block in enumerate(self.vit.blocks):
            state = norms.of(f"blocks.{i}") if norms else {}
            if gates is not None:
                names = ("ls1.1.m1", "ls1.1.m2", "ls2.1.m1", "ls2.1.m2")
                state |= dict(zip(names, gates[4 * i : 4 * i + 4], strict=True))
            if compiled:
                x = run_block(self.vit.blocks[0], self._shared[i] | state, x, compiled=True)
            else:
                x = run_block(block, state, x)
        return self.pool(x, norms).float()

    def pool(self, x: Tensor, norms: Norms | None) -> Tensor:
        """Last norm and class token (or the mean of the patches, for backbones trained so)."""
        last = norms.of(self.last_norm) if norms else {}
        if self.last_norm == "norm":
            x = functional_call(self.vit.norm, last, (x,))
            return cast(Tensor, self.vit.pool(x))
        x = self.vit.pool(self.vit.norm(x))
        return cast(Tensor, functional_call(self.vit.fc_norm, last, (x,)))
