"""The exported file answers as the learner does, holds each weight once, and is never half-written."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer

import morecl
import tiny
from morecl import export as exporting
from morecl.catalogue import SHIPPED
from morecl.errors import InputError
from morecl.export import LOWEST, export
from morecl.methods.more import MoreRule
from morecl.methods.more_rule import Heads

SIDE, RESIZE = 16, 17  # of the small backbone
SIZES = [1, 2, 3, 2, 1, 2, 2, 3, 1, 2]  # classes of each task; MORE-RP's classifier moves to the second network
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "predict_onnx.py"


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two blocks of 64 dimensions: PyTorch exports them in a few seconds."""
    torch.manual_seed(0)
    vit = VisionTransformer(img_size=SIDE, patch_size=4, embed_dim=64, depth=2, num_heads=1, num_classes=0)
    for block in vit.blocks:
        torch.nn.init.normal_(block.attn.proj.weight, std=0.2)
        torch.nn.init.normal_(block.mlp.fc2.weight, std=0.2)
    path = tmp_path_factory.mktemp("backbone") / "small.safetensors"
    save_file(vit.state_dict(), path)
    return str(path)


def pictures(kind: int, count: int, draw: int = 0) -> tiny.Images:
    return tiny.pictures(kind, count, draw=draw, side=RESIZE)


def teach(learner: Any, sizes: list[int]) -> Any:
    for size in sizes:
        first = len(learner.classes)
        images = np.concatenate([pictures(kind, 6) for kind in range(first, first + size)])
        learner.learn_task(images, [f"kind {first + i // 6}" for i in range(6 * size)])
    return learner


def taught(method: str, tasks: int, backbone: str, **settings: Any) -> Any:
    small = {"image_size": None, "backbone": backbone, "epochs": 3, "bottleneck": 16, "lr": 0.05, "memory_size": 30}
    return teach(tiny.create(method, **small | settings), SIZES[:tasks])


def test_images(classes: int) -> tiny.Images:
    """Of every class, of kinds that were not learned, and noise: (n, RESIZE, RESIZE, 3)."""
    noise = np.random.default_rng(5).integers(0, 256, (10, RESIZE, RESIZE, 3), np.uint8)
    return np.concatenate([*(pictures(kind, 3, draw=1) for kind in range(classes + 3)), noise])


test_images.__test__ = False  # type: ignore[attr-defined]


def run(path: Path, images: tiny.Images) -> dict[str, Any]:
    """The file's answers on images of which the network sees the part that the learner's centre crop keeps."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    side = session.get_inputs()[0].shape[1]
    answers = session.run(None, {"images": images[:, :side, :side]})  # 17 to 16: the crop starts at round(0.5) = 0
    return dict(zip([output.name for output in session.get_outputs()], answers, strict=True))


def assert_same_answers(learner: Any, path: Path, images: tiny.Images) -> dict[str, Any]:
    answers, wanted, prediction = run(path, images), learner.scores(images), learner.predict(images)
    assert [learner.classes[column] for column in answers["label"]] == prediction.labels
    left = wanted > LOWEST / 2  # classes that were not forgotten
    assert np.array_equal(answers["scores"] > LOWEST / 2, left)
    scale = np.abs(wanted[left]).max()
    assert np.abs(answers["scores"] - wanted)[left].max() < 1e-3 * scale
    assert np.abs(answers["ood_score"] - prediction.ood_score).max() < 1e-3 * np.abs(prediction.ood_score).max()
    assert answers["scores"].dtype == answers["ood_score"].dtype == answers["confidence"].dtype == np.float32
    assert answers["label"].dtype == np.int64
    return answers


@pytest.fixture(scope="module", params=["more", "morerp"])
def exported(request: pytest.FixtureRequest, backbone: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A learner after ten tasks, and its file."""
    learner = taught(request.param, 10, backbone)
    path = tmp_path_factory.mktemp("exported") / "model.onnx"
    threshold = float(np.median(learner.predict(test_images(len(learner.classes))).ood_score))
    export(learner, path, threshold=threshold, temperature=2.5)
    return learner, path, threshold


