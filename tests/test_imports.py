"""`import opvi` loads little: what few need is loaded when it is asked for."""

import subprocess
import sys
from pathlib import Path

import pytest

REFUSED = (
    "opvi.adapters",
    "opvi.app",
    "scipy",
    "jax.experimental.pallas",
    "jax._src.pallas",
    "concurrent.futures",
    "multiprocessing",
    "http",
    "socketserver",
    "asyncio",
    "sqlite3",
    "numpy.f2py",
    "pandas",
    "pyspark",
    "pyarrow",
    "sklearn",
    "matplotlib",
    "numpyro",
    "arviz",
    "blackjax",
    "river",
    "orbax",
    "rich",
    "jinja2",
    "filelock",
    "optax",
)


def loaded(code: str, before: str = ", jax") -> set[str]:
    """The modules that this code loads, beyond those that JAX loads itself."""
    program = f"import sys{before}; before = set(sys.modules)\n{code}\nprint(*sys.modules.keys() - before)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


def unwanted(modules: set[str]) -> set[str]:
    return {module for module in modules for name in REFUSED if module == name or module.startswith(f"{name}.")}


def test_opvi_loads_nothing_that_few_need():
    modules = loaded("import opvi; opvi.run; opvi.regressor(2); opvi.classifier(2, 2)")
    assert "opvi.scale.fleet" in modules
    assert unwanted(modules) == set()


def test_help_is_there_at_once():
    """The command's help, and a first `import opvi`, load neither JAX nor anything that an extra brings."""
    modules = loaded("from opvi.app import cli; cli.parser().format_help()", before="")
    assert "opvi.app.cli._learn" in modules
    assert not {"jax", "numpy", "scipy", "pyarrow", "rich", "jinja2", "http.server", "opvi.types"} & modules


def test_predictions_are_written_without_pandas():
    """Arrow's own way from an array imports it, which takes a quarter of a second."""
    code = """
from opvi.adapters._tables._writing import Writer
import numpy
with Writer("/dev/null", "csv") as out:
    out.write({"mean": numpy.ones(2), "label": ["a", "b"], "row": numpy.arange(2)})
"""
    modules = loaded(code, before=", io")
    assert "pyarrow.csv" in modules or "pyarrow._csv" in modules
    assert "pandas" not in modules


def test_predictions_need_neither_scipy_nor_templates_of_reports():
    code = """
from opvi.app.cli._common import prepare
prepare(learns=False)
import opvi.app.cli._predict, opvi.app.learn._predict
"""
    modules = loaded(code)
    assert "opvi.app.report" in modules
    assert not {"scipy.linalg", "jinja2", "opvi.app.report._page"} & modules


@pytest.mark.slow
def test_predictions_by_programs_on_disk_do_not_load_scipy(tmp_path, monkeypatch):
    monkeypatch.setenv("OPVI_PROGRAMS", str(tmp_path / "programs"))
    monkeypatch.chdir(tmp_path)
    Path("table.csv").write_text("a,b,y\n" + "".join(f"{i % 7},{i % 5},{i % 7 - i % 5}\n" for i in range(60)))
    call = "from opvi.app.cli import main; main({})".format
    loaded(call(["learn", "table.csv", "--target", "y", "--hidden", "none", "--particles", "4"]))
    for _ in range(2):
        modules = loaded(call(["predict", "table.run", "table.csv", "-o", "predicted.csv"]))
    assert "jax.experimental.serialize_executable" in modules
    assert "scipy.linalg" not in modules


def test_what_needs_scipy_loads_it():
    calls = (
        "opvi.regret.sample_kl([[0], [1], [3]], [[0], [1], [2]], 1)",
        "opvi.metrics.wasserstein2([[0, 0], [1, 1]], [[0, 0], [1, 2]])",
    )
    modules = unwanted(loaded("import opvi; " + "; ".join(calls)))
    assert {"scipy.spatial", "scipy.optimize"} <= modules
