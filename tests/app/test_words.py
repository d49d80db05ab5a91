"""Texts behind hashed inputs: counted in bounded memory, the same after a stop, shown in the report."""

from collections import Counter

import numpy as np
import pytest

from opvi.adapters._tables import hashed_place
from opvi.app.learn import RunDirectory, Stopped, contents
from opvi.app.learn import _learner as learner
from opvi.app.learn._predict import learnt
from opvi.app.learn._words import KEPT, LONGEST, Words, counted, named
from tests.app.test_learning import learn, stopping_after


def texts_in(place: int, count: int) -> list[str]:
    """Texts that all show as 1 in one input."""
    found = (f"town {i}" for i in range(100_000))
    return [text for text in found if hashed_place(text) == (place, 1)][:count]


def test_few_texts_are_counted_exactly() -> None:
    rng = np.random.default_rng(0)
    met = [f"t{i}" for i in rng.geometric(0.2, 500)]
    words: Words = {}
    counted(words, {"a": met[:123]})
    counted(words, {"a": met[123:]})
    assert Counter({text: rows for here in words["a"].values() for text, rows in here.items()}) == Counter(met)
    assert all(f"{hashed_place(text)[0] + 1}" == place[:-1] for place, here in words["a"].items() for text in here)


def test_memory_is_bounded_and_frequent_texts_stay() -> None:
    many = texts_in(4, 60)
    rng = np.random.default_rng(1)
    met = [many[0] if rng.random() < 0.3 else many[rng.integers(1, 60)] for _ in range(2000)] + ["x" * 1000]
    words: Words = {}
    counted(words, {"a": met})
    here = words["a"]["5+"]
    assert len(here) == KEPT
    assert sum(here.values()) >= 2000
    assert max(here, key=here.__getitem__) == many[0]
    assert all(len(text) <= LONGEST for place in words["a"].values() for text in place)
    assert named(words)["a"]["5+"].startswith(f"{many[0]}, ")
    assert named(words)["a"]["5+"].endswith(", …")


def test_one_text_needs_no_others_beside_it() -> None:
    first, second = texts_in(0, 2)
    assert named({"a": {"1+": {first: 97, second: 3}}}) == {"a": {"1+": f"{first}, …"}}
    assert named({"a": {"1+": {first: 2, second: 3}}}) == {"a": {"1+": f"{second}, {first}"}}


@pytest.fixture(scope="module")
def towns(tmp_path_factory):
    """A table with a text of 50 values, the first of which says most."""
    rng = np.random.default_rng(2)
    rows = np.minimum(rng.geometric(0.08, 400), 50)
    lines = [f"{'' if i % 40 == 7 else f'Town {town}'},{town == 1},{town}" for i, town in enumerate(rows)]
    path = tmp_path_factory.mktemp("towns") / "towns.csv"
    path.write_text("\n".join(["town,first,y", *lines]))
    return path


@pytest.mark.slow
def test_the_report_says_which_texts_are_meant(towns, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(learner, "ROWS", 80)
    whole = learn(towns, tmp_path / "whole")
    with pytest.raises(Stopped):
        learn(towns, tmp_path / "cut", **stopping_after(3))
    assert learn(towns, tmp_path / "cut").words == whole.words
    place, sign = hashed_place("Town 1")
    told = contents(learnt(RunDirectory(tmp_path / "whole")), "a run", "")
    effect = next(one for one in told.effects if one.feature == "town, many strings")
    shown = next(value for value in effect.values if value.startswith("Town 1,") or value == "Town 1")
    assert shown == named(whole.words)["town"][f"{place + 1}{'+' if sign > 0 else '−'}"]
    assert not any("place" in value for value in effect.values)
    coefficient = next(one for one in told.posterior.coefficients if "Town 1" in one.name)
    assert coefficient.name.startswith("town: ")
    bare = {one.name.removeprefix("town: hash ") for one in told.posterior.coefficients if ": hash " in one.name}
    assert not bare & {place[:-1] for place in whole.words["town"]}  # only where no text fell
