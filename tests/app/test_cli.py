import pytest

from opvi.app import cli


@pytest.mark.parametrize("words", [["learn", "data.csv", "--batch", "0"], ["forget"]])
def test_unknown_words_end_with_status_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    assert stop.value.code == 2
    assert "error" in capsys.readouterr().err


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("opvi ")
    assert cli.main([]) == 2
    assert "learn" in capsys.readouterr().out
