"""Speed and memory of opvi beside its peers, as ratios in one run: `python -m benchmarks --out bench-output`."""
