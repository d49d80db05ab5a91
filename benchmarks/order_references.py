"""Exact posteriors for `benchmarks.orders`: closed forms, or long runs of NUTS in double precision on all rows at once.

`python -m benchmarks.orders references`. What is in the file is kept while rows and model are the same.
"""

import ast
import hashlib
import inspect
import json
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.diagnostics import effective_sample_size, gelman_rubin
from numpyro.infer import MCMC, NUTS
from scipy.optimize import minimize

import opvi
from benchmarks.order_models import FAMILIES, Family
from benchmarks.parallel import keep
from benchmarks.stamp import stamp
from opvi.types import Tree

FILE = "orders-references.json"
CHAINS, WARM_UP, SAMPLES, ACCEPTED = 4, 1000, 4000, 0.9
DENSE = 20  # parameters up to which NUTS adapts a full mass matrix
Density = Callable[[jax.Array], jax.Array]


def mark(family: Family, rows: Tree) -> str:
    """Return a hash of a family's code and rows: its reference is kept as long as it stays the same."""
    make = family.make if isinstance(family.make, partial) else partial(family.make)
    how = "exact" if family.exact else f"{CHAINS} {WARM_UP} {SAMPLES} {ACCEPTED}"
    code = ast.unparse(ast.parse(inspect.getsource(make.func)))  # without comments and line breaks
    text = f"{code} {make.args} {how}"
    leaves = b"".join(np.ascontiguousarray(leaf).tobytes() for leaf in jax.tree.leaves(rows))
    return hashlib.sha256(text.encode() + leaves).hexdigest()[:16]


def reference(family: Family, rows: Tree | None = None) -> dict[str, Any]:
    """Return the means and sds of the posterior of a family's rows, or of other rows, and its log evidence."""
    start, given = time.perf_counter(), family.rows.data if rows is None else rows
    if family.exact is not None:
        exact = family.exact(family.rows._replace(data=given))
        found = {"how": "exact", "mean": exact.mean.tolist(), "sd": exact.sd.tolist()}
        found["log evidence"] = exact.log_evidence
    else:
        found = by_nuts(family, given)
    return {"mark": mark(family, given), **found, "seconds": time.perf_counter() - start}


def by_nuts(family: Family, rows: Tree) -> dict[str, Any]:
    """Return what four long chains find, in coordinates in which the posterior is nearly round."""
    if jnp.zeros(()).dtype != jnp.float64:
        raise RuntimeError("references need double precision: run `python -m benchmarks.orders references`.")
    log_density = density(family.target, rows)
    center, back = laplace(log_density, family.target)
    dim = len(center)
    kernel = NUTS(
        potential_fn=lambda z: -log_density(center + back @ z),
        target_accept_prob=ACCEPTED,
        dense_mass=dim <= DENSE,
    )
    how = {"num_warmup": WARM_UP, "num_samples": SAMPLES, "num_chains": CHAINS, "chain_method": "vectorized"}
    chain = MCMC(kernel, progress_bar=False, **how)
    chain.run(jax.random.key(0), init_params=0.5 * jax.random.normal(jax.random.key(1), (CHAINS, dim)))
    z = np.asarray(chain.get_samples(group_by_chain=True))
    draws = np.asarray(center) + z @ np.asarray(back).T
    flat = draws.reshape(-1, dim)
    evidence, error = log_evidence(log_density, draws)
    return {
        "how": "NUTS",
        "mean": flat.mean(0).tolist(),
        "sd": flat.std(0).tolist(),
        "R-hat": float(gelman_rubin(draws).max()),
        "effective": float(effective_sample_size(draws).min()),
        "log evidence": evidence + family.prior_gap(),
        "log evidence error": error,
    }


def density(target: opvi.Target, rows: Tree) -> Density:
    """Return the log density of all rows, up to what the prior lacks."""
    held = jax.tree.map(double, rows)

    def log_density(v: jax.Array) -> jax.Array:
        params = target.unravel(v)
        return target.log_prior(params) + target.log_likelihood(params, held).sum()

    return log_density


