"""The end of a block's branch with its adapter: by the narrow kernels, or by cuBLAS and the wide ones."""

from __future__ import annotations

from torch import Tensor

from morecl.nn.adapter import AdapterWeights
from morecl.nn.kernels import adapter, attention, gelu, wide


def adapter_forward(
    y: Tensor, x: Tensor, bias: Tensor, weights: AdapterWeights, norm: tuple[Tensor, Tensor], eps: float
) -> tuple[Tensor, ...]:
    """In one kernel: adapter, sum and norm, see :func:`morecl.nn.kernels.wide.forward`."""
    if x.shape[1] > adapter.NARROW:
        return wide.forward(y, x, bias, weights, norm, eps)
    return adapter.forward(y, x, bias, weights, norm, eps)[1:]


def mlp_forward(
    u: Tensor,
    x: Tensor,
    block: dict[str, Tensor],
    weights: AdapterWeights,
    norm: tuple[Tensor, Tensor],
    eps: float,
) -> tuple[Tensor, ...]:
    """GELU, second product y of the MLP, adapter, sum and norm: y and what :func:`adapter_forward` returns."""
    product = block["mlp.fc2.weight"]
    bias = block["mlp.fc2.bias"]
    inner = block["mlp.fc1.bias"]
    if x.shape[1] > adapter.NARROW:
        y = gelu.forward(u, inner) @ product.t()
        return y, *wide.forward(y, x, bias, weights, norm, eps)
    return adapter.forward(u, x, bias, weights, norm, eps, product=(product, inner))  # all in one kernel


def adapter_backward(d: Tensor, r: Tensor, weights: AdapterWeights) -> tuple[Tensor, Tensor]:
    """See :func:`morecl.nn.kernels.adapter.backward`."""
    return (wide if d.shape[1] > adapter.NARROW else adapter).backward(d, r, weights)


def adapter_backward_to_heads(
    d: Tensor, r: Tensor, weights: AdapterWeights, projection: Tensor, seen: Tensor, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`morecl.nn.kernels.adapter.backward_to_heads`."""
    if d.shape[1] > adapter.NARROW:
        p, dh = wide.backward(d, r, weights)
        e = dh @ projection
        return p, e, attention.head_sums(seen, e, heads)
    return adapter.backward_to_heads(d, r, weights, projection, seen, heads)
