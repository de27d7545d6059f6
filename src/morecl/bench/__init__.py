"""Measuring what things cost: :mod:`~morecl.bench.speed` of MORE, :mod:`~morecl.bench.profile` of one of its training
steps, :mod:`~morecl.bench.cost` of every method.

All run on made-up images: neither time nor memory depends on what they show.
"""