def test_answers_after_ten_tasks(exported: Any) -> None:
    learner, path, threshold = exported
    images = test_images(len(learner.classes))
    answers = assert_same_answers(learner, path, images)
    assert len(set(answers["label"].tolist())) > 5  # or equal labels say little
    scores = learner.scores(images) / 2.5
    e = np.exp(scores - scores.max(1, keepdims=True))
    assert np.allclose(answers["confidence"], (e / e.sum(1, keepdims=True)).max(1), atol=1e-4)
    ood = learner.predict(images).ood_score
    clear = np.abs(ood - threshold) > 1e-4
    assert np.array_equal(answers["unknown"][clear], (ood > threshold)[clear])
    assert 0 < answers["unknown"].sum() < len(images)
    assert answers["unknown"].dtype == np.bool_
    if learner.name == "morerp":
        assert int(learner.rule.source) == 1
        assert learner.rule.asked < len(learner.task_sizes)


@pytest.mark.parametrize("count", [1, 3, 17])
def test_any_number_of_images(exported: Any, count: int) -> None:
    learner, path, _ = exported
    images = test_images(len(learner.classes))[-count:]
    assert len(assert_same_answers(learner, path, images)["label"]) == count


@pytest.mark.parametrize(("method", "tasks"), [("more", 1), ("morerp", 3)])
def test_answers_after_few_tasks(method: str, tasks: int, backbone: str, tmp_path: Path) -> None:
    learner = taught(method, tasks, backbone)
    export(learner, tmp_path / "model.onnx")
    answers = assert_same_answers(learner, tmp_path / "model.onnx", test_images(len(learner.classes)))
    assert answers.keys() == {"scores", "label", "confidence", "ood_score"}


def test_more_after_three_tasks_with_a_trained_backbone_in_half_precision(backbone: str, tmp_path: Path) -> None:
    """The file computes in float32 with the weights that the backbone has become; the learner stays as it is."""
    learner = taught("more", 3, backbone, freeze_backbone=False, precision="bf16", coefficient=False)
    before = tiny.snapshot(learner)
    export(learner, tmp_path / "model.onnx")
    tiny.assert_same(tiny.snapshot(learner), before)
    config = learner.config.model_copy(update={"precision": "fp32"})
    full = type(learner)(config, learner.backbone)
    full.restore(learner.classes, learner.task_sizes, learner.state())
    assert not torch.equal(full.body.state_dict()["pos_embed"], full.network.vit.pos_embed)
    assert_same_answers(full, tmp_path / "model.onnx", test_images(len(learner.classes)))


def test_morerp_after_one_task_on_the_shipped_backbone(tmp_path: Path) -> None:
    learner = tiny.create("morerp", image_size=16, backbone=SHIPPED)
    learner.learn_task(*tiny.task([97, 98, 99], ["a", "b", "c"], 6))
    export(learner, tmp_path / "model.onnx")
    images = np.concatenate([tiny.pictures(kind, 4, draw=1, side=16) for kind in (97, 98, 99, 5)])
    assert_same_answers(learner, tmp_path / "model.onnx", images)


# ---- what is in the file --------------------------------------------------------------------------------------


def test_metadata(exported: Any, backbone: str) -> None:
    learner, path, threshold = exported
    session = onnxruntime.InferenceSession(path)
    about = json.loads(session.get_modelmeta().custom_metadata_map["morecl"])
    assert about == {
        "format": "morecl.onnx/1",
        "morecl": morecl.__version__,
        "method": learner.name,
        "backbone": "small.safetensors",
        "classes": [f"kind {i}" for i in range(sum(SIZES))],
        "task_of_class": [k for k, size in enumerate(SIZES) for _ in range(size)],
        "image_size": SIDE,
        "resize": {"shorter_side": RESIZE, "filter": "bicubic", "then": "centre crop"},
        "threshold": threshold,
        "temperature": 2.5,
    }


