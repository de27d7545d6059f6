"""The profile of a training step: what is counted, and under which name."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from rich.console import Console

import tiny
from morecl.bench import profile
from morecl.bench.profile import Kernel, ProfileSize, StepProfile
from morecl.errors import InputError
from morecl.methods.more import More
from morecl.nn.linear import torchs_own
from morecl.progress import EpochDone

SIZE = ProfileSize(images=16, settings=tiny.settings_for("more", back_update_epochs=3))


def test_every_kernel_counts_once_in_the_first_group_that_matches() -> None:
    kernels = [
        Kernel("cudnn_generated_fort_native_sdpa_sm90_flash_bprop", 7.0, 2),
        Kernel("triton_poi_fused_gelu_gelu_backward_view_3", 5.0, 1),
        Kernel("triton_poi_fused_abs_exp2_mul_where_4", 5.0, 1),
        Kernel("_mlp_backward", 6.0, 1),
        Kernel("_adapter_gradients", 4.0, 2),
        Kernel("_attend_backward", 1.0, 1),
        Kernel("_norm_backward", 1.0, 1),
        Kernel("triton_red_fused_native_layer_norm_backward_1", 3.0, 4),
        Kernel("nvjet_sm90_tst_128x64_64x9_2x1_v_bz_TNN", 20.0, 8),
        Kernel("aten::addmm", 2.0, 1),
        Kernel("Memcpy DtoD (Device -> Device)", 1.0, 1),
        Kernel("void at::native::multi_tensor_apply_kernel", 0.5, 6),
    ]
    found = {kind.name: (kind.microseconds, kind.calls) for kind in profile.grouped(kernels)}
    assert found == {
        "matrix products": (22.0, 9),
        "GELU": (10.0, 2),
        "attention": (8.0, 3),
        "products with GELU": (6.0, 1),
        "adapters": (4.0, 2),
        "norms, sums, activations": (4.0, 5),
        "copies": (1.0, 1),
        "the rest": (0.5, 6),
    }
    assert list(found)[:2] == ["matrix products", "GELU"]


@torchs_own()  # whose products have one name on every CPU
def test_the_profile_is_of_one_training_step(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    starts: list[int] = []

    class Noted(torch.profiler.profile):
        def start(self) -> None:
            starts.append(len(starts))
            super().start()

    monkeypatch.setattr(profile, "profile", Noted)
    result = profile.measure({}, SIZE, told.append)
    assert told[:2] == ["task 1 of 2", "task 2 of 2"]
    calls = {kernel.name: kernel.calls for kernel in result.kernels}
    # per block: qkv, projection, two in the MLP, two per adapter; separate queries in the last block; the head
    assert calls["aten::addmm"] == tiny.DEPTH * (4 + 4) + 2
    assert starts == [0]  # not in the back-update, which has as many epochs
    assert result.images == 8 + 8
    busy = sum(kernel.microseconds for kernel in result.groups)
    assert busy > 0 and result.step_microseconds > 0
    assert 0 < result.arithmetic_microseconds < busy
    assert result.sustained_matrix_tflops is result.sustained_step_microseconds is None  # of GPUs alone
    assert result.as_dict()["schema"] == "morecl.profile/1"
    text = io.StringIO()
    result.show(Console(file=text, width=100))
    assert "aten::addmm" in text.getvalue()
    assert "a training step of 16 images" in text.getvalue()


def test_the_number_of_epochs_is_fixed() -> None:
    with pytest.raises(InputError, match="a profile is made of 3 epochs"):
        profile.measure({"epochs": 5}, SIZE, lambda _: None)


def test_under_load_only_the_second_half_of_the_steps_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    learned: list[int] = []
    speeds = iter([100.0, 1.0, 1.0, 1.0, 400.0, 200.0, 200.0, 800.0])  # the first task's, then the second's

    def learn(self: More, images: Any, labels: Any, listen: Any) -> None:
        learned.append(self.config.epochs)
        for epoch in range(self.config.epochs):
            listen(
                EpochDone(task=len(learned) - 1, epoch=epoch + 1, epochs=4, loss=0.0, images_per_second=next(speeds))
            )

    monkeypatch.setattr(More, "learn_task", learn)
    monkeypatch.setattr(profile, "SUSTAINED_SECONDS", 3.5)
    assert profile._sustained_step({}, SIZE, epoch_seconds=1.0) == 16 / 500 / 2  # two steps; the median of 200 and 800
    assert learned == [4, 4]


def test_on_a_gpu_both_rates_are_shown() -> None:
    result = StepProfile(
        device="a GPU", precision="bfloat16", compiled=True, backbone="b", image_size=8, versions={}, settings={},
        images=16, step_microseconds=10.0, matrix_tflops=800.0, copy_gigabytes_per_second=1.0,
        arithmetic_microseconds=4.0, sustained_matrix_tflops=640.0, sustained_step_microseconds=10.0,
        groups=[Kernel("k", 1.0, 1)], kernels=[Kernel("k", 1.0, 1)],
    )  # fmt: skip
    text = io.StringIO()
    result.show(Console(file=text, width=200))
    assert (
        "steps take 10 us and products reach 640.0 TFLOP/s: 50.0 % of that rate (40.0 % of the one above)"
        in text.getvalue()
    )
