"""The walk of one batch on the page about the inside is the way that a batch takes."""

import inspect
import re
import sys

import numpy as np
import pytest

from opvi.app.cli import main
from tests.docs.test_paper_map import HOOK, INTERNALS, imported

SECTION = re.search(r"^## The walk of one batch\n(.*?)^## ", INTERNALS, re.DOTALL | re.MULTILINE)[1]
STEPS = re.split(r"^\d+\. ", SECTION, flags=re.MULTILINE)[1:]


def test_it_has_at_most_twelve_calls_each_with_its_file():
    assert len(STEPS) <= 12
    assert all(len(HOOK.LINK.findall(step)) == 1 for step in STEPS)


@pytest.mark.slow
def test_a_batch_goes_this_way(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(60, 2)).round(3)
    np.savetxt("data.csv", rows, delimiter=",", header="size,price", comments="", fmt="%.3f")
    names = [HOOK.LINK.findall(step)[0][0] for step in STEPS]
    codes = {inspect.unwrap(imported(name)).__code__: name for name in names}
    called: list[str] = []

    def note(frame, event, argument):  # of calls alone: it returns nothing that would follow their lines
        name = codes.get(frame.f_code)
        if name is not None and name not in called:
            called.append(name)

    sys.settrace(note)
    try:
        assert main(["learn", "data.csv", "--target", "price", "--hidden", "none"]) == 0
    finally:
        sys.settrace(None)
    assert called == names
