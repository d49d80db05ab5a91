"""NumPyro's own example models, given to `opvi.from_numpyro` as they are.

`python -m benchmarks.numpyro_upstream --numpyro FOLDER --out docs/results`, with a checkout of NumPyro in FOLDER. Its
modules are imported from there, and nothing of theirs is copied; data that an example would download are drawn here,
in the shapes it has. A model is *accepted* if a target is made of it, the target's density is NumPyro's, and
20 particles of a first-order sampler, or of `opvi.tracker` (where that one stops, and with `--track`), learn three
batches of rows and stay finite; *refused* if opvi says why not; *stopped* or *wrong* if the learning or the density is;
anything else is a *raw error*. Models of one data set whose parts depend on one another get it as one row
(`series=True`); what is not observed is then closed over where the model asks for its values.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import time
import traceback
import types
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import jax
import jax.numpy as jnp
import numpyro
from numpyro.infer.util import potential_energy

import opvi
from benchmarks.numpyro_upstream_cases import CASES, Case
from benchmarks.parallel import finished, keep
from benchmarks.stamp import stamp
from opvi.flows import first_order

COMMAND = "python -m benchmarks.numpyro_upstream --numpyro FOLDER --out docs/results"
SOURCES = (
    *(f"src/opvi/adapters/{name}.py" for name in ("numpyro", "_program", "_sites", "_local", "_choices", "_heads")),
    "benchmarks/numpyro_upstream.py",
    "benchmarks/numpyro_upstream_cases.py",
)
BATCH, ROUNDS, PARTICLES = 20, 3, 20
CLOSE = 1e-3  # relative difference between two densities in float32


def bessel_ive(order: jax.Array, z: jax.Array) -> jax.Array:
    """Return TensorFlow Probability's function of that name, for whole orders: a sum over a circle."""
    angle = 2 * jnp.pi * jnp.arange(64) / 64
    return (jnp.exp(z * jnp.cos(angle) - jnp.abs(z)) * jnp.cos(jnp.asarray(order)[..., None] * angle)).mean(-1)


def stand_ins() -> None:
    """Put something in the place of modules that examples import and that are not installed: most only draw."""
    for name in (
        "seaborn",
        "wordcloud",
        "jaxns",
        "numpyro.contrib.nested_sampling",
        "tensorflow_probability",
        "tensorflow_probability.substrates",
    ):
        sys.modules.setdefault(name, MagicMock())
    sys.modules["tensorflow_probability.substrates"].jax.math.bessel_ive = bessel_ive
    if importlib.util.find_spec("funsor") is None:
        marks = types.ModuleType("numpyro.contrib.funsor")
        marks.config_enumerate = lambda model: model  # type: ignore[attr-defined]
        sys.modules["numpyro.contrib.funsor"] = marks