def test_weights_are_in_the_file_once(exported: Any) -> None:
    learner, path, _ = exported
    content = path.read_bytes()
    for name, value in learner.backbone.state.items():
        if name.endswith("weight") and "norm" not in name and value.numel() > 1000:
            found = sum(content.count(np.ascontiguousarray(v).tobytes()) for v in (value.numpy(), value.numpy().T))
            assert found == 1, name
    own = 4 * sum(value.numel() for value in learner.backbone.state.values())
    dim, tasks, classes = 64, len(SIZES), sum(SIZES)
    networks = 4 * tasks * 2 * 2 * (2 * 16 * dim + 16 + dim) + 4 * tasks * 2 * 5 * dim  # adapters, norms
    heads = 8 * tasks * (dim * dim + 2 * (max(SIZES) + 1) * dim)  # precision, means, head
    kept = len(learner.rule.ridge) if learner.name == "morerp" else 0
    ridge = kept * (2 * 2 * dim + 4 * classes)  # features in half precision, a number per class
    assert len(content) < own + networks + heads + ridge + 250_000  # the graph itself


def test_nothing_of_this_machine_is_in_the_file(exported: Any) -> None:
    _, path, _ = exported
    content = path.read_bytes()
    assert b".py" not in content
    assert str(Path.home()).encode() not in content
    onnx.checker.check_model(onnx.load(path), full_check=True)


def test_the_example_answers_as_the_learner(exported: Any, tmp_path: Path) -> None:
    """On photos larger than the network's input, without morecl and torch."""
    learner, path, threshold = exported
    files = []
    for kind in range(4):
        large = Image.fromarray(pictures(kind, 1, draw=2)[0]).resize((60 + kind, 41), Image.Resampling.NEAREST)
        files.append(str(tmp_path / f"{kind}.png"))
        large.save(files[-1])
    guard = "import sys; sys.modules['torch'] = sys.modules['morecl'] = None; sys.argv[:] = sys.argv[1:]; "
    code = f"{guard}import runpy; runpy.run_path(sys.argv[0], run_name='__main__')"
    (tmp_path / "bad.png").write_bytes(b"bad")
    bad = [str(tmp_path / "bad.png")]
    for given, code_of_exit, told in ((files, 0, 0), (bad * 40, 1, 40), ([files[0], *bad, *files[1:]], 1, 1)):
        command = [sys.executable, "-c", code, str(EXAMPLE), str(path), *given]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100)
        assert (done.returncode, done.stderr.count(f"not readable: {bad[0]}: ")) == (code_of_exit, told), done.stderr
        assert len(done.stdout.splitlines()) == len(given) - told and "Traceback" not in done.stderr
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    wanted = learner.predict(files)
    names = ["unknown" if s > threshold else n for s, n in zip(wanted.ood_score, wanted.labels, strict=True)]
    assert [line[:2] for line in lines] == [[file, name] for file, name in zip(files, names, strict=True)]
    assert np.allclose([float(line[3]) for line in lines], wanted.ood_score, atol=2e-3)


# ---- forgotten classes ----------------------------------------------------------------------------------------


def test_forgotten_classes_never_win(exported: Any) -> None:
    learner, _, _ = exported
    graph = exporting._Graph(learner, None, 1.0)
    images = torch.from_numpy(test_images(len(learner.classes))[:, :SIDE, :SIDE].copy())
    with torch.no_grad():
        before = graph(images)
        gone = before["label"].mode().values
        had = getattr(learner.rule, "forgotten", None)
        learner.rule.forgotten = torch.arange(len(learner.classes)) == gone
        try:
            after = graph(images)
        finally:
            learner.rule.forgotten = had
    assert (after["label"] != gone).all()
    assert (after["scores"][:, gone] == torch.finfo(torch.float32).min).all()
    assert after["scores"].isfinite().all()
    if type(learner.rule) is MoreRule:
        others = torch.arange(len(learner.classes)) != gone
        assert torch.equal(after["scores"][:, others], before["scores"][:, others])
        assert torch.equal(after["ood_score"], -before["scores"][:, others].amax(1))


# ---- refusals -------------------------------------------------------------------------------------------------


