r"""Particles as ArviZ data: posterior, predictions, log likelihoods, the data, and the position in the stream."""

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from opvi._steps import dealt, posterior_draws
from opvi.filters import GaussNewtonState, IBISState, SLOPVIState
from opvi.predictive import predict
from opvi.running._rows import batch
from opvi.targets import Target, cast
from opvi.types import Array, ArrayLike, Data, Key, Particles, Sampler, Seed, State, Tree, as_key, shapes_of

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # ArviZ 0.x announces 1.0 once a day
        try:
            import arviz
        except FileNotFoundError:  # of two processes that are ArviZ's first of a day, one takes the other's note of it
            import arviz
except ImportError as error:
    raise ImportError('`opvi.to_arviz` needs ArviZ: `pip install "opvi[arviz]"`.') from error

Group = dict[str, Array]
SPREAD_DRAWS = 1000  # from particles that are not all there is, if nobody says how many


def to_arviz(
    state: State,
    model: Target | Sampler,
    data: Data = None,
    *,
    constant_data: Mapping[str, ArrayLike] | None = None,
    draws: int | None = None,
    coords: Mapping[str, Sequence[object]] | None = None,
    dims: Mapping[str, Sequence[str]] | None = None,
    key: Seed = 0,
) -> Any:
    """Return particles and what they say about some rows as ArviZ's container: `InferenceData`, or a `DataTree`.

    The draws of the one chain are the particles, or, of a sampler whose particles hold covariances
    (`opvi.gauss_newton`) or weights (`opvi.ibis`, `opvi.sl_opvi`), draws from what it believes:
    `sampler.draws(state, key, n)`. Attributes hold the position in the stream. Particles are placed, not drawn one
    after the other, so ESS and R-hat mean nothing: `az.summary(..., kind="stats")` leaves them out.

    Args:
        state: what `opvi.run` or a step returned. A bank's members are resampled by their weights.
        model: the sampler, whose predictions are then those in the container, calibrated as they are; or its target,
            for what the particles alone predict. Names are those of the target's parameters, or of the sites of
            `opvi.from_numpyro`'s model, in the model's own units; `opvi.regressor` and `opvi.classifier` have no
            target, and their particles are plain numbers.
        data: rows to predict and score, in the layout of the stream; log likelihoods take particles × rows numbers.
        constant_data: name -> array, kept as they are next to the data's inputs.
        draws: how many draws; by default the particles, or 1,000 if they hold covariances or weights.
        coords: name of a dimension -> its labels, as ArviZ takes them.
        dims: name of a variable -> the names of its dimensions, after chain and draw; rows are `row` by
            themselves, and axes of NumPyro sites have the names of their plates.
        key: a JAX key or an integer seed for the draws.
    """
    sampler = None if isinstance(model, Target) else model
    if sampler is not None and not hasattr(sampler, "step"):
        raise TypeError(f"`model` is a {type(model).__name__}, but must be a sampler or an `opvi.Target`.")
    if not hasattr(state, "particles"):
        raise TypeError(f"`state` is a {type(state).__name__}, but must be a sampler's: `state, _ = opvi.run(...)`.")
    target = model if isinstance(model, Target) else _target_of(model)
    particles, note = _drawn(state, sampler, draws, as_key(key))
    if target is None:
        scaled = "in the sampler's own units: `opvi.regressor` and `opvi.classifier` standardise inputs and outputs"
        note = f"{scaled}; {note}" if note else scaled
    about: dict[str, str | int] = {
        "inference_library": "opvi",
        "inference_library_version": version("opvi"),
        "rounds": int(state.round),
        "rows": int(state.rows),
        **({"note": note} if note else {}),
        **({} if sampler is None else {"sampler": str(sampler)}),
    }
    groups = {"posterior": _posterior(target, particles)}
    if data is not None:
        groups |= _about_rows(state, particles, target, sampler, data, as_key(key))
    if constant_data is not None:
        groups["constant_data"] = {**groups.get("constant_data", {}), **constant_data}
    program = getattr(target, "program", None)  # of a NumPyro model
    plates = {} if program is None else dict(zip(program.names, program.axes, strict=True))
    return _container(groups, about, coords, plates | dict(dims or {}))


def _drawn(state: State, sampler: Sampler | None, draws: int | None, key: Key) -> tuple[Particles, str]:
    """Return the draws that stand for the posterior, and a note on what they are."""
    inner: Any = state
    while hasattr(inner, "inner"):
        inner = inner.inner
    spread = isinstance(inner, GaussNewtonState)
    drawn = spread or isinstance(inner, IBISState | SLOPVIState)
    if draws is not None and draws < 1:
        raise ValueError(f"`draws` is {draws}, but must be at least 1.")
    if sampler is not None and (drawn or draws is not None):
        count = draws or SPREAD_DRAWS
        return posterior_draws(sampler, state, key, count), f"{count} draws from the posterior"
    particles, note = _particles(state)
    if draws is not None:
        particles = dealt(particles, key, draws)
    if spread:
        note = "particles alone, narrower than the posterior by what their covariances hold: give the sampler"
    return particles, note


def _target_of(sampler: object) -> Target | None:
    """Return the target of a sampler or of the samplers it wraps or mixes; None if there is not exactly one."""
    found = getattr(sampler, "target", None)
    if isinstance(found, Target):
        return found
    inner = (sampler.sampler,) if hasattr(sampler, "sampler") else getattr(sampler, "members", ())
    targets = {_target_of(one) for one in inner}
    return targets.pop() if len(targets) == 1 else None


