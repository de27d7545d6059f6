"""The network with adapters computes what timm's network computes, until something is learned."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from morecl.catalogue import SHIPPED
from morecl.nn import fused
from morecl.nn import network as network_module
from morecl.nn.adapter import AdapterWeights
from morecl.nn.backbone import Backbone, fingerprint, load_backbone
from morecl.nn.heads import GrowingHead, task_head
from morecl.nn.linear import torchs_own
from morecl.nn.network import AdaptedViT
from morecl.random import generator

MEAN_POOLED = "test_vit2"  # layer scale, mean of the patches, fc_norm


def build(name: str) -> tuple[Backbone, torch.Tensor, torch.Tensor]:
    """A backbone, a batch, and the plain network's features of it."""
    backbone = load_backbone(name, pretrained=name == SHIPPED)
    size = backbone.input.size
    x = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        vit = backbone.vit
        return backbone, x, vit.forward_head(vit.forward_features(x), pre_logits=True)


def busy_adapters(network: AdaptedViT, bottleneck: int = 4) -> AdapterWeights:
    """Trainable weights that are not zero."""
    adapters = network.new_adapters(bottleneck)
    for i, parameter in enumerate(adapters.parameters()):
        torch.nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(i))
    return adapters.weights()


def every_token(network: AdaptedViT, *args: Any, **kwargs: Any) -> Tensor:
    """``trunk`` with all tokens computed in the last block, even if only the class token is read after it."""
    last, network._last_block = network._last_block, None
    try:
        return network.trunk(*args, **kwargs)
    finally:
        network._last_block = last


@pytest.mark.parametrize("name", [SHIPPED, "test_vit", "deit_tiny_patch16_224", MEAN_POOLED])
@torchs_own()
def test_features_are_timms_until_something_is_learned(name: str) -> None:
    """Bit for bit: without adapters, with new ones, with a new task's norms. timm's own network is unchanged."""
    backbone, x, expected = build(name)
    network = AdaptedViT(backbone.vit)
    fresh = network.new_adapters(4)
    fresh.initialise(generator(0, "adapters"))
    with torch.no_grad():
        tokens = network.stem(x)
        assert torch.equal(every_token(network, tokens), expected)
        assert torch.equal(every_token(network, tokens, network.new_norms()), expected)
        assert torch.equal(every_token(network, tokens, network.new_norms(), fresh.weights()), expected)
        network.trunk(tokens, network.new_norms(), busy_adapters(network))
        vit = backbone.vit
        assert torch.equal(vit.forward_head(vit.forward_features(x), pre_logits=True), expected)
    assert type(vit) is VisionTransformer
    assert fingerprint(vit.state_dict()) == backbone.sha256


@pytest.mark.parametrize("kind", [{}, {"qk_norm": True, "qkv_bias": False, "reg_tokens": 2}, {"global_pool": "avg"}])
def test_the_class_token_alone_through_the_last_block_changes_nothing(kind: dict[str, Any]) -> None:
    """In float64, features and gradients agree far better than float32: what is left out is never read."""
    torch.manual_seed(0)
    vit = VisionTransformer(img_size=16, patch_size=4, embed_dim=32, depth=2, num_heads=2, num_classes=0, **kind)
    network = AdaptedViT(vit.double().requires_grad_(False).eval(), torch.float64)
    x = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    adapters, tokens = AdapterWeights(*(part.detach().double() for part in busy_adapters(network))), network.stem(x)
    results = []
    for trunk in (network.trunk, functools.partial(every_token, network)):
        norms = network.new_norms()
        features = trunk(tokens, norms, adapters)
        features.square().sum().backward()
        results.append((features.detach(), norms.weight.grad, norms.bias.grad))
    for short, full in zip(*results, strict=True):
        assert short is not None and full is not None
        torch.testing.assert_close(short, full, rtol=1e-6, atol=1e-7)  # features are returned as float32


