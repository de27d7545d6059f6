"""Every family of ViTs: timm's features until something is learned, and all that learners rely on afterwards."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

import morecl
import tiny
from family_members import MEMBERS
from morecl.methods.more import More
from morecl.nn import fused
from morecl.nn import network as network_module
from morecl.nn.adapter import AdapterWeights
from morecl.nn.backbone import fingerprint, load_backbone
from morecl.nn.families import FAMILIES, ViT, family_of
from morecl.nn.network import AdaptedViT, Norms

every_member = pytest.mark.parametrize("name", MEMBERS)


@functools.cache
def vit_of(name: str, size: int | None = None) -> ViT:
    return load_backbone(name, image_size=size, pretrained=False).vit


def pictures(size: int = 16, count: int = 3) -> Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(0))


def timms_features(vit: ViT, x: Tensor) -> Tensor:
    with torch.no_grad():
        return vit.forward_head(vit.forward_features(x), pre_logits=True)


def busy(network: AdaptedViT, seed: int = 1) -> tuple[Norms, AdapterWeights]:
    """Norms and adapters of a task that has learned something."""
    draw = torch.Generator().manual_seed(seed)
    norms, adapters = network.new_norms(), network.new_adapters(4)
    with torch.no_grad():
        for parameter in norms.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=draw))
        for parameter in adapters.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=draw))
        adapters.b1.add_(1.0)  # so that ReLU closes few neurons
    return norms, adapters.weights()


@functools.cache
def taught(name: str, **changes: Any) -> tuple[More, Tensor]:
    """A learner of two tasks, and the features of the first one's network before the second was learned."""
    learner = tiny.create("more", **{"image_size": None, "backbone": name, "pretrained": False} | changes)
    assert isinstance(learner, More)
    learner.learn_task(*tiny.task([0, 1], [0, 1], 8))
    before = learner.embed(learner.prepare(TEST), "0").clone()
    learner.learn_task(*tiny.task([2, 3], [2, 3], 8, draw=1))
    return learner, before


TEST = np.concatenate([tiny.pictures(kind, 3, draw=2) for kind in range(4)])


def test_every_family_has_a_member() -> None:
    assert {type(family_of(vit_of(name))) for name in MEMBERS} == {type(family) for family in FAMILIES}


@every_member
@pytest.mark.parametrize("size", [16, 24])
def test_features_are_timms_until_something_is_learned(name: str, size: int) -> None:
    vit, x = vit_of(name, size), pictures(size)
    expected = timms_features(vit, x)
    before = fingerprint(vit.state_dict())
    network = AdaptedViT(vit)
    fresh = network.new_adapters(4)
    fresh.initialise(torch.Generator().manual_seed(0))
    with torch.no_grad():
        tokens = network.prefix(x)
        assert tokens.nbytes == len(x) * network.prefix_bytes
        for norms, adapters in ((None, None), (network.new_norms(), fresh.weights())):
            torch.testing.assert_close(network.trunk(tokens, norms, adapters), expected, rtol=1e-5, atol=1e-5)
        network.trunk(tokens, *busy(network))
    assert torch.equal(timms_features(vit, x), expected) and fingerprint(vit.state_dict()) == before
    assert float(expected.std(0).min()) > 1e-3  # the pictures differ