def double(leaf: np.ndarray) -> jax.Array:
    """Return numbers in double precision, others as they are."""
    return jnp.asarray(leaf, jnp.float64) if np.issubdtype(leaf.dtype, np.floating) else jnp.asarray(leaf)


def laplace(log_density: Density, target: opvi.Target) -> tuple[jax.Array, jax.Array]:
    """Return the mode, and a root of the covariance there."""
    both = jax.jit(jax.value_and_grad(lambda v: -log_density(v)))

    def ask(v: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = both(jnp.asarray(v))
        return float(value), np.asarray(gradient)

    start = np.asarray(target.ravel(target.init(jax.random.key(2))), float)
    v = minimize(ask, start, jac=True, method="L-BFGS-B", options={"maxiter": 2000}).x
    precision = -np.asarray(jax.jit(jax.hessian(log_density))(jnp.asarray(v)))
    values, vectors = np.linalg.eigh((precision + precision.T) / 2)
    values = np.maximum(values, 1e-6 * values.max())
    return jnp.asarray(v), jnp.asarray(vectors / np.sqrt(values))


def log_evidence(log_density: Density, draws: np.ndarray) -> tuple[float, float]:
    """Return the log integral of the density and its standard error: a bridge from half of the draws to the others."""
    length, dim = draws.shape[1:]
    halves = draws[:, : length // 2].reshape(-1, dim), draws[:, length // 2 :].reshape(-1, dim)
    many = jax.jit(lambda v: jax.lax.map(log_density, v, batch_size=16))
    rng, found = np.random.default_rng(0), []
    for fitted, others in (halves, halves[::-1]):
        fitted, others = fitted[::2], others[::2]
        mean, root = fitted.mean(0), np.linalg.cholesky(np.cov(fitted.T).reshape(dim, dim))
        constant = -dim / 2 * math.log(2 * math.pi) - np.log(np.diag(root)).sum()
        u = rng.normal(size=others.shape)
        at = np.linalg.solve(root, (others - mean).T).T
        of_draws = np.asarray(many(others)) - constant + (at**2).sum(1) / 2
        of_proposed = np.asarray(many(mean + u @ root.T)) - constant + (u**2).sum(1) / 2
        found.append(bridge(of_draws, np.nan_to_num(of_proposed, nan=-np.inf)))
    return float(np.mean(found)), float(abs(found[0] - found[1]) / 2)


def bridge(of_draws: np.ndarray, of_proposed: np.ndarray) -> float:
    """Return the log integral by the optimal bridge (Meng, Wong, 1996), from log ratios to a normalised density."""
    value = float(np.median(of_draws))
    for _ in range(1000):
        numerator = np.mean(1 / (1 + np.exp(np.clip(value - of_proposed, -700, 700))))
        denominator = np.mean(1 / (1 + np.exp(np.clip(of_draws - value, -700, 700))))
        change = math.log(numerator) - math.log(denominator)
        value += change
        if abs(change) < 1e-8:
            break
    return value


def sources() -> dict[str, str]:
    """Return what references depend on."""
    return stamp("benchmarks/order_models.py", "benchmarks/order_references.py")


def load(folder: Path) -> dict[str, Any]:
    """Return the references of a folder, by name."""
    file = folder / FILE
    return json.loads(file.read_text())["references"] if file.exists() else {}


def make(folder: Path, names: list[str]) -> None:
    """Make the references that are missing or of other rows, cheapest first."""
    jax.config.update("jax_enable_x64", True)
    kept = load(folder)
    for name in names:
        family = FAMILIES[name]
        if kept.get(name, {}).get("mark") == mark(family, family.rows.data):
            continue
        kept[name] = reference(family)
        said = {key: kept[name].get(key) for key in ("how", "R-hat", "effective", "log evidence", "seconds")}
        print(name, said, flush=True)
        made = {"command": "python -m benchmarks.orders references", "sources": sources(), "references": kept}
        keep(folder / FILE, made)
