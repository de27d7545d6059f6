"""Triton kernels for parts of a block, in half precision on a GPU.

Triton is installed with torch's builds for GPUs. :mod:`morecl.nn.fused` says which blocks are supported and puts the
parts together.
"""
