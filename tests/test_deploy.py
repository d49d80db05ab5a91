"""The container's recipe and its companions: what they say is what the command line understands."""

import re
from pathlib import Path

import pytest

from opvi.app import cli

yaml = pytest.importorskip("yaml")
FOLDER = Path(__file__).parents[1] / "deploy"


def test_compose_names_services_files_and_commands_that_exist():
    made = yaml.safe_load((FOLDER / "compose.yaml").read_text())
    services = made["services"]
    assert set(services) == {"nats", "stream", "learn", "serve", "prometheus"}
    for service in services.values():
        assert set(service.get("depends_on", [])) <= set(services)
        assert set(service.get("secrets", [])) <= set(made["secrets"])
        named = {volume.partition(":")[0] for volume in service.get("volumes", []) if not volume.startswith(".")}
        assert named <= set(made["volumes"])
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
    for name in ("learn", "serve"):
        words = [re.sub(r"\$\{TARGET.*\}", "y", word) for word in services[name]["command"]]
        options = cli.parser().parse_args(words)
        assert options.handler.__name__ == name
        assert str(options.run) == "/runs/delivery"
    assert options.readonly
    assert options.token_file
    build = services["learn"]["build"]
    assert (FOLDER / build["context"] / build["dockerfile"]).is_file()


def test_prometheus_asks_the_server_that_compose_starts():
    made = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    (job,) = made["scrape_configs"]
    assert job["static_configs"][0]["targets"] == ["serve:8000"]
    assert job["authorization"]["credentials_file"] == "/run/secrets/token"


def test_the_recipe_copies_what_is_there_and_installs_extras_that_exist():
    import tomllib

    lines = re.sub(r"\\\n\s*", "", (FOLDER / "Dockerfile").read_text()).splitlines()
    steps = [line.split(None, 1) for line in lines if line and not line.startswith("#")]
    assert steps[0][0] == "FROM"
    known = {"FROM", "WORKDIR", "COPY", "RUN", "USER", "VOLUME", "EXPOSE", "STOPSIGNAL", "ENTRYPOINT", "CMD"}
    assert {step for step, _ in steps} <= known
    for step, words in steps:
        if step == "COPY":
            assert all((FOLDER.parent / name).exists() for name in words.split()[:-1])
    extras = set(re.search(r"\.\[([\w,]+)\]", " ".join(lines))[1].split(","))
    about = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text())
    assert extras <= set(about["project"]["optional-dependencies"])
