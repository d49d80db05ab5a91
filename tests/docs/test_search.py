"""The check of the site's search: what counts as found."""

import json
import sys

import pytest

from docs import check_search


def entry(location, title="", text=""):
    return {"location": location, "title": title, "text": text}


INDEX = {
    "docs": [
        entry("a/", "Start", "It forgets when data drift."),
        entry("b/#drift", "Drifting data"),
        entry("api/#x", "drift", "drift"),
        entry("c/", "An adrift boat"),
    ]
}


def test_words_begin_where_words_begin_and_titles_come_first():
    assert check_search.found(INDEX, "drift") == ["b/#drift", "a/"]
    assert check_search.found(INDEX, "Kafka") == []


@pytest.mark.parametrize(("text", "status"), [("drift interval checkpoint Kafka", 0), ("drift interval Kafka", 1)])
def test_the_check_fails_if_a_word_is_nowhere(tmp_path, monkeypatch, capsys, text, status):
    (tmp_path / "search").mkdir()
    index = {"docs": [entry("page/", "Page", text)]}
    (tmp_path / "search" / "search_index.json").write_text(json.dumps(index))
    monkeypatch.setattr(sys, "argv", ["check_search.py", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        check_search.main()
    assert bool(ended.value.code) == bool(status)
    assert ("'checkpoint': 0 sections" in capsys.readouterr().out) == bool(status)
