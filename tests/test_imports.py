"""`import opvi` loads little: what few need is loaded when it is asked for."""

import subprocess
import sys

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
)


def loaded(code: str, before: str = ", jax, optax") -> set[str]:
    """The modules that this code loads, beyond those that JAX and optax load themselves."""
    program = f"import sys{before}; before = set(sys.modules)\n{code}\nprint(*sys.modules.keys() - before)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


def unwanted(modules: set[str]) -> set[str]:
    return {module for module in modules for name in REFUSED if module == name or module.startswith(f"{name}.")}


def test_opvi_loads_nothing_that_few_need():
    modules = loaded("import opvi; opvi.run")
    assert "opvi.scale.fleet" in modules
    assert unwanted(modules) == set()


def test_help_is_there_at_once():
    """The command's help, and a first `import opvi`, load neither JAX nor anything that an extra brings."""
    modules = loaded("from opvi.app import cli; cli.parser().format_help()", before="")
    assert "opvi.app.cli._learn" in modules
    assert not {"jax", "numpy", "scipy", "pyarrow", "rich", "jinja2", "http.server", "opvi.types"} & modules


def test_what_needs_scipy_loads_it():
    calls = (
        "opvi.regret.sample_kl([[0], [1], [3]], [[0], [1], [2]], 1)",
        "opvi.metrics.wasserstein2([[0, 0], [1, 1]], [[0, 0], [1, 2]])",
    )
    modules = unwanted(loaded("import opvi; " + "; ".join(calls)))
    assert {"scipy.spatial", "scipy.optimize"} <= modules
