"""Runs from several machines become one results file, if the same code made them."""

import pytest

from benchmarks import merge

NEAR = {"worst mean, sd": 0.02, "smallest sd": 0.99, "largest sd": 1.01, "flagged": False}
FAR = {"worst mean, sd": 0.5, "smallest sd": 0.8, "largest sd": 1.4, "flagged": True}


def made(results, sources="a"):
    return {"sources": {"src": sources}, "results": results, "references": {"levels": {"mark": "x"}}}


def test_runs_of_a_model_are_joined_by_batch_and_seed():
    found = merge.numpyro(
        [made({"levels": {"20": {"3": NEAR}}}), made({"levels": {"20": {"2": FAR}, "1": {"2": FAR}}})]
    )
    assert found["results"] == {"levels": {"20": {"3": NEAR, "2": FAR}, "1": {"2": FAR}}}
    assert found["tables"][0]["rows"][0] == ["levels", "3", "0.50", "0.80–1.40", "1", "0", "2", "2"]
    assert found["command"].endswith("--batches 20 1 --seeds 2 3")
    with pytest.raises(ValueError, match="by one commit"):
        merge.numpyro([made({}), made({}, "b")])


def test_cases_of_a_diagnosis_are_joined_and_counted_again():
    files = [
        made({"cases": {"counts": {str(seed): {"verdict": kind, "flagged": seed == 4}}}})
        for seed, kind in ((4, "bad"), (3, "good"))
    ]
    found = merge.of_diagnosis(files)
    assert found["results"]["flags"] == {"good": {"count": 1, "flagged": 0}, "bad": {"count": 1, "flagged": 1}}
    assert found["command"].endswith("--seeds 3 4")
