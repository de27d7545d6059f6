"""Parts of a block in kernels of our own, in half precision on a GPU.

Triton, in which they are written, comes with torch where there are GPUs. What can be taken, and how the parts are put
together, is in :mod:`morecl.nn.fused`.
"""
