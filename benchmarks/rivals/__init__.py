"""Rivals on the rows of `python -m paper measure`, regression and classification: `python -m benchmarks.rivals`."""
