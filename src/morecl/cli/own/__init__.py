"""The commands for one's own images: ``learn``, ``predict``, ``evaluate``, ``info``, ``history``, ``undo``, ...

Each parses, calls :mod:`morecl.classifier` and shows what comes back.
"""
