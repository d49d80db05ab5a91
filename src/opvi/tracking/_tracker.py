r"""The right tracker for a target, with the reason."""

import math
from dataclasses import replace

import numpy as np

from opvi._steps import NOT_THE_POSTERIOR
from opvi.filters import AdaptiveNoise, gauss_newton, ibis, kfac, sl_opvi
from opvi.filters._gauss_newton import blocks_for
from opvi.filters._prior import GaussianPrior, gaussian_prior
from opvi.filters.ibis._ibis import MEMORY
from opvi.flows import first_order
from opvi.targets import Target
from opvi.tracking._calibrated import calibrated
from opvi.tracking._drift import watched
from opvi.types import Array, Data, Sampler

FEW = 50  # parameters up to which networks, too, are few enough for their posterior
MOST = 1000  # parameters up to which the posterior of other models is tracked
PARTICLES = 20  # of samplers for many parameters
# The half-life of linearisations, which go stale as a network learns: rows, and a share of the rows seen.
FRESH = 460.0, 0.23
OPERATIONS = 100  # per particle, parameter and row, on a stream that stands still: measured on logistic regressions


def tracker(
    target: Target,
    *,
    memory: float = MEMORY,
    example: Data = None,
    particles: int | None = None,
    half_life: float | None = None,
    budget: float = 64e6,
    watch: bool = False,
) -> Sampler:
    """Return the sampler that suits a target, chosen from its size and shape. `tracker.about` says which, and why.

    Up to 1,000 parameters (50 if the model is a network with hidden layers): `ibis`, which tracks the posterior of all
    rows, in any order, and stores them. For larger models, `about` begins with "not the posterior:". Those with a
    Gaussian prior and a distribution head get Gauss–Newton particles, with full covariances where `budget` allows and
    blocks where it does not, or Kronecker factors where not even one hidden unit's would fit. Anything else gets
    first-order OPVI. For raw data without a model of your own there are `opvi.regressor` and `opvi.classifier`.

    Args:
        target: the posterior to track.
        memory: bytes for stored rows, at most; room for them grows with the stream. 0 stores none: then models of up to
            50 parameters get `sl_opvi`, which approximates the past by a polynomial.
        example: rows in the form the stream will have; needed only for fleets and loops of your own that are compiled
            as a whole, where room for rows must be there from the start.
        particles: the number of particles; if omitted, that of the sampler.
        half_life: in rows; data older than that count half. None never forgets, except that Gauss–Newton particles
            of networks for numbers let the oldest rows fade, because those were linearised at weights long gone: a
            half-life of 460 rows and 23 % of the rows seen. `math.inf` stops that too.
        budget: bytes for what particles of large models remember of the past.
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
    if not memory >= 0:
        raise ValueError(f"`memory` is {memory}, but must be a number of bytes of at least 0.")
    made = _choose(target, memory, example, particles, half_life, budget)
    return watched(made) if watch else made


def _choose(
    target: Target, memory: float, example: Data, particles: int | None, half_life: float | None, budget: float
) -> Sampler:
    d = target.dim
    hidden = target.is_network
    if memory and d <= (FEW if hidden else MOST):
        made = ibis(target, memory=memory, half_life=half_life, particles=particles, example=example)
        cost = made.particles * d * OPERATIONS / 1e6
        about = (
            f"IBIS, {made.particles} particles, rows stored in up to {memory / 1e6:g} MB: the posterior of all rows, "
            f"in any order; {_memory_of(half_life)}. A row costs about {cost:.2g} million operations"
        )
        return replace(made, about=about)
    if d <= FEW:
        polynomial = sl_opvi(target, half_life=_finite(half_life))
        about = (
            f"{NOT_THE_POSTERIOR} SL-OPVI, {particles or polynomial.particles} particles, no stored rows (`memory=0`): "
            f"a polynomial stands for the past; {_memory_of(half_life)}"
        )
        return replace(polynomial, particles=particles or polynomial.particles, about=about)
    n = particles or PARTICLES
    blocks, unit = blocks_for(target, n, budget, np.dtype(np.float32))
    count, size = blocks.order.shape
    if target.predict is not None and _suits(gaussian_prior(target), count):
        if count > 1 and size < unit and target.architecture is not None:
            about = (
                f"{NOT_THE_POSTERIOR} KFAC, {n} particles: covariances of {d} parameters would not fit "
                f"{budget / 1e6:.0f} MB even one hidden unit at a time; {_memory_of(half_life)}"
            )
            return calibrated(replace(kfac(target, half_life=half_life or math.inf), about=about), target, particles=n)
        form = "full covariances" if count == 1 else f"covariances in {count} blocks of {size}"
        used = n * blocks.numbers * 4 / 1e6
        usual = math.inf if _classes(target) else _fresh
        known = not hidden or half_life is not None or usual == math.inf
        about = (
            f"{NOT_THE_POSTERIOR} Gauss–Newton, {n} particles with {form}: {d} parameters take {used:.0f} of "
            f"{budget / 1e6:.0f} MB; {_memory_of(half_life) if known else 'half-life 460 rows + 23 % of those seen'}"
        )
        filtered = gauss_newton(
            target, half_life=usual if half_life is None else half_life, noise=AdaptiveNoise(), budget=budget
        )
        filtered = replace(filtered, eased=True, particles=n, about=about)
        if target.architecture is not None and not hidden:
            return filtered
        return calibrated(filtered, target, particles=n)
    if half_life is not None:
        raise ValueError(
            f"`half_life` is {half_life}, but the first-order sampler that suits this target has no memory that "
            "could fade; leave it out."
        )
    about = (
        f"{NOT_THE_POSTERIOR} first-order OPVI with NAdam steps, {n} particles: {d} parameters, and no Gaussian prior "
        "with a distribution head to linearise"
    )
    flow = replace(first_order(target), particles=n, about=about)
    return flow if target.predict is None else calibrated(flow, target, particles=None)


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
