"""Random crops and mirror images: which, how often, and that training repeats and resumes with them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

import tiny
from morecl.nn.augment import AREA, RATIO, cropped, random_boxes


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_boxes_lie_in_the_image_and_have_the_distribution() -> None:
    x, y, w, h, mirror = random_boxes(20_000, 60, 80, draw()).double().unbind(1)
    assert (x - w / 2).min() > -1e-4 and (x + w / 2).max() < 80 + 1e-4
    assert (y - h / 2).min() > -1e-4 and (y + h / 2).max() < 60 + 1e-4
    assert abs(float(mirror.mean()) - 0.5) < 0.015 and set(mirror.tolist()) == {0.0, 1.0}
    whole = (w < 79.9) & (h < 59.9)  # not cut at the border
    area, ratio = (w * h / 4800)[whole], (w / h)[whole]
    assert AREA[0] <= area.min() < 0.09 and RATIO[0] - 1e-5 <= ratio.min() and ratio.max() <= RATIO[1] + 1e-5
    small = w * h / 4800 < 0.4  # never cut: uniform, and independent of the place
    assert float(small.double().mean()) == pytest.approx((0.4 - AREA[0]) / (AREA[1] - AREA[0]), abs=0.015)
    assert abs(float((w / h).log()[small].mean())) < 0.01
    left = ((x - w / 2) / (80 - w))[small]
    assert float(left.mean()) == pytest.approx(0.5, abs=0.015) and float(left.std()) == pytest.approx(
        12**-0.5, abs=0.01
    )
    assert np.corrcoef(mirror, x)[0, 1] == pytest.approx(0, abs=0.03)


def test_a_crop_is_that_of_pillow() -> None:
    """Enlarged from a smooth image: bicubic interpolation with another constant differs little."""
    rng = np.random.default_rng(0)
    small = Image.fromarray(rng.integers(0, 256, (5, 6, 3)).astype(np.uint8))
    image = small.resize((48, 40), Image.Resampling.BICUBIC)
    boxes = torch.tensor([[20.0, 18.0, 24.0, 16.0, 0.0], [20.0, 18.0, 24.0, 16.0, 1.0], [24.0, 20.0, 48.0, 40.0, 0.0]])
    tensor = torch.from_numpy(np.array(image)).permute(2, 0, 1).float().expand(3, -1, -1, -1)
    made = cropped(tensor, boxes, 32).permute(0, 2, 3, 1).numpy()
    for number, box in enumerate([(8, 10, 32, 26), (8, 10, 32, 26), (0, 0, 48, 40)]):
        expected = np.asarray(image.resize((32, 32), Image.Resampling.BICUBIC, box=box), np.float64)
        if number == 1:
            expected = expected[:, ::-1]
        assert np.abs(made[number] - expected)[2:-2, 2:-2].max() < 6
        assert np.abs(made[number] - expected).mean() < 1.5


@pytest.mark.parametrize(("height", "width"), [(80, 60), (60, 80), (50, 50)])
def test_no_box_is_larger_than_its_image(height: int, width: int) -> None:
    x, y, w, h, _ = random_boxes(5_000, height, width, draw()).unbind(1)
    assert (w <= width).all() and (h <= height).all() and w.max() > width - 1 and h.max() > height - 1
    assert (x - w / 2).min() > -1e-4 and (x + w / 2).max() < width + 1e-4
    assert (y - h / 2).min() > -1e-4 and (y + h / 2).max() < height + 1e-4


def test_interpolation_is_bicubic_and_stays_within_what_pixels_can_be() -> None:
    """The whole image, against torch's resizing; black and white noise overshoots."""
    images = torch.randint(0, 2, (2, 3, 12, 9), generator=draw()).float() * 255
    whole = torch.tensor([[4.5, 6.0, 9.0, 12.0, 0.0]] * 2)
    expected = torch.nn.functional.interpolate(images, (32, 32), mode="bicubic", align_corners=False)
    assert expected.min() < -10 and expected.max() > 265
    torch.testing.assert_close(cropped(images, whole, 32), expected.clamp(0, 255), rtol=0, atol=0.01)


def test_tokens_are_those_of_random_crops_and_others_stay() -> None:
    learner, images = tiny.create("ncm"), tiny.pictures(0, 12)
    tokens = learner.prepare(images)
    index = torch.tensor([3, 0, 11, 3])
    shown = tokens.augmented(draw())
    first, second = shown[index], shown[index]
    assert not torch.equal(first, tokens[index]) and not torch.equal(first, second)
    assert not torch.equal(first[0], first[3]), "the same image, cropped otherwise"
    expected = learner.network.prefix(learner.preprocess.augmented(torch.from_numpy(images)[index], draw()))
    assert torch.equal(tokens.augmented(draw())[index], expected)
    torch.testing.assert_close(shown.range(2, 5), tokens.range(2, 5), rtol=1e-5, atol=1e-6)
    assert tokens.cache is not None and torch.equal(tokens[index], tokens.cache[index])


def lesson(method: str, **settings: object) -> dict[str, object]:
    learner = tiny.create(method, **settings)
    for k in range(2):
        learner.learn_task(*tiny.task([2 * k, 2 * k + 1], [f"a{k}", f"b{k}"], 5))
    return tiny.snapshot(learner)


@pytest.mark.parametrize("method", ["agem", "derpp", "finetune", "hal", "hat", "more", "pass"])
def test_training_with_it_is_other_training_that_repeats(method: str) -> None:
    plain, one, other = lesson(method), lesson(method, augment=True), lesson(method, augment=True)
    assert not tiny.is_same(plain, one)
    tiny.assert_same(one, other)
    if "memory.images" in one["state"]:  # type: ignore[operator]
        stored = [state["state"]["memory.images"] for state in (plain, one)]  # type: ignore[index]
        assert np.array_equal(*stored), "the memory keeps plain images"


def test_a_run_with_it_resumes_exactly() -> None:
    assert tiny.resumes(lambda: tiny.create("more", augment=True))


def test_epochs_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every epoch shows other crops of the task and of the memory."""
    learner = tiny.create("more", augment=True, epochs=3)
    drawn: list[bytes] = []
    real = learner.preprocess.augmented

    def watched(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        drawn.append(generator.get_state().numpy().tobytes())
        return real(images, generator)

    monkeypatch.setattr(learner.preprocess, "augmented", watched)
    for k in range(2):
        learner.learn_task(*tiny.task([2 * k, 2 * k + 1], [f"a{k}", f"b{k}"], 4))
    assert len(drawn) == 3 + 2 * 3 and len(set(drawn)) == len(drawn)


def test_where_nothing_is_trained_it_is_refused() -> None:
    config = type(tiny.create("ncm").config)
    assert "augment" not in config.choose({"augment": True})
    assert "augment" in config.choose({"augment": True, "freeze_backbone": False})
