"""``state.safetensors``, read with suspicion: the header is checked before memory is taken, the values afterwards.

Images that a learner keeps but that are not in memory are written and read in chunks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from morecl import pictures
from morecl.data.pixels import FilePart
from morecl.labels import Forgotten
from morecl.methods import Learner
from morecl.pictures import Pictures

MODEL, MEMORY, EXTRAS, FORGOTTEN = "model.", "memory.", "memory.extras.", "rule.forgotten"
IMAGES = f"{MEMORY}images"
MAX_HEADER = 100_000_000  # bytes, as in safetensors
LENGTH = 8  # bytes that hold the length of the header, and of which the header's length is a multiple
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class Entry:
    """Shape and type of one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {self.shape}"


class StateFile:
    """The tensors of a saved learner. All methods raise ``ValueError`` if the content cannot be used.

    safetensors has checked that the header describes exactly the bytes of the file, so memory is bounded by the size of
    the file as long as the learner that is built for it is no larger than the header says.
    """

    def __init__(self, path: Path, leave_images: bool = False):
        """``leave_images``: too many images to be held stay in the file, and it is not mapped into memory either."""
        self.path = path
        self.entries: dict[str, Entry] = {}
        self._begin: dict[str, int] = {}  # where a tensor's bytes are, if images may stay in the file
        if leave_images and path.stat().st_size > pictures.HELD_BYTES:
            for name, (entry, begin) in read_header(path).items():
                self.entries[name], self._begin[name] = entry, begin
        else:
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 (no mapping)
                    part = file.get_slice(name)
                    self.entries[name] = Entry(tuple(part.get_shape()), _dtype(name, part.get_dtype()))
        self.room = sum(math.prod(entry.shape) for name, entry in self.entries.items() if not name.startswith(MEMORY))

    def check_room(self, classes: int, dim: int, bottleneck: int) -> None:
        """Check that a learner of ``classes`` classes can be in the file, before it is built.

        Every method keeps at least a row of ``dim`` numbers per class, and adapters of ``bottleneck`` such rows.
        """
        if classes and (classes + bottleneck) * dim > self.room:
            raise ValueError(f"{self.path.name} is too small for {classes} classes")

    def check_fits(self, learner: Learner, classes: Sequence[Hashable], task_sizes: Sequence[int]) -> None:
        """Check names, shapes and types against ``learner`` with these classes in tasks of ``task_sizes``.

        The learner, which must be new, grows task by task and never far beyond the size of the file.
        """
        learner.classes[:] = classes
        for size in task_sizes:
            learner.task_sizes.append(size)
            learner._grow(size)
            if sum(value.numel() for value in learner.model.state_dict().values()) > self.room:
                break  # something is missing, or has another shape
        expected = {f"{MODEL}{name}": Entry(tuple(v.shape), v.dtype) for name, v in learner.model.state_dict().items()}
        self._check_model(expected)
        self._check_memory(learner.memory.size)

    def unread(self) -> Pictures | None:
        """The images of the memory, left in the file, if they are too many to be held. Call it after the checks."""
        shape = self.entries[IMAGES].shape
        if not self._begin or math.prod(shape) <= pictures.HELD_BYTES:
            return None
        return Pictures(FilePart(self.path, self._begin[IMAGES], shape))

    def read(self, classes: Sequence[Hashable], images: bool = True) -> dict[str, Tensor]:
        """All tensors, or all but the memory's images, after a check of their values for a learner of these classes."""
        state = load_file(self.path) if images else self._without_images()
        for name, value in state.items():
            if value.is_floating_point() and not value.isfinite().all():
                raise ValueError(f"{name} holds NaN or infinite numbers")
        columns = state[f"{MEMORY}columns"]
        if len(columns) and not 0 <= int(columns.min()) <= int(columns.max()) < len(classes):
            raise ValueError(f"{MEMORY}columns names classes that do not exist")
        self._check_forgotten(state, classes)
        if state[f"{MEMORY}seen"] < 0:
            raise ValueError(f"{MEMORY}seen is negative")
        for name, value in state.items():
            if name.endswith(".counts") and value.numel() and not 0 <= float(value.min()) <= float(value.max()) < 2**53:
                raise ValueError(f"{name} holds numbers that count nothing")
        return state

    def _without_images(self) -> dict[str, Tensor]:
        state = {}
        with self.path.open("rb") as file:
            for name, entry in self.entries.items():
                if name != IMAGES:
                    tensor = state[name] = torch.empty(entry.shape, dtype=entry.dtype)
                    file.seek(self._begin[name])
                    if file.readinto(_bytes(tensor)) != tensor.nbytes:
                        raise ValueError(f"{name} is not complete")
        return state

    def _check_forgotten(self, state: Mapping[str, Tensor], classes: Sequence[Hashable]) -> None:
        """The classes, the memory and the rule must agree about which classes are forgotten; one must be left."""
        forgotten = torch.tensor([isinstance(label, Forgotten) for label in classes], dtype=torch.bool)
        saved = state.get(FORGOTTEN, torch.zeros_like(forgotten))
        if saved.dtype != torch.bool or not torch.equal(saved, forgotten):
            raise ValueError(f"{FORGOTTEN} does not fit the classes")
        if any(isinstance(label, Forgotten) and label.column != column for column, label in enumerate(classes)):
            raise ValueError("a forgotten class is in another place than it was")
        if len(classes) and forgotten.all():
            raise ValueError("all classes are forgotten")
        if forgotten[state[f"{MEMORY}columns"]].any():
            raise ValueError(f"{MEMORY}columns names classes that are forgotten")

    def _check_model(self, expected: Mapping[str, Entry]) -> None:
        """What has no rows before a task is learned takes no room yet; their number is checked when they are loaded."""
        found = {name for name in self.entries if name.startswith(MODEL)}
        if missing := sorted(expected.keys() - found):
            raise ValueError(f"{missing[0]} is missing; files of an older morecl may lack it")
        if extra := sorted(found - expected.keys()):
            raise ValueError(f"{extra[0]} is not part of such a learner")
        for name, entry in expected.items():
            if entry.shape[:1] == (0,):
                entry = Entry((*self.entries[name].shape[:1], *entry.shape[1:]), entry.dtype)
            self._check_entry(name, entry)

    def _check_memory(self, size: int) -> None:
        """``size``: images the memory may hold; 0 if the method sets no limit."""
        columns = self.entries.get(f"{MEMORY}columns")
        images = self.entries.get(IMAGES)
        if columns is None or images is None:
            raise ValueError("the replay memory is missing")
        count = math.prod(columns.shape)
        if size and count > size:
            raise ValueError(f"the replay memory holds {count} images; its limit is {size}")
        if len(images.shape) != 4 or min(images.shape[1:3]) < 1:
            raise ValueError(f"{IMAGES} is {images}")
        self._check_entry(IMAGES, Entry((count, *images.shape[1:3], 3), torch.uint8))
        self._check_entry(f"{MEMORY}columns", Entry((count,), torch.int64))
        self._check_entry(f"{MEMORY}seen", Entry((), torch.int64))
        for name, entry in self.entries.items():
            if name.startswith(EXTRAS):
                self._check_entry(name, Entry((count, *entry.shape[1:]), torch.float32))

    def _check_entry(self, name: str, expected: Entry) -> None:
        found = self.entries.get(name)
        if found != expected:
            raise ValueError(f"{name} is {found or 'missing'} instead of {expected}")


