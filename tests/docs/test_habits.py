"""Files that cannot run here are at least what their readers expect: workflows, templates, hooks, release notes."""

import re
from pathlib import Path

import pytest
import yaml

from docs.release_notes import notes

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def read(path):
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_call_what_there_is(path):
    """Every step has an action with a version or a command; what make is asked for is in the Makefile."""
    workflow = read(path)
    assert {"name", "permissions", "jobs"} <= set(workflow)
    assert True in workflow  # what YAML makes of `on`
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"]
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
            assert "@v" in step.get("uses", "@v")
            for command in re.findall(r"^make (.*)$", step.get("run", ""), re.MULTILINE):
                for word in re.sub(r"\S*\$\{\{.*?\}\}|\S+=\S*", "", command).split():
                    assert re.search(rf"^{word}:", MAKEFILE, re.MULTILINE)
            for script in re.findall(r"python (\S+\.py)", step.get("run", "")):
                assert (ROOT / script).exists()


def test_every_python_that_is_promised_is_tested():
    told = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text())
    assert read(ROOT / ".github" / "workflows" / "test.yml")["jobs"]["test"]["strategy"]["matrix"]["python"] == told


def test_forms_ask_for_what_is_needed():
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        form = read(path)
        assert form["name"]
        assert form["description"]
        assert all(part["attributes"]["label"] for part in form["body"])
    hooks = read(ROOT / ".pre-commit-config.yaml")["repos"][0]["hooks"]
    assert {hook["entry"].split()[0].removeprefix(".venv/bin/") for hook in hooks} == {"ruff", "mypy", "lint-imports"}


def test_release_notes_are_one_version_of_the_changelog():
    text = "# Changelog\n\n## [Unreleased]\n\n- new\n\n## [1.0.0] - 2026-01-01\n\n- old\n\n[1.0.0]: somewhere\n"
    assert notes(text, "1.0.0") == "- old\n"
    assert notes(text, "Unreleased") == "- new\n"
    with pytest.raises(ValueError, match=r"no version 2\.0\.0\. It has Unreleased, 1\.0\.0"):
        notes(text, "2.0.0")
    assert "three houses" in notes((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), "Unreleased")
