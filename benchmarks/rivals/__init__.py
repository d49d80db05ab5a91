"""Rivals on the rows of `opvi measure regression` and `opvi measure classification`: `python -m benchmarks.rivals`."""
