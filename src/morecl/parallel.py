"""One run on several cards: what the processes that torchrun started do together.

All of them run the same program on the same data with the same random draws, and have the same weights at all times.
Only the expensive part is divided: of every batch each rank sends its own rows through the network. The features of all
rows are gathered, so that each rank computes the loss of the whole batch, whatever that loss is; on the way back each
rank has the gradient of its own rows, and their sum over ranks is that of the batch (:func:`divided`). Everything else,
regularisers and heads included, is computed by all of them alike.

Without torchrun there is no group, and none of this runs.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from morecl import ranks
from morecl.errors import InputError, RanksError, first_line

TIMEOUT = timedelta(minutes=10)  # for the slowest rank to arrive at what they do together
LOADING = timedelta(days=1)  # for one rank per machine to read the data
TEXT_BYTES = 2048
DIGEST_BYTES = 8

_runs = itertools.count()

Run = Callable[[Tensor, list[Tensor]], Tensor]


class Group:
    """The ranks of one run. All of them must make the same calls in the same order."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size
        self._cards: distributed.ProcessGroup | None = None  # NCCL's, if every rank has a card of its own

    @property
    def main(self) -> bool:
        """Whether this is the rank that writes."""
        return self.rank == 0

    def place(self, device: torch.device) -> None:
        """Choose how tensors travel: card to card if every rank has its own, else through the host's memory."""
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            card, kind = f"{socket.gethostname()} {properties.uuid}", properties.name
        else:
            card, kind = "", f"{device.type}, {torch.get_num_threads()} threads"
        self.agree({"device": kind})
        cards = self.texts(card)
        if device.type == "cuda" and len({*cards}) == self.size:
            self._cards = distributed.new_group(backend="nccl", timeout=TIMEOUT)

    # ---- rows -------------------------------------------------------------------------------------------------

    def part(self, count: int, rank: int | None = None) -> slice:
        """The rows of ``count`` that are this rank's, or another's: parts differ by one row at most, some are empty."""
        r = self.rank if rank is None else rank
        return slice(count * r // self.size, count * (r + 1) // self.size)

    def gather(self, part: Tensor, counts: Sequence[int]) -> Tensor:
        """The parts (counts[r], ...) of all ranks r, one after the other: (sum of counts, ...) on every rank."""
        here = part if self._cards else part.cpu()
        padded = here.new_zeros(max(counts), *here.shape[1:])
        padded[: len(here)] = here
        parts = [torch.empty_like(padded) for _ in counts]
        with _lost_ranks_explained(self):
            distributed.all_gather(parts, padded, group=self._cards)
        return torch.cat([each[:n] for each, n in zip(parts, counts, strict=True)]).to(part.device)

    def total(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, the same bits on all of them; ``tensor`` itself may be overwritten."""
        summed = tensor if self._cards else tensor.cpu()
        with _lost_ranks_explained(self):
            distributed.all_reduce(summed, group=self._cards)
        return summed.to(tensor.device)

    # ---- agreement --------------------------------------------------------------------------------------------

    def barrier(self, timeout: timedelta = TIMEOUT) -> None:
        """Wait for all ranks."""
        with _lost_ranks_explained(self):
            distributed.monitored_barrier(timeout=timeout)

    @contextmanager
    def first_on_each_machine(self) -> Iterator[None]:
        """One rank per machine runs the block first, the others after it: what it downloads or caches is there."""
        if ranks.local_rank():
            self.barrier(LOADING)
        yield
        if not ranks.local_rank():
            self.barrier(LOADING)

    def texts(self, text: str) -> list[str]:
        """The ``text`` of each rank; at most ``TEXT_BYTES`` of it."""
        own = text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")
        found = self._bytes(own)
        return [each.rstrip(b"\0").decode(errors="replace") for each in found]

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Raise :class:`InputError` on all ranks unless ``facts`` are the same on all; name those that are not."""
        told = [json.loads(text) for text in self.texts(json.dumps({key: str(v)[:80] for key, v in facts.items()}))]
        differing = [key for key in facts if len({each[key] for each in told}) > 1]
        if differing:
            values = "; ".join(f"{key}: " + ", ".join(f"{each[key]}" for each in told) for key in differing)
            raise InputError(
                f"the {self.size} ranks of this run differ in their {', '.join(differing)} ({values}). All machines "
                "need the same program, data and kind of card, and must see the same folder"
            )

    def require_same(self, tensors: Mapping[str, Tensor], when: str) -> None:
        """Raise :class:`RanksError` on all ranks unless ``tensors`` are the same on all, bit for bit."""
        digests = [_digest(name, value) for name, value in tensors.items()]
        found = self._bytes(b"".join(digests))
        cut = [[each[i : i + DIGEST_BYTES] for i in range(0, len(each), DIGEST_BYTES)] for each in found]
        differing = [name for name, *of_ranks in zip(tensors, *cut, strict=True) if len({*of_ranks}) > 1]
        if differing:
            raise RanksError(
                f"{when} the {self.size} ranks of this run no longer have the same numbers ({len(differing)} of "
                f"{len(tensors)} tensors differ, such as {differing[0]}): the processors or libraries they run on "
                "differ, or memory is faulty"
            )

    def _bytes(self, own: bytes) -> list[bytes]:
        """Of every rank as many bytes; through the host."""
        mine = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        with _lost_ranks_explained(self):
            distributed.all_gather(found, mine)
        return [each.numpy().tobytes() for each in found]


@contextmanager
def joined() -> Iterator[Group | None]:
    """The group of processes that torchrun started this one in; ``None`` without torchrun, or if it is alone."""
    if ranks.count() == 1:
        yield None
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(ranks.local_rank() % torch.cuda.device_count())  # what "cuda" means from now on
    group = Group(ranks.rank(), ranks.count())
    with _lost_ranks_explained(group):
        store, rank, size = next(rendezvous("env://", timeout=TIMEOUT))
        apart = PrefixStore(f"morecl {next(_runs)}", store)  # from earlier runs of these processes
        distributed.init_process_group("gloo", store=apart, rank=rank, world_size=size, timeout=TIMEOUT)
    yield group
    distributed.destroy_process_group()  # not after an error: it would wait for ranks that may be gone


def is_main(group: Group | None) -> bool:
    return group is None or group.main


def divided(group: Group, run: Run, inputs: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """``run(inputs, weights)``, (B, ...) -> (B, D), of which every rank computes its rows.

    The result, and the gradients of ``inputs`` and ``weights``, are those of the whole batch, on every rank, up to the
    order of sums. Rows must not depend on each other. One sum over ranks travels per backward pass: that of all
    gradients of ``weights``, in one piece.
    """
    rows = _Cut.apply(inputs, group) if inputs.requires_grad else _own_rows(group, inputs)
    features = run(rows, list(_Summed.apply(group, *weights)))
    return _Gathered.apply(features, group, len(inputs))


class _Cut(torch.autograd.Function):
    """This rank's rows; on the way back those of all ranks."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, group: Group) -> Tensor:
        ctx.group, ctx.counts = group, _counts(group, len(inputs))
        return _own_rows(group, inputs).clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        own = gradients[0][: ctx.counts[ctx.group.rank]]
        return ctx.group.gather(own, ctx.counts), None


class _Summed(torch.autograd.Function):
    """The weights as they are; on the way back their gradients summed over ranks, all in one piece."""

    @staticmethod
    def forward(ctx: Any, group: Group, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(weight.view_as(weight) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        flat = ctx.group.total(torch.cat([g.reshape(-1) for g in gradients]))
        pieces = flat.split([g.numel() for g in gradients])
        return None, *(piece.view(g.shape) for piece, g in zip(pieces, gradients, strict=True))


class _Gathered(torch.autograd.Function):
    """The features of all ranks' rows; on the way back the gradient of this rank's."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, group: Group, count: int) -> Tensor:
        ctx.mine, ctx.shape, counts = group.part(count), features.shape, _counts(group, count)
        return group.gather(features[: counts[group.rank]], counts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        own = gradients[0][ctx.mine]
        return (own if len(own) else gradients[0].new_zeros(ctx.shape)), None, None


def _own_rows(group: Group, inputs: Tensor) -> Tensor:
    """This rank's rows. If it has none, the first row: the way back must be there, with a gradient of zero."""
    rows = inputs[group.part(len(inputs))]
    return rows if len(rows) else inputs[:1]


def _counts(group: Group, count: int) -> list[int]:
    """Rows of each rank."""
    parts = [group.part(count, rank) for rank in range(group.size)]
    return [part.stop - part.start for part in parts]


def _digest(name: str, value: Tensor) -> bytes:
    told = hashlib.sha256(f"{name} {value.dtype} {tuple(value.shape)}".encode())
    flat = torch.empty(value.numel(), dtype=value.dtype).copy_(value.detach().reshape(-1))
    told.update(flat.view(torch.uint8).numpy().data)
    return told.digest()[:DIGEST_BYTES]


@contextmanager
def _lost_ranks_explained(group: Group) -> Iterator[None]:
    """Turn what torch raises when a rank is gone, or does not come, into a :class:`RanksError`."""
    try:
        yield
    except RuntimeError as error:
        reason = re.sub(r"^\[\S+\] ", "", first_line(error))  # a line of torch's source
        raise RanksError(f"rank {group.rank} of {group.size} lost the others: {reason.rstrip('.')}") from error
