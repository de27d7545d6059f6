"""Benchmarks: the :mod:`~morecl.bench.speed` of MORE, a :mod:`~morecl.bench.profile` of one of its training steps, the
:mod:`~morecl.bench.cost` of every method, the time of a :mod:`~morecl.bench.prediction` against the number of tasks.

All run on random images: neither time nor memory depends on the content.
"""