def test_adapters_come_before_the_residual_sum() -> None:
    """x = x + A1(attn(norm1(x))); x = x + A2(mlp(norm2(x))), with the norms of the task."""
    backbone, x, _ = build(SHIPPED)
    vit, network = backbone.vit, AdaptedViT(backbone.vit)
    w1, b1, w2, b2 = busy_adapters(network)
    norms = network.new_norms()
    with torch.no_grad():
        for parameter in norms.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)))

        def norm(z: torch.Tensor, place: int) -> torch.Tensor:
            z = (z - z.mean(-1, keepdim=True)) / (z.var(-1, unbiased=False, keepdim=True) + 1e-6).sqrt()
            return norms.weight[place] * z + norms.bias[place]

        def adapter(h: torch.Tensor, place: int) -> torch.Tensor:
            return h + torch.relu(h @ w1[place].T + b1[place]) @ w2[place].T + b2[place]

        tokens = expected = network.stem(x)
        for i, block in enumerate(vit.blocks):
            expected = expected + adapter(block.attn(norm(expected, 2 * i)), 2 * i)
            expected = expected + adapter(block.mlp(norm(expected, 2 * i + 1)), 2 * i + 1)
        expected = norm(expected, 12)[:, 0]
        torch.testing.assert_close(network.trunk(tokens, norms, AdapterWeights(w1, b1, w2, b2)), expected)


@pytest.mark.parametrize("name", [SHIPPED, MEAN_POOLED])
def test_an_observer_sees_the_input_of_every_adapter_in_order(name: str) -> None:
    """Each adapter's output is its input plus what it adds: with the inputs seen, the features can be rebuilt."""
    backbone, x, _ = build(name)
    network = AdaptedViT(backbone.vit)
    adapters = busy_adapters(network)
    seen: list[tuple[int, Tensor]] = []
    with torch.no_grad():
        tokens = network.stem(x)
        with network.observe_adapters(lambda place, h: seen.append((place, h))):
            features = network.trunk(tokens, adapters=adapters)
            network.trunk(tokens[:1], adapters=adapters)
        places = 2 * network.depth
        assert [place for place, _ in seen] == [*range(places), *range(places)]
        z = tokens
        for place, h in seen[:places]:
            z = z[:, : h.shape[1]]  # the last block may compute the class token only
            w1, b1, w2, b2 = (part[place] for part in adapters)
            z = z + h + torch.relu(h @ w1.T + b1) @ w2.T + b2
        expected = network._features(z, network.new_norms().weight[-1], network.new_norms().bias[-1], {})
        torch.testing.assert_close(features, expected, rtol=1e-4, atol=1e-4)
        assert {len(h) for _, h in seen[places:]} == {1}


def test_observers_are_gone_afterwards_even_after_an_error() -> None:
    backbone, x, _ = build(SHIPPED)
    network = AdaptedViT(backbone.vit)
    seen: list[Any] = []
    watch_adapters = network.observe_adapters(lambda place, h: seen.append(h))
    watch_features = network.observe_features(seen.append)
    with torch.no_grad():
        with pytest.raises(ZeroDivisionError), watch_adapters, watch_features:
            features = network.trunk(network.stem(x))
            _ = 1 / 0
        assert len(seen) == 2 * network.depth + 1 and seen[-1] is features
        network.trunk(network.stem(x))
    assert len(seen) == 2 * network.depth + 1


def test_what_is_observed_is_neither_compiled_nor_left_to_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone, x, _ = build(SHIPPED)
    network = AdaptedViT(backbone.vit)
    adapters = busy_adapters(network)
    with torch.no_grad():
        expected = network.trunk(network.stem(x), adapters=adapters)
        monkeypatch.setattr(network, "_fused", True)
        monkeypatch.setattr(fused, "supports_batch", lambda tokens, adapters: True)
        monkeypatch.setattr(fused, "trunk", lambda *_: pytest.fail("left to the kernels"))
        monkeypatch.setattr(network_module, "_compiled_block", lambda: pytest.fail("compiled"))
        with network.observe_adapters(lambda place, h: None):
            assert torch.equal(network.trunk(network.stem(x), adapters=adapters, compiled=True), expected)