@every_member
def test_adapters_end_each_branch_and_a_task_owns_the_norms(name: str) -> None:
    """In float64, against timm's own network with the task's norms in it and its branches changed by hooks."""
    dtype = torch.float32 if name == "tiny_rope_mixed" else torch.float64  # timm computes learned angles in float32
    reference = copy.deepcopy(vit_of(name)).to(dtype)
    network = AdaptedViT(copy.deepcopy(reference), dtype)
    norms, adapters = busy(network)
    x = pictures().to(dtype)
    places = [(block, branch) for block in reference.blocks for branch in (1, 2)]

    def adapt(place: int, module: Any, inputs: Any, h: Tensor) -> Tensor:
        w1, b1, w2, b2 = (part[place].to(dtype) for part in adapters)
        return h + torch.relu(h @ w1.T + b1) @ w2.T + b2

    with torch.no_grad():
        for place, (block, branch) in enumerate(places):
            getattr(block, f"norm{branch}").weight.copy_(norms.weight[place])
            getattr(block, f"norm{branch}").bias.copy_(norms.bias[place])
            getattr(block, f"drop_path{branch}").register_forward_hook(functools.partial(adapt, place))
        last = reference.fc_norm if isinstance(reference.fc_norm, torch.nn.LayerNorm) else reference.norm
        last.weight.copy_(norms.weight[-1])
        last.bias.copy_(norms.bias[-1])
        features = network.trunk(network.stem(x), norms, adapters)
    tolerance = 1e-6 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(features.to(dtype), timms_features(reference, x), rtol=tolerance, atol=tolerance)
    plain = timms_features(vit_of(name), pictures())
    assert float((features - plain).abs().max()) > 0.1


