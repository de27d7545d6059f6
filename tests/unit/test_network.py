"""timm's network with adapters in it is timm's network until something is learned."""

from __future__ import annotations

import pytest
import timm
import torch

from morecl.nn.adapter import Adapter
from morecl.nn.backbone import SHIPPED, load_backbone
from morecl.nn.network import AdaptedViT
from morecl.random import generator

MEAN_POOLED = "vit_little_patch16_reg4_gap_256"  # registers, layer scale, mean of the patches, fc_norm


def build(name: str, bottleneck: int | None = 4) -> tuple[AdaptedViT, torch.Tensor, torch.Tensor]:
    """The adapted network, a batch, and the plain network's features of it."""
    backbone = load_backbone(name, pretrained=name == SHIPPED)
    size = backbone.input.size
    x = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        vit = backbone.vit
        expected = vit.forward_head(vit.forward_features(x), pre_logits=True)
    network = AdaptedViT(vit, bottleneck)
    network.initialise(generator(0, "adapters"))
    return network, x, expected


@pytest.mark.parametrize("name", [SHIPPED, "deit_tiny_patch16_224", MEAN_POOLED])
@pytest.mark.parametrize("bottleneck", [4, None])
def test_features_are_timms_until_something_is_learned(name: str, bottleneck: int | None) -> None:
    network, x, expected = build(name, bottleneck)
    with torch.no_grad():
        assert torch.equal(network.trunk(network.stem(x)), expected)
        assert torch.equal(network.trunk(network.stem(x), network.new_norms()), expected)
        vit = network.vit
        assert torch.equal(vit.forward_head(vit.forward_features(x), pre_logits=True), expected)


def test_timms_classes_are_used_unmodified() -> None:
    network, _, _ = build(SHIPPED)
    plain = timm.models.vision_transformer.VisionTransformer(
        img_size=32, patch_size=4, embed_dim=192, depth=6, num_heads=3, num_classes=0
    )
    assert type(network.vit) is type(plain)
    for block, other in zip(network.vit.blocks, plain.blocks, strict=True):
        assert type(block) is type(other)
        assert type(block).forward is type(other).forward
        for branch in ("ls1", "ls2"):
            inner, adapter = getattr(block, branch)
            assert type(inner) is type(getattr(other, branch))
            assert type(adapter) is Adapter
    names = {name for name, _ in network.vit.named_parameters() if "fc1" not in name and "fc2" not in name}
    assert {n for n, _ in plain.named_parameters() if "fc1" not in n and "fc2" not in n} == names


def test_only_adapters_norms_and_heads_can_learn() -> None:
    network, _, _ = build(SHIPPED)
    trainable = {name for name, p in network.vit.named_parameters() if p.requires_grad}
    assert trainable == {
        f"blocks.{i}.{ls}.1.{fc}.{kind}"
        for i in range(6)
        for ls in ("ls1", "ls2")
        for fc in ("fc1", "fc2")
        for kind in ("weight", "bias")
    }
    assert all(p.requires_grad for p in network.new_norms().parameters())


def test_a_tasks_norms_are_copies_of_every_norm() -> None:
    network, x, _ = build(SHIPPED)
    norms = network.new_norms()
    names = sorted(name.replace("-", ".") for name, _ in norms.named_parameters())
    assert names == sorted(name for name, _ in network.vit.named_parameters() if "norm" in name)
    assert sum(p.numel() for p in norms.parameters()) == (2 * 6 + 1) * 2 * 192
    before = {name: p.clone() for name, p in network.vit.named_parameters()}
    with torch.no_grad():
        tokens = network.stem(x)
        plain = network.trunk(tokens, norms)
        for parameter in norms.parameters():
            parameter.add_(0.1)
        assert not torch.allclose(network.trunk(tokens, norms), plain)
        assert torch.equal(network.trunk(tokens), plain)
    assert all(torch.equal(before[name], p) for name, p in network.vit.named_parameters())
    assert sorted(norms.of("blocks.2")) == ["norm1.bias", "norm1.weight", "norm2.bias", "norm2.weight"]


@pytest.mark.parametrize("name", [SHIPPED, MEAN_POOLED])
def test_every_norm_and_mask_of_a_task_is_used(name: str) -> None:
    """Changing any one of them changes the features: nothing is left out of a task's network."""
    network, x, _ = build(name)
    with torch.no_grad():
        for adapter in network.adapters:
            torch.nn.init.normal_(adapter.fc2.weight, std=0.5)
            torch.nn.init.constant_(adapter.fc1.bias, 1.0)
    norms = network.new_norms()
    gates = [torch.ones(w).requires_grad_() for _ in network.adapters for w in (4, network.dim)]
    network.trunk(network.stem(x), norms, gates).square().sum().backward()
    for tensor in [*norms.parameters(), *gates]:
        assert tensor.grad is not None and tensor.grad.abs().max() > 0


def test_adapters_stand_before_the_residual_sum() -> None:
    """x = x + A1(attn(norm1(x))); x = x + A2(mlp(norm2(x))), with adapters that do something."""
    network, x, _ = build(SHIPPED)
    with torch.no_grad():
        for i, adapter in enumerate(network.adapters):
            torch.nn.init.normal_(adapter.fc2.weight, std=0.3, generator=torch.Generator().manual_seed(i))
        tokens = network.stem(x)
        expected = tokens
        for i, block in enumerate(network.vit.blocks):
            first, second = network.adapters[2 * i], network.adapters[2 * i + 1]
            expected = expected + first(block.attn(block.norm1(expected)))
            expected = expected + second(block.mlp(block.norm2(expected)))
        expected = network.vit.norm(expected)[:, 0]
        torch.testing.assert_close(network.trunk(tokens), expected)


def test_closed_masks_are_the_backbone() -> None:
    network, x, expected = build(SHIPPED)
    with torch.no_grad():
        for adapter in network.adapters:
            torch.nn.init.normal_(adapter.fc2.weight)
        tokens = network.stem(x)
        assert not torch.allclose(network.trunk(tokens), expected)
        closed = [torch.zeros(w) for _ in network.adapters for w in (4, 192)]
        assert torch.equal(network.trunk(tokens, network.new_norms(), closed), expected)
