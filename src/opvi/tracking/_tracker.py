r"""The right tracker for a target, with the reason."""

import math
from dataclasses import replace

import jax
import numpy as np

from opvi.filters import AdaptiveNoise, gauss_newton, kfac, sl_opvi
from opvi.filters._gauss_newton import blocks_for
from opvi.filters._prior import GaussianPrior, gaussian_prior
from opvi.flows import first_order
from opvi.targets import Target
from opvi.tracking import replay
from opvi.tracking._calibrated import calibrated
from opvi.tracking._drift import watched
from opvi.types import Array, Data, Sampler

FEW = 50  # parameters up to which the posterior itself is tracked, however it is shaped
WINDOW = 500  # rows kept for that
WINDOW_BYTES = 4e6  # that they may take
PARTICLES = {"few": 100, "many": 20}
# The half-life of linearisations, which go stale as a network learns: rows, and a share of the rows seen.
FRESH = 460.0, 0.23


def tracker(
    target: Target,
    *,
    example: Data = None,
    particles: int | None = None,
    half_life: float | None = None,
    budget: float = 64e6,
    memory_rows: int = 0,
    watch: bool = False,
) -> Sampler:
    """Return the sampler that suits a target, chosen from its size and shape. `tracker.about` says which, and why.

    Up to 50 parameters: `sl_opvi` tracks the posterior itself, with a window of 500 rows. Larger models with a
    Gaussian prior and a distribution head: Gauss–Newton particles, with full covariances where `budget` allows and
    blocks where it does not, or Kronecker factors where not even one hidden unit's would fit. Anything else:
    first-order OPVI. For raw data without a model of your own there are `opvi.regressor` and `opvi.classifier`.

    Args:
        target: the posterior to track.
        example: at least one row in the form the stream will have; needed to keep rows, which makes the posterior
            accurate where a surrogate alone is not. Ready-made models and those of `opvi.from_numpyro` know their rows.
        particles: the number of particles; 100 for few parameters, otherwise 20.
        half_life: in rows; data older than that count half. None never forgets, except that Gauss–Newton particles
            of networks for numbers let the oldest rows fade, because those were linearised at weights long gone: a
            half-life of 460 rows and 23 % of the rows seen. `math.inf` stops that too.
        budget: bytes for what particles remember of the past.
        memory_rows: choose the first-order sampler, and let it learn again from a sample of this many rows.
        watch: report changes of the data in `info.changed`.
    """
    if not isinstance(target, Target):
        raise TypeError(
            f"`target` is a {type(target).__name__}, but a tracker needs an `opvi.Target`, e.g. `opvi.mlp(...)` or "
            "`opvi.target(...)`; for raw data without a model use `opvi.regressor` or `opvi.classifier`."
        )
    for name, value in (("particles", 1 if particles is None else particles), ("budget", budget)):
        if not value > 0:
            raise ValueError(f"`{name}` is {value}, but must be greater than 0.")
    if memory_rows and example is None:
        raise ValueError(
            f"`memory_rows` is {memory_rows}, but rows can only be kept once their shapes are known: give `example`."
        )
    made = _choose(target, example, particles, half_life, budget, memory_rows)
    return watched(made) if watch else made


def _choose(
    target: Target, example: Data, particles: int | None, half_life: float | None, budget: float, memory_rows: int
) -> Sampler:
    d = target.dim
    if d <= FEW and not memory_rows:
        n = particles or PARTICLES["few"]
        example = target.example if example is None else example
        window = _window(example, target.most_kept or WINDOW)
        kept = f"a window of {window} rows" if window else "no stored rows (give `example`)"
        about = (
            f"SL-OPVI, {n} particles, {kept}: "
            f"{d} parameters are few enough to track the posterior itself; {_memory_of(half_life)}"
        )
        made = sl_opvi(target, example=example, memory_rows=window, half_life=_finite(half_life))
        return replace(made, particles=n, about=about)
    n = particles or PARTICLES["many"]
    blocks, unit = blocks_for(target, n, budget, np.dtype(np.float32))
    count, size = blocks.order.shape
    if target.predict is not None and not memory_rows and _suits(gaussian_prior(target), count):
        if count > 1 and size < unit and target.architecture is not None:
            about = (
                f"KFAC, {n} particles: covariances of {d} parameters would not fit {budget / 1e6:.0f} MB even one "
                f"hidden unit at a time; {_memory_of(half_life)}"
            )
            return calibrated(kfac(target, half_life=half_life or math.inf), target, particles=n, about=about)
        form = "full covariances" if count == 1 else f"covariances in {count} blocks of {size}"
        used = n * blocks.numbers * 4 / 1e6
        linear = target.architecture is not None and len(target.architecture.mlp.shapes) == 1
        usual = math.inf if _classes(target) else _fresh
        known = linear or half_life is not None or usual == math.inf
        about = (
            f"Gauss–Newton, {n} particles with {form}: {d} parameters take {used:.0f} of {budget / 1e6:.0f} MB; "
            f"{_memory_of(half_life) if known else 'half-life 460 rows + 23 % of those seen'}"
        )
        filtered = gauss_newton(
            target, half_life=usual if half_life is None else half_life, noise=AdaptiveNoise(), budget=budget
        )
        if linear:
            return replace(filtered, eased=True, particles=n, about=about)
        return calibrated(replace(filtered, eased=True), target, particles=n, about=about)
    if half_life is not None:
        raise ValueError(
            f"`half_life` is {half_life}, but the first-order sampler that suits this target has no memory that "
            "could fade; leave it out."
        )
    kept = f" and a reservoir of {memory_rows} rows, as asked for" if memory_rows else ""
    why = "" if memory_rows else f": {d} parameters, and no Gaussian prior with a distribution head to linearise"
    about = f"first-order OPVI with NAdam steps, {n} particles{kept}{why}"
    flow = replace(first_order(target), particles=n, about=about)
    sampler: Sampler = replay(flow, example, memory_rows=memory_rows) if memory_rows else flow
    return sampler if target.predict is None else calibrated(sampler, target, particles=None, about=about)


def _window(example: Data, most: int) -> int:
    """Return how many rows like the example are kept; none if the shape is unknown."""
    if example is None:
        return 0
    size = sum(np.asarray(leaf)[:1].nbytes for leaf in jax.tree.leaves(example))
    return min(most, int(WINDOW_BYTES // max(size, 1)))


def _suits(prior: GaussianPrior | None, blocks: int) -> bool:
    """Return whether Gauss–Newton particles can start from a prior; a correlated one needs full covariances."""
    return prior is not None and (prior.covariance is None or blocks == 1)


def _classes(target: Target) -> bool:
    """Return whether a target is a ready-made network for classes, whose rows are linearised where they have led."""
    return target.architecture is not None and target.architecture.head.classes


def _fresh(rows: Array) -> Array:
    return FRESH[0] + FRESH[1] * rows


def _finite(half_life: float | None) -> float | None:
    return None if half_life is None or math.isinf(half_life) else half_life


def _memory_of(half_life: float | None) -> str:
    return "nothing is forgotten" if _finite(half_life) is None else f"half-life {half_life:g} rows"
