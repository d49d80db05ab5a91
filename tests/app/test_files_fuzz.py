"""Malformed files and requests: an answer or an error of ours, soon. `python -m benchmarks.fuzz` is the long form."""

import pytest

from tests.app.hostile_files import KINDS, Fuzzer

CASES = {"checkpoint": 600, "fleet": 250, "log": 600, "run": 60, "requests": 400}


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_malformed_does_harm(kind, tmp_path):
    with Fuzzer(kind, tmp_path) as fuzzer:
        assert fuzzer.corpus() >= 6
        for seed in range(CASES[kind]):
            fuzzer.one(seed)
