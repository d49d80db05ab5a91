"""`import opvi` loads little: what few need is loaded when it is asked for."""

import subprocess
import sys

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


def loaded(code: str) -> set[str]:
    """The modules that this code loads, beyond those that JAX and optax load themselves."""
    program = f"import sys, jax, optax; before = set(sys.modules)\n{code}\nprint(*sys.modules.keys() - before)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


def unwanted(modules: set[str]) -> set[str]:
    return {module for module in modules for name in REFUSED if module == name or module.startswith(f"{name}.")}


def test_opvi_loads_nothing_that_few_need():
    modules = loaded("import opvi")
    assert "opvi.scale.fleet" in modules
    assert unwanted(modules) == set()


@pytest.mark.parametrize(
    ("code", "module"),
    [
        ("opvi.metrics.wasserstein2([[0, 0], [1, 1]], [[0, 0], [1, 2]])", "scipy.optimize"),
        ("opvi.regret.sample_kl([[0], [1], [3]], [[0], [1], [2]], 1)", "scipy.spatial"),
    ],
)
def test_what_needs_scipy_loads_it(code, module):
    assert module in unwanted(loaded(f"import opvi; {code}"))
