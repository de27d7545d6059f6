"""Pictures that come more than once: in one class, in several classes, or again after they were taught.

A picture that comes again in its class is learned once. One that is in several classes at once is learned as none of
them: one of the labels is wrong, nobody can say which, and what was learned from one image cannot be taken back. One
that was taught before and now comes under another class stays what it was taught as, for the same reason.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from morecl.errors import few, shortened

NAMED = 3  # pictures that a note names

Name = Callable[[int], str]  # of the image at a position


@dataclass(frozen=True)
class Sorting:
    """What is to become of a lesson's images, by their positions."""

    fresh: NDArray[np.int64]  # to learn, sorted
    contradictory: list[list[int]]  # for each picture that is in several classes, its first image in each of them
    disputed: NDArray[np.int64]  # all images of these pictures, sorted
    mistaught: list[tuple[int, str]]  # images of pictures that were taught under another class, and under which
    duplicates: int  # images that are left out because the picture was seen before, or comes before in its class

    def of(self, classes: Collection[str], names: Sequence[str]) -> Sorting:
        """The same of the images of ``classes`` only; ``names``: the class of each image."""
        own = np.flatnonzero([name in classes for name in names])
        fresh, disputed = np.intersect1d(self.fresh, own), np.intersect1d(self.disputed, own)
        contradictory = [images for images in self.contradictory if any(names[i] in classes for i in images)]
        mistaught = [(i, before) for i, before in self.mistaught if names[i] in classes]
        return Sorting(fresh, contradictory, disputed, mistaught, len(own) - len(fresh) - len(disputed))

    def notes(self, names: Sequence[str], name: Name) -> list[str]:
        """What the user should know, if anything; ``names``: the class of each image."""
        return [*self.notes_of_contradictory(names, name), *self.notes_of_mistaught(names, name)]

    def notes_of_contradictory(self, names: Sequence[str], name: Name) -> list[str]:
        if not self.contradictory:
            return []
        places = [" and ".join(f"{name(i)} ({names[i]!r})" for i in images) for images in self.contradictory]
        left_out = "1 picture was" if len(places) == 1 else f"{len(places):,} pictures were"
        return [
            f"{left_out} left out, being in several classes at once: {few(places, NAMED, '; ')}. "
            "Remove the wrong files and teach the others again, on the command line with --more"
        ]

    def notes_of_mistaught(self, names: Sequence[str], name: Name) -> list[str]:
        if not self.mistaught:
            return []
        places = [f"{name(i)} (taught as {before!r}, now {names[i]!r})" for i, before in self.mistaught]
        stay = "1 image stays" if len(places) == 1 else f"{len(places):,} images stay"
        return [
            f"{stay} what the model was taught before, since it cannot unlearn one image: {few(places, NAMED, '; ')}. "
            "To correct it, undo the lesson that taught it, which also takes back later lessons, or forget the class "
            f"{shortened(sorted({before for _, before in self.mistaught}))}; then teach the images again, on the "
            "command line with --more. If it was the first lesson, teach a new model"
        ]


def sort_out(prints: NDArray[np.uint64], names: Sequence[str], taught: Mapping[int, str]) -> Sorting:
    """Decide by fingerprints (N,) and classes (N) which images are learned; ``taught``: fingerprint -> its class."""
    pictures: dict[int, dict[str, int]] = {}  # fingerprint -> class -> its first image
    for position, (print_, name) in enumerate(zip(prints.tolist(), names, strict=True)):
        pictures.setdefault(print_, {}).setdefault(name, position)
    fresh: list[int] = []
    contradictory: list[list[int]] = []
    mistaught: list[tuple[int, str]] = []
    for print_, images in pictures.items():
        if before := taught.get(print_):
            mistaught += [(position, before) for name, position in images.items() if name != before]
        elif len(images) > 1:
            contradictory.append(list(images.values()))
        else:
            fresh += images.values()
    disputed = np.flatnonzero(np.isin(prints, prints[[images[0] for images in contradictory]]))
    left_out = len(prints) - len(fresh) - len(disputed)
    return Sorting(np.sort(np.array(fresh, np.int64)), contradictory, disputed, mistaught, left_out)