def write_with_images(path: Path, tensors: Mapping[str, Tensor], images: Pictures) -> None:
    """Write ``tensors``, which are contiguous, and the memory's ``images`` as safetensors would.

    The format (github.com/huggingface/safetensors): the length of the header in 8 bytes, the header in JSON, filled up
    with blanks, and the bytes of the tensors without gaps; here larger types first, so that all are aligned.
    """
    codes = {dtype: code for code, dtype in _DTYPES.items()}
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, object] = {}
    end = 0

    def describe(name: str, dtype: torch.dtype, shape: Sequence[int], size: int) -> None:
        nonlocal end
        header[name] = {"dtype": codes[dtype], "shape": list(shape), "data_offsets": [end, end + size]}
        end += size

    for name, tensor in ordered:
        describe(name, tensor.dtype, tensor.shape, tensor.nbytes)
    describe(IMAGES, torch.uint8, images.shape, images.nbytes)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(LENGTH, "little") + text)
        for _, tensor in ordered:
            file.write(_bytes(tensor))
        for part in images.chunks():
            file.write(part.data)


def read_header(path: Path) -> dict[str, tuple[Entry, int]]:
    """Shape, type and place of the first byte of every tensor in a file of safetensors, without mapping the file.

    Raises:
        ValueError: the header does not describe exactly the bytes of the file.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH), "little")
        if not 0 < length <= min(size - LENGTH, MAX_HEADER):
            raise ValueError(f"it has no header of {length} bytes")
        try:
            header = json.loads(file.read(length), object_pairs_hook=_unique)
        except RecursionError as error:
            raise ValueError("its header is nested too deeply") from error
    if not isinstance(header, dict):
        raise ValueError("its header is no object")
    found, end = {}, 0
    header.pop("__metadata__", None)
    for name, (entry, begin, stop) in sorted(
        ((name, _described(name, value)) for name, value in header.items()), key=lambda item: item[1][1:]
    ):
        if begin != end or stop - begin != math.prod(entry.shape) * entry.dtype.itemsize:
            raise ValueError(f"{name} is not where its header says")
        found[name], end = (entry, LENGTH + length + begin), stop
    if LENGTH + length + end != size:
        raise ValueError(f"its tensors end at byte {LENGTH + length + end} of {size}")
    return found


def _described(name: str, value: object) -> tuple[Entry, int, int]:
    """What a header says about a tensor: the entry, its first byte and the one after its last."""
    if not isinstance(value, dict):
        raise ValueError(f"{name} is not described")
    shape, offsets = _numbers(name, value.get("shape")), _numbers(name, value.get("data_offsets"))
    if len(offsets) != 2:
        raise ValueError(f"{name} has no place")
    return Entry(tuple(shape), _dtype(name, value.get("dtype"))), offsets[0], offsets[1]


def _numbers(name: str, value: object) -> list[int]:
    if not isinstance(value, list) or not all(type(n) is int and 0 <= n < 2**63 for n in value):
        raise ValueError(f"{name} has no shape or no place")
    return value


def _dtype(name: str, code: object) -> torch.dtype:
    if not isinstance(code, str) or code not in _DTYPES:
        raise ValueError(f"{name} has the type {code!s:.60}")
    return _DTYPES[code]


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is there twice")
    return found


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data
