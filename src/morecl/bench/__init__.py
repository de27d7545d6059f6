"""Measuring what things cost: :mod:`~morecl.bench.speed` of MORE, :mod:`~morecl.bench.cost` of every method.

Both run on made-up images: neither time nor memory depends on what they show.
"""
