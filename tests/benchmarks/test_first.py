"""First answers: what is measured of a life, what `make bench` keeps of it, and how it is stamped."""

import json
import sys

import opvi
from benchmarks import first
from benchmarks.first_case import Watch, estimator

STEPS = {
    "import opvi": {"seconds": 0.5, "programs": []},
    "partial_fit(20)": {"seconds": 2.0, "programs": [["jit(begun)", 0.1], ["jit(advanced)", 0.9]]},
    "predict(20)": {"seconds": 0.3, "programs": [["jit(answer)", 0.2]]},
    "partial_fit(5)": {"seconds": 0.1, "programs": []},
    "predict(2000)": {"seconds": 0.1, "programs": []},
    "partial_fit(333)": {"seconds": 5.0, "programs": [["jit(advanced)", 2.5]]},
    "another question": {"seconds": 0.4, "programs": [["jit(foreseen)", 0.2], ["jit(told)", 0.1]]},
    "programs to learn and predict": 4,
    "peak MB": 500,
    first.FIRST_ROWS: {"seconds": 0.6, "programs": []},
    first.NEXT_ROWS: {"seconds": 0.5, "programs": []},
}
LIFE = [
    {"step": "partial_fit(20)", "program": "jit(begun)", "seconds": 0.1},
    {"step": "partial_fit(20)", "program": "jit(advanced)", "seconds": 0.9},
    {"step": "predict(20)", "program": "jit(answer)", "seconds": 0.2},
    {"step": "partial_fit(333)", "program": "jit(advanced)", "seconds": 2.5},
]


def test_the_bench_keeps_each_program_with_its_seconds(monkeypatch):
    monkeypatch.setattr(first, "measured", lambda name: ((turn, {"steps": STEPS}) for turn in first.TURNS))
    results = [json.loads(json.dumps(result.summary())) for result in first.results()]
    for name in ("regressor", "classifier"):
        life = next(one for one in results if one["what"] == f"{name}: programs of a life")
        assert (life["value"], life["target"], life["met"]) == (4, 4, True)
        assert life["extra"]["programs"] == LIFE
        answers = [one for one in results if one["what"] == f"first answer of the {name}"]
        assert [one["extra"]["programs"] for one in answers] == [LIFE[:3]] * len(first.TURNS)


def test_a_report_says_once_which_command_made_it(monkeypatch, tmp_path):
    monkeypatch.setattr(first, "measured", lambda name: ((turn, {"steps": STEPS}) for turn in first.TURNS))
    monkeypatch.setattr(sys, "argv", ["first.py", "--out", str(tmp_path), "--only", "or", "--only", "ier"])
    first.main()
    text = (tmp_path / "first.json").read_text()
    report = json.loads(text)
    assert report["machine"]["command"] == f"python -m benchmarks.first --out {tmp_path} --only or --only ier"
    assert text.count('"command"') == text.count("python -m") == 1
    assert "regressor" in report


def test_a_life_has_calls_of_all_sizes(monkeypatch):
    """Single rows, and a question of thousands, before the programs are counted; other questions after it."""
    watch, sizes, count = Watch(), {"fit": [], "ask": []}, []

    class Model:
        def partial_fit(self, X, y):
            assert len(X) == len(y)
            sizes["fit"].append(len(X))

        def predict(self, X):
            sizes["ask"].append(len(X))
            watch.programs.append(("jit(answer)", 0.1))

        def predict_interval(self, X):
            count.append((len(watch.programs), list(sizes["fit"])))
            watch.programs.append(("jit(told)", 0.1))

        def log_predictive_density(self, X, y):
            watch.programs.append(("jit(told)", 0.1))

    monkeypatch.setattr(Watch, "listen", lambda _: None)
    monkeypatch.setattr(opvi, "OPVIRegressor", Model)
    estimator("regressor", watch)
    (programs, learnt), *_ = count
    assert watch.steps["programs to learn and predict"] == programs == len(sizes["ask"])
    assert learnt.count(1) >= 60
    assert {5, 20, 333} < set(learnt)
    assert {20, 333, 5000} < set(sizes["ask"])
