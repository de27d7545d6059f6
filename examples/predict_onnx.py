"""Classify images with an exported learner. Needs numpy, Pillow and onnxruntime; neither morecl nor PyTorch.

    python examples/predict_onnx.py model.onnx photo.jpg another.png

Prints one line per image: file, label or "unknown", confidence, OOD score (higher = less known). A file that cannot be
read is one line on stderr, and the exit code is then 1.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import numpy as np
from PIL import Image, ImageOps

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # or onnxruntime reports to Microsoft; a user's setting wins
import onnxruntime  # reads it when it is imported

BATCH = 32  # images at once; memory grows with this number times the number of tasks
STRIP = 32  # of an image longer than this many times its width, only the middle is used
BEHIND = (128, 128, 128, 255)  # what is seen through transparent parts


def prepare(path: str, size: int, shorter_side: int) -> np.ndarray:
    """The image as the network wants it: shorter side scaled to ``shorter_side``, centre cut out. (size, size, 3)"""
    with Image.open(path) as file:
        image = ImageOps.exif_transpose(file)
        if image.mode == "F" or image.mode.startswith("I"):
            raise ValueError(f"mode {image.mode}: only 8 bits per channel are supported")
        if image.has_transparency_data:
            above = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", above.size, BEHIND), above)
        image = image.convert("RGB")
    longest = STRIP * min(image.size)
    image = centre(image, min(image.width, longest), min(image.height, longest))
    short = min(image.size)
    scaled = (shorter_side * image.width // short, shorter_side * image.height // short)
    image = centre(image.resize(scaled, Image.Resampling.BICUBIC), shorter_side, shorter_side)
    first = round((shorter_side - size) / 2)
    return np.asarray(image)[first : first + size, first : first + size]


def centre(image: Image.Image, width: int, height: int) -> Image.Image:
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))


def readable(paths: list[str], size: int, shorter_side: int) -> list[tuple[str, np.ndarray]]:
    """Path and image of those that can be read; the others are named."""
    images = []
    for path in paths:
        try:
            images.append((path, prepare(path, size, shorter_side)))
        except Exception as error:  # Pillow's decoders raise almost anything on a damaged file
            print(f"not readable: {path}: {error}", file=sys.stderr)
    return images


def main(model: str, paths: list[str]) -> int:
    """Answer all images; the exit code."""
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    about: dict[str, Any] = json.loads(session.get_modelmeta().custom_metadata_map["morecl"])
    names = [output.name for output in session.get_outputs()]
    answered = 0
    for start in range(0, len(paths), BATCH):
        some = readable(paths[start : start + BATCH], about["image_size"], about["resize"]["shorter_side"])
        answered += len(some)
        if not some:
            continue
        images = np.stack([image for _, image in some])
        answer = dict(zip(names, session.run(None, {"images": images}), strict=True))
        unknown = answer.get("unknown", np.zeros(len(some), bool))
        for i, (path, _) in enumerate(some):
            label = "unknown" if unknown[i] else about["classes"][answer["label"][i]]
            print(f"{path}\t{label}\t{answer['confidence'][i]:.3f}\t{answer['ood_score'][i]:.3f}")
    return 0 if answered == len(paths) else 1


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("usage: python predict_onnx.py MODEL.onnx IMAGE...")
    sys.exit(main(sys.argv[1], sys.argv[2:]))