@pytest.mark.parametrize("name", ["tiny_dinov3", "tiny_rope_mixed"])
def test_the_stem_makes_no_rotary_positions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would come from the CPU, which a CUDA graph forbids, and nothing there reads them."""
    vit = vit_of(name)
    network = AdaptedViT(vit, torch.float32)
    monkeypatch.setattr(vit.rope, "get_embed", lambda *args, **kwargs: pytest.fail("made for nothing"))
    with torch.no_grad():
        network.stem(pictures())
    assert vit.rope is not None


@every_member
def test_every_norm_and_adapter_matters(name: str) -> None:
    network = AdaptedViT(vit_of(name))
    norms, adapters = busy(network)
    parts = [norms.weight, norms.bias, *adapters]
    features = network.trunk(network.stem(pictures()), norms, adapters)
    for gradient in torch.autograd.grad(features.square().sum() + features.sum(), parts):
        assert (gradient.flatten(1).abs().amax(1) > 0).all()


@every_member
def test_patches_are_the_mean_before_the_last_block(name: str) -> None:
    vit = vit_of(name)
    network = AdaptedViT(vit)
    seen: list[Tensor] = []
    handle = vit.blocks[-1].register_forward_pre_hook(lambda block, inputs: seen.append(inputs[0]))
    x = pictures()
    expected = timms_features(vit, x)
    handle.remove()
    mean = seen[0][:, vit.num_prefix_tokens :].mean(1)
    scaled = (mean - mean.mean(1, keepdim=True)) / mean.var(1, unbiased=False, keepdim=True).add(1e-5).sqrt()
    with torch.no_grad():
        both = network.trunk(network.prefix(x), patches=True)
    assert both.shape == (3, 2 * network.dim) and seen[0].shape[1] - vit.num_prefix_tokens == 16
    torch.testing.assert_close(both, torch.cat([expected, scaled], 1), rtol=1e-4, atol=1e-4)


@every_member
def test_a_body_is_the_backbone_until_it_is_trained(name: str) -> None:
    vit, x = vit_of(name), pictures()
    network = AdaptedViT(vit, frozen=False)
    body, norms = network.new_body(), network.new_norms()
    features = network.trunk(x, norms, body=body)
    torch.testing.assert_close(features, timms_features(vit, x), rtol=1e-5, atol=1e-5)
    trained = sum(p.numel() for part in (body, norms) for p in part.parameters())
    assert trained == sum(p.numel() for p in vit.parameters())  # all of it, nothing twice
    features.square().sum().backward()
    for key, parameter in body.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, key


@every_member
def test_half_precision(name: str) -> None:
    """Blocks and pooling compute in bfloat16; features of a frozen backbone and of an untrained body are the same."""
    vit, x = vit_of(name), pictures()
    frozen, trained = (AdaptedViT(vit, torch.bfloat16, frozen=frozen) for frozen in (True, False))
    with torch.no_grad():
        tokens = frozen.prefix(x)
        features = frozen.trunk(tokens)
        assert torch.equal(features, trained.trunk(x, body=trained.new_body()))
    assert tokens.dtype == torch.bfloat16 and features.dtype == torch.float32
    expected = timms_features(vit, x)
    assert float((features - expected).abs().max() / expected.abs().max()) < 0.05


@pytest.mark.parametrize("name", ["tiny_dinov3", "tiny_rope_mixed", "tiny_beit"])  # positions in blocks
def test_compiled_blocks_compute_the_same_in_one_graph(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    traced = network_module._compiled_block("aot_eager")
    monkeypatch.setattr(network_module, "_compiled_block", lambda: traced)
    network = AdaptedViT(vit_of(name))
    norms, adapters = busy(network)
    tokens = network.stem(pictures())
    results = []
    for compiled in (False, True):
        features = network.trunk(tokens, norms, adapters, compiled=compiled)
        results.append([features, *torch.autograd.grad(features.square().sum(), [norms.weight, *adapters])])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@every_member
def test_kernels_and_short_cuts_are_for_the_class_token_of_plain_blocks(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    vit = vit_of(name)
    plain = type(vit) is VisionTransformer
    assert plain or not any(fused.supports_block(block) for block in vit.blocks)
    monkeypatch.setattr(fused, "supports_block", lambda block: True)
    network = AdaptedViT(vit, torch.bfloat16, kernels=True)
    assert network._fused == (network._last_block is not None) == (plain and vit.global_pool == "token")


@every_member
def test_a_finished_task_never_changes(name: str) -> None:
    """Bit for bit, though the second task has trained the same adapters."""
    learner, before = taught(name)
    assert torch.equal(learner.embed(learner.prepare(TEST), "0"), before)
    assert not torch.allclose(learner.embed(learner.prepare(TEST), "1"), before)
    assert not learner.tasks[0].mask.eq(learner.tasks[1].mask).all()


@every_member
def test_several_networks_in_one_pass(name: str) -> None:
    learner, _ = taught(name)
    tokens = learner.prepare(TEST[:6])
    alone = torch.stack([learner.embed(tokens, network) for network in learner.networks()])
    together = torch.stack(learner.embed_all(tokens))
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)
    rows, networks = torch.tensor([0, 3, 5, 3, 1]), torch.tensor([1, 0, 0, 1, 1])
    found = learner.embed_rows(tokens, rows, networks)
    torch.testing.assert_close(found, alone[networks, rows], rtol=1e-5, atol=1e-5)
    assert float((alone[0] - alone[1]).abs().max()) > 1e-3


@every_member
def test_a_saved_learner_answers_alike(name: str, tmp_path: Path) -> None:
    learner, _ = taught(name)
    learner.save(tmp_path / "model")
    loaded = morecl.load(tmp_path / "model")
    assert loaded.backbone.architecture == name
    assert np.array_equal(loaded.scores(TEST), learner.scores(TEST))


@every_member
def test_a_trained_backbone_is_saved_too(name: str, tmp_path: Path) -> None:
    learner, before = taught(name, freeze_backbone=False)
    assert torch.equal(learner.embed(learner.prepare(TEST), "0"), before)
    learner.save(tmp_path / "model")
    assert np.array_equal(morecl.load(tmp_path / "model").scores(TEST), learner.scores(TEST))
    frozen, _ = taught(name)
    assert not torch.allclose(frozen.embed(frozen.prepare(TEST), "0"), before, atol=1e-3)


@every_member
def test_a_file_of_weights_at_another_size(name: str, tmp_path: Path) -> None:
    """Positions are resampled as timm does it; what does not depend on the size stays."""
    vit = vit_of(name)
    save_file(dict(vit.state_dict()), tmp_path / "w.safetensors")
    spec = f"{name}@{tmp_path / 'w.safetensors'}"
    same, other = load_backbone(spec), load_backbone(spec, image_size=24)
    assert torch.equal(timms_features(same.vit, pictures()), timms_features(vit, pictures()))
    assert same.source_sha256 == other.source_sha256 == same.sha256
    changed = {key for key, value in same.state.items() if other.state[key].shape != value.shape}
    assert changed == {key for key in same.state if key == "pos_embed" or key.endswith("position_bias_table")}
    assert torch.isfinite(timms_features(other.vit, pictures(24))).all()
