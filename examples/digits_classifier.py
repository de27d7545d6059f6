"""Learn handwritten digits in two lessons, ask about others, then teach those as well. Takes a minute on a CPU.

python examples/digits_classifier.py
"""

from __future__ import annotations

import argparse

import numpy as np
from sklearn.datasets import load_digits

import morecl

parser = argparse.ArgumentParser()
parser.add_argument("--minutes", type=float, default=0.3, help="of training per lesson")
minutes = parser.parse_args().minutes

digits = load_digits()
order = np.random.default_rng(0).permutation(len(digits.target))
images = (digits.images[order] * 255 / 16).astype(np.uint8)  # (N, 8, 8)
labels = digits.target[order].astype(str)


def photos(names: str, start: int, stop: int) -> tuple[list[np.ndarray], list[str]]:
    """Number ``start`` to ``stop`` of each digit in ``names``."""
    chosen = np.concatenate([np.flatnonzero(labels == name)[start:stop] for name in names])
    return list(images[chosen]), labels[chosen].tolist()


# "auto" would take a larger ViT, which photos need; for digits the one that comes with morecl is enough.
classifier = morecl.Classifier.create(backbone="vit_mini_patch4_32", image_size=16, device="cpu")
for names in ("012", "34"):
    lesson = classifier.learn(*photos(names, 0, 50), minutes=minutes)
    print(f"learned {', '.join(lesson.classes)}: {lesson.accuracy:.0f} % right on {lesson.held_back} held-back images")

promise = classifier.promise()
if promise.share is not None:
    print(f"of new images of these classes at most {promise.share:.0%} are called unknown")

test = photos("0123456789", 100, 120)
found = classifier.evaluate(*test)
print(f"0 to 4: {found.accuracy:.0f} % right; 5 to 9, never taught: {found.unknown_rejected:.0f} % called unknown")

classifier.learn(*photos("56789", 0, 50), minutes=minutes)
print(f"all ten digits: {classifier.evaluate(*test).accuracy_forced:.0f} % right")

for answer in classifier.predict(test[0][::40]):
    print(answer.label or "unknown", [f"{choice.label} {choice.confidence:.0%}" for choice in answer.top[:2]])

# classifier.save("model") keeps it; `morecl predict model photos/` and morecl.Classifier.open("model") use it.
