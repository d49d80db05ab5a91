"""The pages on choosing say what docs/results/choose.json holds, and the distances in it are distances."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import choices, choose, choose_page

ROOT = Path(__file__).parents[2]


def test_the_page_shows_the_results():
    parts = json.loads((ROOT / "docs/results/choose.json").read_text(encoding="utf-8"))["parts"]
    page_of = {name: page for page, names in choose_page.PAGES.items() for name in names}
    assert set(parts) == set(choose.PARTS)
    for name, table in choose_page.tables(parts).items():
        page = (ROOT / "docs" / page_of[name]).read_text(encoding="utf-8")
        assert table in page, f"the table `{name}` is out of date: python -m benchmarks.choose_page"


@pytest.mark.parametrize("shift", [0.0, 2.0])
def test_distance_is_0_at_the_posterior_and_counts_its_standard_deviations(shift):
    rows = choices.linear_rows(0, size=50)
    centre, covariance = choose.exact_posterior(rows)
    root = 3 * np.linalg.cholesky(covariance)  # ± its nine columns, each a ninth of the covariance
    particles = np.concatenate([root.T, -root.T]) + centre + shift * np.sqrt(np.diag(covariance))
    found = choose.distance(choose.Passed(particles, (), (), (), 1), rows)
    assert found == pytest.approx(shift, abs=1e-6)
