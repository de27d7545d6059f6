"""Replay memory: what it stores, and how images are selected (balanced, herding, reservoir, everything)."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from morecl import pictures
from morecl.errors import InputError
from morecl.images import to_side
from morecl.labels import Forgotten
from morecl.pictures import AnyImages, Pictures, changed, joined

Columns = NDArray[np.int64]
Extra = NDArray[np.float32]


class ReplayMemory:
    """At most ``size`` images, their classes, and whatever a method stores with each image (``extras``).

    A method fills its memory in one way only:

    - :meth:`update`: balanced, ``size // classes seen`` images of each class, drawn at random without replacement;
    - :meth:`update_ranked`: balanced, the first images of an order that the method gives (:func:`herding`);
    - :meth:`replace`: the method decides by itself; DER++'s reservoir is a :class:`LogitReservoir`;
    - :meth:`keep`: everything is kept, whatever ``size``. Too many images for memory stay where they are: ``images``
      is then a :class:`Pictures`, else an array.

    Between tasks, :meth:`add` takes in further images of known classes, :meth:`drop` removes a class that is forgotten,
    and :meth:`resize` changes ``size``.

    In a balanced memory the classes of a learned task get their share and the older ones are cut down to theirs. A
    class with fewer images than its share keeps them all, and the rest of its share stays unused, so the memory stays
    balanced. Once there are more classes than places, each place holds one image of another class, and every class is
    equally likely to have one. Images are kept as they came (uint8); once sizes differ between tasks, all are kept at
    the backbone's resize size.
    """

    def __init__(self, size: int, classes: Sequence[Hashable], side: int):
        self.size = size
        self.images: AnyImages = np.empty((0, side, side, 3), np.uint8)
        self.columns: Columns = np.empty(0, np.int64)  # position of the class in `classes`
        self.extras: dict[str, Extra] = {}  # name -> one row per image
        self.seen = 0  # images that a reservoir has been offered so far
        self._classes = classes
        self._side = side

    def __len__(self) -> int:
        return len(self.columns)

    @property
    def labels(self) -> list[Hashable]:
        """The label of each image, as the user gave it."""
        return [self._classes[c] for c in self.columns]

    def quota(self, classes: int) -> int:
        """Images per class once ``classes`` have been seen: at least one, unless the memory has no places."""
        return max(self.size // classes, min(self.size, 1))

    # ---- rules ------------------------------------------------------------------------------------------------

    def update(self, images: AnyImages, columns: Columns, generator: torch.Generator) -> None:
        """Add a learned task: ``images`` (N, H, W, 3) of the new classes ``columns`` (N,)."""
        order = torch.randperm(len(columns), generator=generator).numpy()
        self.update_ranked(images, columns, order, generator)

    def update_ranked(self, images: AnyImages, columns: Columns, order: Columns, generator: torch.Generator) -> None:
        """As :meth:`update`, but of each class the images that come first in ``order`` (indices into ``images``).

        The stored images of a class stay in that order, so an older class is cut from its end.
        """
        quota = self.quota(int(columns.max()) + 1 - self._forgotten())
        holders = self._holders(np.unique(columns), generator)
        kept = [np.flatnonzero(self.columns == c)[:quota] for c in np.unique(self.columns) if c in holders]
        drawn = [order[columns[order] == c][:quota] for c in np.unique(columns) if c in holders]
        old, new = (np.concatenate([*parts, np.empty(0, np.int64)]) for parts in (kept, drawn))
        drawn_images = np.asarray(images[new])
        self.images = _joined(self.images[old], drawn_images, self._side) if len(old) else drawn_images
        self.columns = np.concatenate([self.columns[old], columns[new]])

    def _holders(self, new: Columns, generator: torch.Generator) -> set[int]:
        """The classes with a place once those of ``new`` are added: all, or a reservoir of ``size`` classes."""
        forgotten = self._forgotten()
        if self.size > int(new.max()) - forgotten:
            return {*np.unique(self.columns).tolist(), *new.tolist()}
        holders = self._fitting_holders(generator)
        slots = reservoir_slots(int(new.min()) - forgotten, len(new), self.size, generator)
        for c, slot in zip(new.tolist(), slots.tolist(), strict=True):
            if len(holders) < self.size:
                holders.append(c)
            elif slot >= 0:
                holders[slot] = c
        return set(holders)

    def _fitting_holders(self, generator: torch.Generator) -> list[int]:
        """The classes with images: all, or ``size`` of them at random if the memory has become too small for them."""
        holders: list[int] = np.unique(self.columns).tolist()
        if len(holders) <= self.size:
            return holders
        return [holders[i] for i in torch.randperm(len(holders), generator=generator)[: self.size].tolist()]

    def _forgotten(self) -> int:
        return sum(isinstance(label, Forgotten) for label in self._classes)

    def add(self, images: AnyImages, columns: Columns, seen: Columns, generator: torch.Generator) -> None:
        """Take in further ``images`` (N, H, W, 3) of known classes ``columns`` (N,), into a balanced random memory.

        What is stored of a class stays a uniform sample of all its images: with ``seen[c]`` images before, the number
        of its places that go to new images is hypergeometric, the rest is for old ones. Of these there may be fewer
        than places (images that were cut away do not come back); such places stay empty.
        """
        quota = self.quota(max(1, len(self._classes) - self._forgotten()))
        holders = set(np.unique(self.columns).tolist())
        touched: list[int] = np.unique(columns).tolist()
        parts = [np.flatnonzero(~np.isin(self.columns, touched))]
        for c in touched:
            old, new = np.flatnonzero(self.columns == c), np.flatnonzero(columns == c)
            if c not in holders and len(holders) >= self.size:
                continue
            holders.add(c)
            drawn = hypergeometric(len(new), int(seen[c]), quota, generator)
            left = min(quota, len(new) + int(seen[c])) - drawn
            new = new[torch.randperm(len(new), generator=generator).numpy()[:drawn]]
            old = old[torch.randperm(len(old), generator=generator).numpy()[:left]]
            both = np.concatenate([old, len(self) + new])
            parts.append(both[torch.randperm(len(both), generator=generator).numpy()])  # a class is cut from its end
        kept = np.concatenate(parts)
        pool = self.followed_by(images)
        self.replace(pool[kept], np.concatenate([self.columns, columns])[kept])

    def drop(self, column: int) -> None:
        """Remove all images of a class."""
        self._keep(np.flatnonzero(self.columns != column))

    def resize(self, size: int, generator: torch.Generator) -> None:
        """Have ``size`` places from now on. A balanced memory that is too large for them is cut down at once.

        Raises:
            InputError: the memory is a reservoir, whose size is part of how it was filled.
        """
        if self.seen:
            raise InputError("memory_size cannot change once a reservoir has been filled: create a new learner with it")
        self.size = size
        quota = self.quota(max(1, len(self._classes) - self._forgotten()))
        parts = [np.flatnonzero(self.columns == c)[:quota] for c in sorted(self._fitting_holders(generator))]
        self._keep(np.concatenate([*parts, np.empty(0, np.int64)]))

    def keep(self, images: AnyImages, columns: Columns) -> None:
        """Keep everything stored and add all of ``images``.

        Up to ``HELD_BYTES`` in all become one array. More stay where they are, and arrays, which are the user's, are
        copied. Only the number of bytes decides, so that a learner that was saved and loaded again computes the same.
        """
        stored: list[AnyImages] = [self.images] if len(self) else []
        if stored and self.images.shape[1:] != images.shape[1:]:
            stored, images = [_resized(self.images, self._side)], _resized(images, self._side)
        both = joined([*stored, images])
        if both.nbytes <= pictures.HELD_BYTES:
            self.images = both[:]
        else:
            self.images = both if isinstance(images, Pictures) else joined([*stored, images.copy()])
        self.columns = np.concatenate([self.columns, columns])

    def replace(self, images: AnyImages, columns: Columns, **extras: Extra) -> None:
        """Hold copies of exactly these: the arrays are the user's."""
        self.images, self.columns = np.asarray(images).copy(), columns.copy()
        self.extras = {name: rows.copy() for name, rows in extras.items()}

    # ---- for methods and checkpoints --------------------------------------------------------------------------

    def followed_by(self, images: AnyImages) -> AnyImages:
        """The stored images, then ``images`` (at the backbone's resize size if the sizes differ)."""
        return _joined(self.images, images, self._side)

    @property
    def unread(self) -> Pictures | None:
        """The images, if they are not in memory."""
        return self.images if isinstance(self.images, Pictures) else None

    def state(self) -> dict[str, Tensor]:
        """Everything stored but :attr:`unread`, as tensors by name (not copies)."""
        images = {} if isinstance(self.images, Pictures) else {"images": torch.from_numpy(self.images)}
        extras = {f"extras.{name}": torch.from_numpy(value) for name, value in self.extras.items()}
        return {**images, "columns": torch.from_numpy(self.columns), "seen": torch.tensor(self.seen), **extras}

    def restore(self, state: dict[str, Tensor], unread: Pictures | None = None) -> None:
        """Become the memory whose :meth:`state` and :attr:`unread` these are."""
        self.images = state["images"].numpy() if unread is None else unread
        self.columns = state["columns"].numpy()
        self.seen = int(state["seen"])
        self.extras = {
            key.removeprefix("extras."): value.numpy() for key, value in state.items() if key.startswith("extras.")
        }

    def _keep(self, kept: Columns) -> None:
        if len(kept) < len(self):
            self.replace(self.images[kept], self.columns[kept], **{k: v[kept] for k, v in self.extras.items()})


