"""The adapter: its formula, its identity at the start, what it trains."""

from __future__ import annotations

import numpy as np
import torch

from morecl.nn.adapter import Adapter
from morecl.random import generator


def test_formula() -> None:
    adapter = Adapter(dim=6, bottleneck=3)
    torch.nn.init.normal_(adapter.fc2.weight)
    adapter.m1, adapter.m2 = torch.tensor([1.0, 0.0, 0.3]), torch.tensor([1.0, 0, 0.5, 1, 0, 1])
    h = torch.randn(2, 4, 6)
    w1, b1, w2, b2 = (p.detach().double().numpy() for p in adapter.parameters())
    m1, m2, x = adapter.m1.double().numpy(), adapter.m2.double().numpy(), h.double().numpy()
    expected = x + m2 * (np.maximum(m1 * (x @ w1.T + b1), 0) @ w2.T + b2)
    np.testing.assert_allclose(adapter(h).detach().numpy(), expected, rtol=1e-5, atol=1e-6)


def test_a_fresh_adapter_is_the_identity() -> None:
    adapter = Adapter(dim=192, bottleneck=8)
    adapter.initialise(generator(0, "adapters"))
    h = torch.randn(2, 5, 192)
    assert torch.equal(adapter(h), h)
    assert 0.015 < float(adapter.fc1.weight.detach().std()) < 0.025
    assert [float(p.detach().abs().max()) for p in (adapter.fc1.bias, adapter.fc2.weight, adapter.fc2.bias)] == [0] * 3


def test_initialised_from_the_generator_alone() -> None:
    one, other = Adapter(8, 4), Adapter(8, 4)
    one.initialise(generator(3, "adapters"))
    other.initialise(generator(3, "adapters"))
    assert torch.equal(one.fc1.weight, other.fc1.weight)
    other.initialise(generator(4, "adapters"))
    assert not torch.equal(one.fc1.weight, other.fc1.weight)


def test_saved_keys_and_trainable_count() -> None:
    adapter = Adapter(dim=192, bottleneck=64)
    assert list(adapter.state_dict()) == ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]  # masks are not saved
    assert sum(p.numel() for p in adapter.parameters()) == 2 * 192 * 64 + 64 + 192
