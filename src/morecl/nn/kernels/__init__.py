"""Triton kernels for parts of a block, in half precision on a GPU.

Triton is installed with torch's builds for GPUs. :mod:`morecl.nn.fused` says which blocks are supported and puts the
parts together. ``head_steps`` is another matter: it trains heads, in float32 (:mod:`morecl.nn.head_steps`).
"""