@pytest.mark.parametrize(
    ("dim", "bottleneck", "kernels"),
    [(192, 64, True), (192, 16, True), (64, 64, True), (384, 64, False), (384, 100, False), (320, 64, False)],
)
def test_the_nearest_shape_measured_decides_who_trains(dim: int, bottleneck: int, kernels: bool) -> None:
    times = {(192, 64): (4.0, 5.0), (384, 64): (9.0, 8.0)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "STEP_TIMES", times)
        assert fused.trains_faster(dim, bottleneck) is kernels
        patch.setattr(fused, "STEP_TIMES", times | {(384, 128): (7.0, 8.0)})
        assert fused.trains_faster(dim, bottleneck) is (kernels or bottleneck == 100)


def test_the_compiler_trains_what_it_trains_faster_and_kernels_predict(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone, x, _ = build(SHIPPED)
    network = AdaptedViT(backbone.vit)
    adapters = busy_adapters(network)
    used: list[str] = []

    def run(*arguments: Any) -> torch.Tensor:
        used.append("kernels")
        return torch.zeros(len(x), network.dim)

    def compiled() -> Any:
        used.append("compiler")
        return network_module._call

    monkeypatch.setattr(network, "_fused", True)
    monkeypatch.setattr(fused, "supports_batch", lambda tokens, adapters: True)
    monkeypatch.setattr(fused, "trunk", run)
    monkeypatch.setattr(network_module, "_compiled_block", compiled)
    tokens = network.stem(x).detach()
    for kernels in (True, False):
        monkeypatch.setattr(fused, "trains_faster", lambda dim, bottleneck, kernels=kernels: kernels)
        network.trunk(tokens, adapters=adapters, compiled=True)
        with torch.no_grad():
            network.trunk(tokens, adapters=adapters)
    assert used == ["kernels", "kernels", "compiler", "kernels"]


def test_new_outputs_start_small_and_known_ones_stay() -> None:
    head = GrowingHead(192)
    head.grow(50, generator(0, "head", 1))
    with torch.no_grad():
        head.bias.add_(1.0)
    known = head.weight.detach().clone()
    head.grow(50, generator(0, "head", 2))
    assert torch.equal(head.weight[:50], known) and head.bias.tolist() == [1.0] * 50 + [0.0] * 50
    own = task_head(192, 50, generator(0, "task", 0))
    assert not own.bias.any()
    for rows in (known, head.weight.detach()[50:], own.weight.detach()):
        assert float(rows.std()) == pytest.approx(0.02, rel=0.1)
    assert not torch.equal(known, head.weight[50:])


def test_only_what_is_passed_in_can_learn() -> None:
    backbone, x, _ = build(SHIPPED)
    network = AdaptedViT(backbone.vit)
    assert not any(p.requires_grad for p in backbone.vit.parameters())
    assert not any(p.requires_grad and p.device.type != "meta" for p in network.block.parameters())
    network.trunk(network.stem(x), network.new_norms(), busy_adapters(network)).sum().backward()
    assert all(p.grad is None for p in backbone.vit.parameters())


@torchs_own()
def test_a_tasks_norms_are_copies_of_every_norm() -> None:
    backbone, x, expected = build(SHIPPED)
    network, vit = AdaptedViT(backbone.vit), backbone.vit
    norms = network.new_norms()
    assert {name: tuple(p.shape) for name, p in norms.named_parameters()} == {"weight": (13, 192), "bias": (13, 192)}
    pretrained = [norm for block in vit.blocks for norm in (block.norm1, block.norm2)] + [vit.norm]
    for i, norm in enumerate(pretrained):
        assert torch.equal(norms.weight[i], norm.weight) and torch.equal(norms.bias[i], norm.bias)
    with torch.no_grad():
        norms.weight.add_(0.1)
        assert not torch.allclose(network.trunk(network.stem(x), norms), expected)
        assert torch.equal(every_token(network, network.stem(x)), expected)
        assert torch.equal(every_token(network, network.stem(x), network.new_norms()), expected)


@pytest.mark.parametrize("name", [SHIPPED, MEAN_POOLED])
def test_every_norm_and_adapter_of_a_task_is_used(name: str) -> None:
    """The features depend on each of them: nothing is left out of a task's network."""
    backbone, x, _ = build(name)
    network = AdaptedViT(backbone.vit)
    norms, adapters = network.new_norms(), network.new_adapters(4)
    with torch.no_grad():
        for parameter in adapters.parameters():
            torch.nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(1))
        adapters.b1.fill_(1.0)  # so that ReLU closes no neuron
    network.trunk(network.stem(x), norms, adapters.weights()).square().sum().backward()
    for parameter in [*norms.parameters(), *adapters.parameters()]:
        assert parameter.grad is not None
        assert (parameter.grad.flatten(1).abs().amax(1) > 0).all()


