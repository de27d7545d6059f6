"""Benchmarks: the :mod:`~morecl.bench.speed` of MORE, a :mod:`~morecl.bench.profile` of one of its training steps, the
:mod:`~morecl.bench.cost` of every method.

All run on random images: neither time nor memory depends on the content.
"""
