"""The end of a block's branch with its adapter: by the narrow kernels, or by cuBLAS and the wide ones."""

from __future__ import annotations

from enum import Enum, auto

from torch import Tensor

from morecl.nn.adapter import AdapterWeights
from morecl.nn.kernels import adapter, attention, gelu, mlp, wide


class Way(Enum):
    """How the MLP's products and GELU are computed."""

    APART = auto()  # products by cuBLAS; GELU in its own kernel (narrow tokens: forward in that of the adapter)
    BEHIND = auto()  # forward the same; backward, the gradient of GELU behind the product
    LATE_SLOPES = auto()  # narrow tokens: the same, with the slopes that the adapter's kernel stores
    SLOPES = auto()  # GELU and slopes behind the first product; backward, times the slopes behind the product


MLP_WAYS = {192: Way.SLOPES, 384: Way.SLOPES, 768: Way.SLOPES}  # by the dimensions up to which it is the fastest


def mlp_way(dim: int) -> Way:
    """The fastest way for tokens of this many dimensions."""
    return next(way for limit, way in MLP_WAYS.items() if dim <= limit)


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

    Returns what :func:`mlp_backward` needs, the second product y and what :func:`adapter_forward` returns.
    """
    first = block["mlp.fc1.weight"]
    inner = block["mlp.fc1.bias"]
    product = block["mlp.fc2.weight"]
    bias = block["mlp.fc2.bias"]
    narrow = x.shape[1] <= adapter.NARROW
    way = mlp_way(x.shape[1])
    if way is Way.SLOPES:
        a, kept = mlp.forward(n, first, inner, with_slopes=for_gradients)
        if narrow:
            return kept, *adapter.forward(a, x, bias, weights, norm, eps, product)
    else:
        u = n @ first.t()
        kept = gelu.new_slopes(u) if way is Way.LATE_SLOPES and for_gradients else u
        if narrow:  # all in one kernel
            slopes = None if kept is u else kept
            return kept, *adapter.forward(u, x, bias, weights, norm, eps, product, inner, slopes)
        a = gelu.forward(u, inner)
    y = a @ product.t()
    return kept, y, *wide.forward(y, x, bias, weights, norm, eps)


def mlp_backward(d: Tensor, kept: Tensor, block: dict[str, Tensor]) -> Tensor:
    """The gradient d (N, D) of y -> that of n (N, D)."""
    second = block["mlp.fc2.weight"]
    inner = block["mlp.fc1.bias"]
    way = mlp_way(d.shape[1])
    if way in (Way.SLOPES, Way.LATE_SLOPES):
        du = mlp.backward(d, second, kept)
    elif way is Way.BEHIND:
        du = mlp.backward_from_input(d, second, kept, inner)
    else:
        du = gelu.backward(d @ second, kept, inner)
    return du @ block["mlp.fc1.weight"]


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