def test_several_tasks_at_once() -> None:
    """The batch is repeated for each task and uses the norms and adapters of that task."""
    backbone, x, _ = build(SHIPPED)
    network = AdaptedViT(backbone.vit)
    with torch.no_grad():
        tokens = network.stem(x)
        tasks = []
        for seed in range(3):
            norms = network.new_norms()
            norms.weight.mul_(1 + 0.1 * seed)
            tasks.append((norms, AdapterWeights(*(part * seed for part in busy_adapters(network)))))
        alone = [network.trunk(tokens, norms, adapters) for norms, adapters in tasks]
        together = network.trunk(
            tokens.repeat(3, 1, 1),
            tuple(torch.stack([getattr(norms, name) for norms, _ in tasks], 1) for name in ("weight", "bias")),
            AdapterWeights(*(torch.stack(parts, 1) for parts in zip(*(a for _, a in tasks), strict=True))),
        )
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(alone[0], alone[1])


@pytest.mark.parametrize("name", [SHIPPED, "test_vit", MEAN_POOLED, "deit_tiny_patch16_224"])
@torchs_own()
def test_a_body_is_the_backbone_until_it_is_trained(name: str) -> None:
    """Bit for bit. The features depend on every weight, patch embedding included; timm's own network is unchanged."""
    backbone, x, expected = build(name)
    network = AdaptedViT(backbone.vit, frozen=False)
    body, norms = network.new_body(), network.new_norms()
    assert network.prefix(x) is x
    features = network.trunk(x, norms, body=body)
    assert torch.equal(every_token(network, x, norms, body=body), expected)
    torch.testing.assert_close(features, expected)  # computing the class token only rounds differently
    trained = sum(p.numel() for part in (body, norms) for p in part.parameters())
    assert trained == sum(p.numel() for p in backbone.vit.parameters())  # all of it, nothing twice
    features.square().sum().backward()
    for key, parameter in body.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, key
    with torch.no_grad():
        for parameter in body.parameters():
            parameter.add_(0.01)
        assert not torch.allclose(network.trunk(x, norms, body=body), expected)
        assert torch.equal(every_token(network, x, norms, body=network.new_body()), expected)
    assert fingerprint(backbone.vit.state_dict()) == backbone.sha256


def test_a_body_computes_in_the_networks_dtype() -> None:
    """bfloat16 blocks, float32 weights and gradients; before training, the features of a frozen backbone."""
    backbone, x, _ = build("test_vit")
    frozen, trained = (AdaptedViT(backbone.vit, torch.bfloat16, frozen=frozen) for frozen in (True, False))
    body = trained.new_body()
    features = trained.trunk(x, body=body)
    assert torch.equal(features, frozen.trunk(frozen.prefix(x)))
    features.square().sum().backward()
    assert {p.dtype for p in body.parameters()} == {p.grad.dtype for p in body.parameters()} == {torch.float32}


@pytest.mark.parametrize("name", [SHIPPED, MEAN_POOLED])
def test_patches_are_the_mean_before_the_last_block(name: str) -> None:
    backbone = load_backbone(name, image_size=32, pretrained=False)
    network = AdaptedViT(backbone.vit)
    with torch.no_grad():
        tokens = network.prefix(torch.randn(3, 3, 32, 32))
        before = tokens
        for block in backbone.vit.blocks[:-1]:
            before = block(before)
        both = network.trunk(tokens, patches=True)
        mean = before[:, backbone.vit.num_prefix_tokens :].mean(1)
        expected = (mean - mean.mean(1, keepdim=True)) / mean.var(1, unbiased=False, keepdim=True).add(1e-5).sqrt()
        assert torch.allclose(both[:, : network.dim], network.trunk(tokens), atol=1e-5)
        assert torch.allclose(both[:, network.dim :], expected, atol=1e-4)