class LogitReservoir:
    """DER++'s reservoir while a task is learned: images, and the logits that each got when it was seen.

    Slot -> image and slot -> logits are tensors on the device. :meth:`write` changes them in place and without waiting
    for the device, so it may be part of a step that is captured as a CUDA graph, and repeating it changes nothing.
    Shorter rows of logits (of tasks with fewer classes) are padded with zeros.
    """

    def __init__(
        self, memory: ReplayMemory, images: AnyImages, columns: Columns, sizes: Sequence[int], device: torch.device
    ):
        """``images`` (N, H, W, 3) and ``columns`` (N,) of the new task; ``sizes``: classes of each task, with it."""
        self.images = memory.followed_by(images)  # what is in the memory, then the task
        self.columns = np.concatenate([memory.columns, columns])
        self._memory, self._stored, self._count = memory, len(memory), len(columns)
        widths = np.repeat(np.cumsum(sizes), sizes)[self.columns]  # classes seen when the image's class came
        self._widths = torch.from_numpy(widths).to(device)
        # One extra slot takes images that do not enter, so that every step has the same shapes.
        self._image_of_slot = torch.zeros(memory.size + 1, dtype=torch.int64, device=device)
        self._logits = torch.zeros(memory.size + 1, sum(sizes), device=device)
        if self._stored:
            logits = torch.from_numpy(memory.extras["logits"]).to(device)
            self._image_of_slot[: self._stored] = torch.arange(self._stored, device=device)
            self._logits[: self._stored, : logits.shape[1]] = logits

    def epoch(
        self, epoch: int, batch_size: int, replay_size: int, generator: torch.Generator
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Batches of one pass over the task: indices into ``images`` (B,), the slots that these images enter (B,), and
        the slots of two draws from the reservoir (at most ``replay_size`` each).

        Each batch counts as more of the stream, so the reservoir must be written before the next one is asked for.
        """
        size, seen = self._memory.size, self._memory.seen + epoch * self._count
        order = (self._stored + torch.randperm(self._count, generator=generator)).split(batch_size)
        slots = torch.from_numpy(reservoir_slots(seen, self._count, size, generator)).split(batch_size)
        drawn: list[Tensor] = []  # does not depend on training: sent to the device at once
        for own, slot in zip(order, slots, strict=True):
            filled = min(seen, size)
            replay = [torch.randperm(filled, generator=generator)[:replay_size] for _ in range(2)]
            drawn += [own, last_of_each(slot, size), *replay]
            seen += len(own)
        sent = torch.cat(drawn).to(self._logits.device).split([len(part) for part in drawn])
        yield from zip(*[iter(sent)] * 4, strict=True)

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of ``slots`` (B,): indices into ``images`` (B,), logits (B, C) and which of their entries count (B, C)."""
        index = self._image_of_slot[slots]
        entry = torch.arange(self._logits.shape[1], device=index.device)
        return index, self._logits[slots], entry < self._widths[index][:, None]

    def write(self, index: Tensor, slots: Tensor, logits: Tensor) -> None:
        """Put the images ``index`` (B,) with their ``logits`` (B, C) into ``slots`` (B,)."""
        self._image_of_slot[slots] = index
        self._logits[slots] = logits

    def store(self, epochs: int) -> None:
        """Make the memory hold what is in the reservoir after ``epochs`` passes over the task."""
        memory = self._memory
        memory.seen += epochs * self._count
        filled = min(memory.seen, memory.size)
        kept = self._image_of_slot[:filled].cpu().numpy()
        memory.replace(self.images[kept], self.columns[kept], logits=self._logits[:filled].cpu().numpy())


def herding(features: Tensor, count: int) -> Tensor:
    """The order in which iCaRL's greedy rule picks ``count`` of ``features`` (n, D): indices (count,).

    The k-th pick is the one, among those not yet picked, that brings the mean of the picks closest to the mean mu of
    all features (Rebuffi et al. 2017, Algorithm 4): argmin_x || mu - (phi(x) + sum of earlier picks) / k ||.
    ``count`` is capped at n.
    """
    features = features.double()
    mean, total = features.mean(0), torch.zeros_like(features[0])
    left = torch.ones(len(features), dtype=torch.bool, device=features.device)
    picks = []
    for k in range(1, min(count, len(features)) + 1):
        distance = (mean - (features + total) / k).norm(dim=1).masked_fill(~left, torch.inf)
        best = distance.argmin()[None]
        left.index_fill_(0, best, False)
        total = total + features[best[0]]
        picks.append(best)
    return torch.cat(picks) if picks else torch.empty(0, dtype=torch.int64, device=features.device)


def herding_order(features: Tensor, columns: Columns, quota: int) -> Columns:
    """For :meth:`ReplayMemory.update_ranked`: ``quota`` herding picks of each class, one class after the other."""
    order = []
    for c in np.unique(columns):
        own = np.flatnonzero(columns == c)
        picks = herding(features[torch.from_numpy(own).to(features.device)], quota)
        order.append(own[picks.cpu().numpy()])
    return np.concatenate(order)


def reservoir_slots(seen: int, count: int, size: int, generator: torch.Generator) -> Columns:
    """Where reservoir sampling puts the images number seen..seen+count-1 of a stream: slot, or -1 for nowhere. (count,)

    Image i goes to slot i while there is room, then to slot j drawn from 0..i if j < size (Vitter 1985, algorithm R).
    The choice does not depend on the images, so it can be made ahead of time.
    """
    number = np.arange(seen, seen + count)
    draw = torch.rand(count, generator=generator, dtype=torch.float64).numpy()
    slot = np.where(number < size, number, np.floor(draw * (number + 1)).astype(np.int64))
    return np.where(slot < size, slot, -1)


def hypergeometric(new: int, old: int, draws: int, generator: torch.Generator) -> int:
    """How many of ``draws`` images, drawn from ``new`` and ``old`` ones without replacement, are new."""
    taken = 0
    chance = torch.rand(min(draws, new + old), generator=generator, dtype=torch.float64).tolist()
    for i, value in enumerate(chance):
        taken += value * (new + old - i) < new - taken
    return taken


def last_of_each(slots: Tensor, elsewhere: int) -> Tensor:
    """Where each image of a batch goes: of several that are sent to one slot the last stays, others go ``elsewhere``.

    ``slots``: (B,) slot of each image, -1 for none. -> (B,)
    """
    _, back = np.unique(slots.numpy()[::-1], return_index=True)
    last = torch.zeros(len(slots), dtype=torch.bool)
    last[len(slots) - 1 - torch.from_numpy(back)] = True
    return slots.where(last & (slots >= 0), elsewhere)


def _resized(images: AnyImages, side: int) -> AnyImages:
    """:func:`to_side`, for images that are not in memory when they are read."""
    if not isinstance(images, Pictures):
        return to_side(images, side)
    if images.shape[1:3] == (side, side):
        return images
    return changed(images, lambda some: to_side(some, side), (side, side, 3))


def _joined(stored: AnyImages, new: AnyImages, side: int) -> AnyImages:
    """``stored``, then ``new``; not read yet if ``new`` is not."""
    if not len(stored):
        return new
    old = np.asarray(stored)
    if old.shape[1:] != new.shape[1:]:
        old, new = to_side(old, side), to_side(np.asarray(new), side)
    return joined([old, new]) if isinstance(new, Pictures) else np.concatenate([old, new])
