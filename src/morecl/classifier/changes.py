"""Small changes of a saved model, as the commands and the server make them: saved as a version, and put into words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from morecl.classifier import conformal
from morecl.classifier.names import look_alikes
from morecl.labels import composed

if TYPE_CHECKING:  # these import torch
    from morecl.classifier.core import Classifier
    from morecl.classifier.store import ModelFolder


def rename(folder: ModelFolder, classifier: Classifier, old: str, new: str) -> str:
    """Give a class another name; what to tell the user. The caller has loaded ``classifier`` and keeps others away."""
    classifier.rename(old, new)
    others = [name for name in classifier.classes if name != composed(new)]
    number = folder.commit(classifier, "rename", f"{old!r} to {new!r}")
    alike = [f"; {new!r} and {other!r} look alike" for _, other in look_alikes([new], others)]
    return f"{old!r} is now {new!r}: version {number}{''.join(alike)}"


def forget(folder: ModelFolder, classifier: Classifier, name: str) -> str:
    """Forget a class, and remove all older versions; otherwise as :func:`rename`.

    The scores of the other classes stay. The threshold for "unknown" is set anew, from fewer held-back images.
    """
    removed = to_be_removed(folder)
    classifier.forget(name)
    number = folder.commit(classifier, "forget", "a class", purge=True)  # its name leaves the folder
    return f"{name!r} is forgotten: version {number}; {removed} removed"


def to_be_removed(folder: ModelFolder) -> str:
    """``2 older versions``: those that forgetting a class removes, because they hold it."""
    count = len(folder.versions())
    return f"{count} older version{'' if count == 1 else 's'}"


def end_of_unknown(classifier: Classifier, name: str) -> str:
    """A warning for who is about to forget this class, if nothing can be called unknown without it; else ``""``."""
    held = classifier.held.columns
    left = int((held != classifier.column(name)).sum())
    if conformal.suffice(left) or not conformal.suffice(len(held)):
        return ""
    return f"without {name!r} too few images are held back ({left}), so nothing will be called unknown"
