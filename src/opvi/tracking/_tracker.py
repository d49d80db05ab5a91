r"""One front door: the right tracker for a target, with the reason why."""

import math
from typing import Any

import numpy as np

from opvi.filters import AdaptiveNoise, gauss_newton, kfac, sl_opvi
from opvi.filters._gauss_newton import blocks_for, has_gaussian_prior
from opvi.flows import first_order
from opvi.predictive import Predictive
from opvi.predictive import predict as predict_with
from opvi.targets import Target
from opvi.tracking import replay
from opvi.tracking._calibrated import calibrated
from opvi.tracking._drift import watched
from opvi.types import Algorithm, Array, Data, Key, Tracker

FEW = 50  # parameters up to which the posterior itself is tracked, however it is shaped
WINDOW = 500  # rows kept for that
PARTICLES = {"few": 100, "many": 20}
# The half-life of linearisations, which go stale as a network learns: rows, and a share of the rows seen.
FRESH = 460.0, 0.23


def tracker(
    target: Target,
    *,
    example: Data = None,
    particles: int | None = None,
    half_life: float | None = None,
    memory: float = 64e6,
    replay_rows: int = 0,
    watch: bool = False,
) -> Any:
    """The sampler that suits a target, chosen from its size and shape. `tracker.about` says which, and why.

    Up to 50 parameters: `sl_opvi` tracks the posterior itself. Larger models with a Gaussian prior and a
    distribution head: Gauss–Newton particles, with full covariances where `memory` allows and blocks where it does
    not, or Kronecker factors where not even one hidden unit's would fit. Anything else: first-order OPVI. For
    raw data without a model of your own there are `opvi.regressor` and `opvi.classifier`.

    Args:
        target: the posterior to track.
        example: data of at least one row as the stream will bring them; needed to keep rows.
        particles: how many; 100 for few parameters, otherwise 20.
        half_life: in rows; data older than that count half. None never forgets, except that Gauss–Newton particles
            let the oldest rows fade, since what they remember was linearised at weights long gone: a half-life of
            460 rows and 23 % of the rows seen. `math.inf` stops that too.
        memory: bytes for what particles remember of the past.
        replay_rows: choose the first-order sampler, and let it learn again from a sample of so many rows.
        watch: report changes of the data in `info.changed`.
    """
    if not isinstance(target, Target):
        raise TypeError(
            f"`target` is a {type(target).__name__}, but a tracker needs an `opvi.Target`, e.g. `opvi.mlp(...)` or "
            "`opvi.target(...)`; for raw data without a model use `opvi.regressor` or `opvi.classifier`."
        )
    for name, value in (("particles", 1 if particles is None else particles), ("memory", memory)):
        if not value > 0:
            raise ValueError(f"`{name}` is {value}, but must be greater than 0.")
    if replay_rows and example is None:
        raise ValueError(
            f"`replay_rows` is {replay_rows}, but rows can only be kept once their shapes are known: give `example`."
        )
    made = _choose(target, example, particles, half_life, memory, replay_rows)
    return watched(made) if watch else made


def _choose(
    target: Target, example: Data, particles: int | None, half_life: float | None, memory: float, replay_rows: int
) -> Any:
    d = target.dim
    if d <= FEW and not replay_rows:
        n = particles or PARTICLES["few"]
        window = WINDOW if example is not None else 0
        about = (
            f"SL-OPVI, {n} particles, {f'a window of {window} rows' if window else 'no stored rows'}: "
            f"{d} parameters are few enough to track the posterior itself; {_memory_of(half_life)}"
        )
        return _plain(
            sl_opvi(target, example=example, memory_rows=window, half_life=_finite(half_life)), target, n, about
        )
    n = particles or PARTICLES["many"]
    if target.predict is not None and not replay_rows and has_gaussian_prior(target):
        blocks, unit = blocks_for(target, n, memory, np.dtype(np.float32))
        count, size = blocks.order.shape
        if count > 1 and size < unit and target.architecture is not None:
            about = (
                f"KFAC, {n} particles: covariances of {d} parameters would not fit {memory / 1e6:.0f} MB even one "
                f"hidden unit at a time; {_memory_of(half_life)}"
            )
            made: Any = kfac(target, half_life=half_life or math.inf)
            return calibrated(made, target, particles=n, about=about)
        form = "full covariances" if count == 1 else f"covariances in {count} blocks of {size}"
        used = n * blocks.numbers * 4 / 1e6
        about = (
            f"Gauss–Newton, {n} particles with {form}: {d} parameters take {used:.0f} of {memory / 1e6:.0f} MB; "
            f"{'half-life 460 rows + 23 % of those seen' if half_life is None else _memory_of(half_life)}"
        )
        sampler: Any = gauss_newton(
            target, half_life=_fresh if half_life is None else half_life, noise=AdaptiveNoise(), budget=memory
        )
        return calibrated(sampler, target, particles=n, about=about)
    sampler = first_order(target)
    kept = ""
    if replay_rows:
        sampler = replay(sampler, example, memory_rows=replay_rows)
        kept = f" and a reservoir of {replay_rows} rows, as asked for"
    why = "" if replay_rows else f": {d} parameters, and no Gaussian prior with a distribution head to linearise"
    about = f"first-order OPVI with NAdam steps, {n} particles{kept}{why}"
    if half_life is not None:
        raise ValueError(
            f"`half_life` is {half_life}, but the first-order sampler that suits this target has no memory to fade "
            "beyond its step; leave it out."
        )
    return (
        _plain(sampler, target, n, about)
        if target.predict is None
        else calibrated(sampler, target, particles=n, about=about)
    )


def _fresh(rows: Array) -> Array:
    return FRESH[0] + FRESH[1] * rows


def _plain(algorithm: Algorithm, target: Target, particles: int, about: str) -> Tracker:
    """A sampler whose particles are the posterior: nothing to calibrate."""

    def init(key: Key, particles_: Any = None) -> Any:
        return algorithm.init(key, particles if particles_ is None else particles_)

    def predict(state: Any, x: Any) -> Predictive:
        return predict_with(target, state.particles, x)

    return Tracker(init, algorithm.step, predict, about)


def _finite(half_life: float | None) -> float | None:
    return None if half_life is None or math.isinf(half_life) else half_life


def _memory_of(half_life: float | None) -> str:
    return "nothing is forgotten" if _finite(half_life) is None else f"half-life {half_life:g} rows"