def _container(
    groups: dict[str, Group],
    about: dict[str, str | int],
    coords: Mapping[str, Sequence[object]] | None = None,
    own_dims: Mapping[str, Sequence[str]] | None = None,
) -> Any:
    """Return ArviZ's container, with the particles as one chain."""
    by_row = ("observed_data", "log_likelihood", "posterior_predictive")
    dims = {name: ["row"] for group in by_row for name in groups.get(group, {})}
    dims |= {name: list(names) for name, names in (own_dims or {}).items()}
    unknown = set(own_dims or {}) - {name for values in groups.values() for name in values}
    if unknown:
        known = ", ".join(dict.fromkeys(name for values in groups.values() for name in values))
        raise ValueError(f"`dims` names {', '.join(sorted(unknown))}, but the variables are: {known}.")
    labels = {name: list(values) for name, values in (coords or {}).items()}
    arrays: dict[str, Any] = {
        group: {name: np.asarray(value) for name, value in values.items()} for group, values in groups.items() if values
    }
    for group in {"posterior", "log_likelihood", "posterior_predictive"} & arrays.keys():
        arrays[group] = {name: value[None] for name, value in arrays[group].items()}
    if int(arviz.__version__.split(".")[0]) >= 1:
        made = arviz.from_dict(arrays, dims=dims, coords=labels)
    else:
        made = arviz.from_dict(**arrays, dims=dims, coords=labels)
    for holder in (made, made["posterior"]):
        holder.attrs.update(about)
    return made


def _particles(state: State) -> tuple[Particles, str]:
    """Return the particles, and a note on their weights."""
    inner: Any = state
    while not hasattr(inner, "log_weights") and hasattr(inner, "inner"):
        inner = inner.inner
    if not hasattr(inner, "log_weights"):
        return state.particles, ""
    if not hasattr(inner, "members"):
        return state.particles, "the weights of the samplers that they belong to are not applied"
    parts = [member.particles for member in inner.members]
    if len({part.shape[1] for part in parts}) > 1:
        raise ValueError(
            f"the members of this bank have {[part.shape[1] for part in parts]} parameters, so that their particles "
            "are not one sample. Export one of them: `to_arviz(state.members[0], …)`."
        )
    weights = np.exp(np.asarray(inner.log_weights, float))
    each = np.concatenate([np.full(len(part), w / len(part)) for part, w in zip(parts, weights, strict=True)])
    places = (np.arange(len(each)) + 0.5) / len(each)  # systematic resampling
    chosen = np.searchsorted(np.cumsum(each) / each.sum(), places)
    return jnp.concatenate(parts)[chosen], "a bank's particles, resampled by its members' weights"


def _posterior(target: Target | None, particles: Particles) -> Group:
    if target is None:
        return {"weights": particles}
    if particles.shape[1] != target.dim:
        raise ValueError(
            f"`state` has particles of {particles.shape[1]} numbers, but the target has {target.dim} parameters. "
            "Give the sampler that made the state, or its target."
        )
    if hasattr(target, "constrain"):  # of a NumPyro model
        return target.constrain(particles)
    return _leaves(jax.vmap(target.unravel)(particles), "", "theta")


def _leaves(tree: Tree, prefix: str, alone: str) -> Group:
    """Return the leaves by their paths; `alone` names a single array."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
    return {f"{prefix}{name}" if name else alone: leaf for name, (_, leaf) in zip(names, leaves, strict=True)}


def _about_rows(
    state: State, particles: Particles, target: Any, sampler: Sampler | None, data: Data, key: Key
) -> dict[str, Group]:
    """Return all groups that need rows. The target is a `Target`, perhaps of a NumPyro model, or None."""
    data = cast(batch(data), particles.dtype).data
    pair = isinstance(data, tuple | list) and len(data) == 2
    if target is None and not pair:
        raise ValueError(f"`data` has leaves of shape {shapes_of(data)}, but this sampler learns from pairs (X, y).")
    named = hasattr(target, "constrain")  # by a NumPyro model
    if named:
        observed, inputs = target.program.observations(data), target.program.inputs(data)
    elif pair:
        observed, inputs = _leaves(data[1], "y.", "y"), _leaves(data[0], "x.", "x")
    else:
        observed, inputs = _leaves(data, "", "y"), {}
    groups = {"observed_data": observed, "constant_data": inputs}
    name = next(iter(observed)) if len(observed) == 1 else "rows"
    predicts = target is None or (target.predict is not None and pair)
    if sampler is not None and predicts:
        said: Any = sampler.predict(state, data[0])
        groups["posterior_predictive"] = {name: said.sample(key, len(particles))}
    elif named:
        groups["posterior_predictive"] = target.sample(key, particles, data)
    elif predicts:
        groups["posterior_predictive"] = {name: predict(target, particles, data[0]).components.sample(key)}
    if named:
        groups["log_likelihood"] = target.log_likelihoods(particles, data)
    elif target is not None:
        groups["log_likelihood"] = {name: _log_likelihood(target, particles, data)}
    return groups


@partial(jax.jit, static_argnums=0)
def _log_likelihood(target: Target, particles: Particles, data: Data) -> Array:
    return jax.vmap(lambda theta: target.log_likelihood(target.unravel(theta), data))(particles)