def test_other_methods_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'ncm' cannot be exported to ONNX; 'more' and 'morerp' can"):
        export(tiny.create("ncm"), tmp_path / "model.onnx")
    with pytest.raises(InputError, match="nothing has been learned yet"):
        export(tiny.create("more"), tmp_path / "model.onnx")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": float("nan")}, "threshold must be a finite number or None, not nan"),
        ({"threshold": "0.5"}, "threshold must be a finite number or None, not '0.5'"),
        ({"temperature": 0}, "temperature must be a finite number above 0, not 0"),
        ({"temperature": float("inf")}, "temperature must be a finite number above 0, not inf"),
        ({"temperature": None}, "temperature must be a finite number above 0, not None"),
    ],
)
def test_numbers_are_checked(exported: Any, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        export(exported[0], tmp_path / "model.onnx", **options)


def test_paths_are_checked(exported: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"is a folder; give the name of a file, such as .*model.onnx"):
        export(exported[0], tmp_path)
    with pytest.raises(InputError, match=r"there is no folder .*missing; make it first"):
        export(exported[0], tmp_path / "missing" / "model.onnx")
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"there is no folder .*file; make it first"):
        export(exported[0], tmp_path / "file" / "model.onnx")


@pytest.mark.parametrize("package", ["onnx", "onnxruntime", "onnxscript"])
def test_missing_packages_are_named(
    exported: Any, tmp_path: Path, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InputError, match=rf"\({package}\): pip install 'morecl\[export\]'"):
        export(exported[0], tmp_path / "model.onnx")


@pytest.mark.parametrize(("own", "seen"), [(None, "1"), ("0", "0")])
def test_onnxruntime_reports_to_nobody_unless_the_user_wants_it(
    own: str | None, seen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads the setting when it is imported."""
    name = "ORT_DISABLE_TELEMETRY"
    (tmp_path / "onnxruntime.py").write_text(f"import os\nSEEN = os.environ.get({name!r})\n")
    monkeypatch.syspath_prepend(tmp_path)
    for load in (exporting._import_packages, lambda: runpy.run_path(str(EXAMPLE))["onnxruntime"]):
        monkeypatch.setenv(name, own or "")
        if own is None:
            del os.environ[name]
        monkeypatch.delitem(sys.modules, "onnxruntime")
        assert seen == load().SEEN


def test_a_file_that_would_be_too_large_is_refused(
    exported: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "LARGEST", 1000)
    with pytest.raises(InputError, match="larger than the 2 GiB that one ONNX file can hold"):
        export(exported[0], tmp_path / "model.onnx")


def test_a_file_that_answers_differently_is_not_kept(
    exported: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, path, _ = exported
    model = onnx.load(path)
    del model.metadata_props[:]
    with torch.no_grad():
        heads = Heads.of(learner.tasks, range(len(learner.tasks)))
    (precision,) = [i for i in model.graph.initializer if i.raw_data == heads.precision.numpy().tobytes()]
    precision.raw_data = (2 * heads.precision).numpy().tobytes()
    monkeypatch.setattr(exporting, "_to_onnx", lambda graph: model)
    target = tmp_path / "model.onnx"
    target.write_text("old")
    with pytest.raises(RuntimeError, match="would not answer as the learner does: image 0: scores differs by"):
        export(learner, target)
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("name", ["scores", "ood_score", "label"])
def test_each_difference_is_noticed(exported: Any, name: str) -> None:
    learner, path, _ = exported
    images = exporting._random_images(SIDE)
    padded = np.pad(images, ((0, 0), (0, 1), (0, 1), (0, 0)))  # the last row and column are cropped
    answers = run(path, padded)
    assert exporting.difference(learner, images, answers) is None
    if name == "label":
        answers["label"][2] = answers["scores"][2].argsort()[-2]
    else:
        answers[name][2] *= 1.01
    assert f"image 2: {name} differs by" in str(exporting.difference(learner, images, answers))
    answers[name] = np.full_like(answers[name], np.nan) if name != "label" else answers["label"]
    assert exporting.difference(learner, images, answers)