def imported(folder: Path, file: str) -> types.ModuleType:
    """Return an example's module."""
    stand_ins()
    sys.path.insert(0, str((folder / file).parent))
    spec = importlib.util.spec_from_file_location(Path(file).stem, folder / file)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(folder / file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def upstream(folder: Path, case: Case) -> Callable[..., Any]:
    """Return the example's model as a function of rows."""
    module = imported(folder, case.file)
    return case.call(getattr(module, case.function))


def difference(target: Any, model: Callable[..., Any], rows: Any, data: Any) -> float | None:
    """Return how far prior and rows together are from NumPyro's own density; None where it cannot be compared.

    NumPyro sums latents of rows out only with another library, and scores no plate that would draw a subsample.
    """
    if target.program.local:
        return None
    params = target.init(jax.random.key(0))
    arguments = rows if isinstance(rows, tuple) else (rows,)
    try:
        theirs = -potential_energy(model, [jnp.asarray(a) for a in arguments], {}, params)
    except ValueError:
        return None
    ours = target.log_prior(params) + target.log_likelihood(params, jax.tree.map(jnp.asarray, data)).sum()
    return float(abs(ours - theirs) / (1 + abs(theirs)))


def said_by_opvi(error: BaseException) -> bool:
    """Return whether opvi itself raised an error, with a sentence."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return "opvi" in Path(last.filename).parts and isinstance(error, TypeError | ValueError)


def learnt(target: Any, sampler: Any, data: Any) -> str:
    """Return how a sampler takes the first batches."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state, _ = opvi.run(sampler, opvi.stream(data, BATCH), 0, rounds=ROUNDS)
            values = target.constrain(state.particles).values()
    except Exception as error:  # any error is a result here
        return f"{type(error).__name__}: {error}"
    return "finite" if all(bool(jnp.isfinite(value).all()) for value in values) else "not finite"


def tried(folder: Path, name: str, track: bool) -> dict[str, Any]:
    """Return what became of a model."""
    jax.config.update("jax_disable_most_optimizations", True)  # most of the time would be spent compiling
    jax.config.update("jax_enable_x64", False)  # an example before may have asked for it
    begun = time.process_time()
    case = CASES[name]
    try:
        model = upstream(folder, case)
        rows = case.rows()
        data = jax.tree.map(lambda a: a[None], rows) if case.series else rows
        target = opvi.from_numpyro(model, data, series=case.series)
        off = difference(target, model, rows, data)
    except Exception as error:
        kind = "refused" if said_by_opvi(error) else "raw error"
        return {"what": kind, "why": f"{type(error).__name__}: {error}"}
    found = {"parameters": int(target.dim), "summed out": list(target.program.local), "series": case.series}
    tracker = opvi.tracker(target, particles=PARTICLES)
    found |= {
        "difference": off,
        "sampler": tracker.about,
        "flow": learnt(target, replace(first_order(target), particles=PARTICLES), data),
    }
    if track or found["flow"] != "finite":
        found["tracked"] = learnt(target, tracker, data)
    end = found.get("tracked", found["flow"])
    what = "wrong" if off is not None and off > CLOSE else "accepted" if end == "finite" else "stopped"
    return {"what": what, **found, "seconds": round(time.process_time() - begun, 1)}


def commit(folder: Path) -> str:
    """Return the commit of the checkout, if it has one."""
    asked = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    found = subprocess.run(asked, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def main() -> None:
    """Try models, and write `numpyro-upstream.json`; results of others stay."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--numpyro", type=Path, required=True, help="a checkout of NumPyro")
    parser.add_argument("--commit", help="of the checkout, if it is not a git folder")
    parser.add_argument("--out", type=Path, default=Path("bench-output"), help="folder for numpyro-upstream.json")
    parser.add_argument("--models", nargs="+", default=list(CASES))
    parser.add_argument("--track", action="store_true", help="try `opvi.tracker`, too, which compiles for long")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "numpyro-upstream.json"
    done = json.loads(file.read_text())["results"] if file.exists() else {}
    tasks = [(options.numpyro, name, options.track) for name in options.models]
    for (_, name, _), found in finished(tried, tasks, options.jobs):
        done[name] = found
        print(name, found, flush=True)
        keep(file, written(done, options.commit or commit(options.numpyro)))


def written(done: dict[str, dict[str, Any]], version: str) -> dict[str, Any]:
    """Return what the file holds: results in the order of the cases, and how many there are of each kind."""
    results = {name: done[name] for name in CASES if name in done}
    accepted = {name: found for name, found in results.items() if found["what"] == "accepted"}
    counts = {"models": len(results)} | {kind: sum(r["what"] == kind for r in results.values()) for kind in KINDS}
    counts |= {"tracked": sum(found.get("tracked") == "finite" for found in accepted.values())}
    counts |= {"row by row": sum(not found["series"] for found in accepted.values())}
    counts |= {"as a series": sum(found["series"] for found in accepted.values())}
    counts |= {"files": len({CASES[n].file for n in results}), "files accepted": len({CASES[n].file for n in accepted})}
    about = {"command": COMMAND, "sources": stamp(*SOURCES)}
    return {
        **about,
        "numpyro": {"commit": version, "installed": numpyro.__version__},
        "counts": counts,
        "results": results,
    }


KINDS = ("accepted", "refused", "stopped", "wrong", "raw error")

if __name__ == "__main__":
    main()
