"""The end of a block's branch with its adapter: by the narrow kernels, or by cuBLAS and the wide ones."""

from __future__ import annotations

from torch import Tensor

from morecl.nn.adapter import AdapterWeights
from morecl.nn.kernels import adapter, attention, mlp, wide


def adapter_forward(
    y: Tensor, x: Tensor, bias: Tensor, weights: AdapterWeights, norm: tuple[Tensor, Tensor], eps: float
) -> tuple[Tensor, ...]:
    """In one kernel: adapter, sum and norm, see :func:`morecl.nn.kernels.wide.forward`."""
    if x.shape[1] > adapter.NARROW:
        return wide.forward(y, x, bias, weights, norm, eps)
    return adapter.forward(y, x, bias, weights, norm, eps)[1:]


def mlp_forward(
    n: Tensor,
    x: Tensor,
    block: dict[str, Tensor],
    weights: AdapterWeights,
    norm: tuple[Tensor, Tensor],
    eps: float,
    *,
    for_gradients: bool,
) -> tuple[Tensor, ...]:
    """The MLP's products of n (N, D) with GELU between them, adapter, sum and norm.

    Returns GELU's slopes (none without gradients), the second product y and what :func:`adapter_forward` returns.
    """
    a, slopes = mlp.forward(n, block["mlp.fc1.weight"], block["mlp.fc1.bias"], with_slopes=for_gradients)
    product = block["mlp.fc2.weight"]
    bias = block["mlp.fc2.bias"]
    if x.shape[1] <= adapter.NARROW:
        return slopes, *adapter.forward(a, x, bias, weights, norm, eps, product)
    y = a @ product.t()
    return slopes, y, *wide.forward(y, x, bias, weights, norm, eps)


def mlp_backward(d: Tensor, slopes: Tensor, block: dict[str, Tensor]) -> Tensor:
    """The gradient d (N, D) of y -> that of n (N, D)."""
    return mlp.backward(d, block["mlp.fc2.weight"], slopes) @ block["mlp.fc1.weight"]


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
