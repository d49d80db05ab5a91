import json

import pytest

from opvi.app import cli
from opvi.app.cli._common import CommandError
from opvi.app.serve._worker import refused


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


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("It failed: no such file.. Give another.", "It failed: no such file. Give another."),
        ("It failed: the end..", "It failed: the end."),
        ("../.. is a folder, and so on... Give a file in ..", "../.. is a folder, and so on... Give a file in .."),
    ],
)
def test_what_a_library_said_may_end_with_a_full_stop(message, shown):
    assert str(CommandError(message)) == shown
    assert json.loads(refused(400, message).body)["error"] == shown
