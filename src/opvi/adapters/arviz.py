r"""Particles as ArviZ data: posterior, predictions, log likelihoods, the data, and where in the stream they stand."""

import warnings
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from opvi.predictive import predict
from opvi.running._stream import batch
from opvi.targets import Target, cast
from opvi.types import Data, Key, Particles, Tracker, as_key, shapes_of

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # ArviZ 0.x announces 1.0 once a day
        import arviz
except ImportError as error:
    raise ImportError('`opvi.to_arviz` needs ArviZ: `pip install "opvi[arviz]"`.') from error

Group = dict[str, Any]  # name -> array


def to_arviz(
    state: Any,
    target: Target | Tracker,
    data: Data = None,
    *,
    tracker: Tracker | None = None,
    constant_data: Mapping[str, Any] | None = None,
    key: Any = 0,
) -> Any:
    """Particles and what they say about some rows as ArviZ's container: `InferenceData`, or from ArviZ 1 a `DataTree`.

    The draws of the one chain are the particles. Attributes tell the stream's position. Particles are placed, not drawn
    one after the other, so that ESS and R-hat mean nothing: `az.summary(..., kind="stats")` leaves them out.

    Args:
        state: what `opvi.run` or a step returned. A bank's members are resampled by their weights.
        target: the one it was made with: names are those of its parameters, or of the sites of `opvi.from_numpyro`'s
            model, in the model's own units. For `opvi.regressor` and `opvi.classifier`, the tracker itself.
        data: rows to predict and to score, in the layout of the stream; log likelihoods take particles × rows numbers.
        tracker: if given, predictions are the tracker's, calibrated as they are.
        constant_data: name -> array, kept as they are next to the data's inputs.
        key: of the predictive draws; a JAX key or an integer seed.
    """
    if not isinstance(target, Target) and not hasattr(target, "about"):
        raise TypeError(f"`target` is a {type(target).__name__}, but must be an `opvi.Target` or an `opvi.Tracker`.")
    if not hasattr(state, "particles"):
        raise TypeError(f"`state` is a {type(state).__name__}, but must be a sampler's: `state, _ = opvi.run(...)`.")
    particles, note = _particles(state)
    about = {
        "inference_library": "opvi",
        "inference_library_version": version("opvi"),
        "rounds": int(state.round),
        "rows": int(state.rows),
    }
    if hasattr(target, "about"):
        tracker = target
        scaled = "networks' weights, for inputs and outputs that the tracker standardises"
        note = f"{scaled}; {note}" if note else scaled
    if note:
        about["note"] = note
    if tracker is not None:
        about["sampler"] = tracker.about
    groups = {"posterior": _posterior(target, particles)}
    if data is not None:
        groups |= _about_rows(state, particles, target, tracker, data, as_key(key))
    if constant_data is not None:
        groups["constant_data"] = {**groups.get("constant_data", {}), **constant_data}
    return _container(groups, about)


def _container(groups: dict[str, Group], about: dict[str, Any]) -> Any:
    """ArviZ's container, with the particles as one chain."""
    by_row = ("observed_data", "log_likelihood", "posterior_predictive")
    dims = {name: ["row"] for group in by_row for name in groups.get(group, {})}
    arrays: dict[str, Any] = {
        group: {name: np.asarray(value) for name, value in values.items()} for group, values in groups.items() if values
    }
    for group in {"posterior", "log_likelihood", "posterior_predictive"} & arrays.keys():
        arrays[group] = {name: value[None] for name, value in arrays[group].items()}
    if int(arviz.__version__.split(".")[0]) >= 1:
        made = arviz.from_dict(arrays, dims=dims)
    else:
        made = arviz.from_dict(**arrays, dims=dims)
    for holder in (made, made["posterior"]):
        holder.attrs.update(about)
    return made


def _particles(state: Any) -> tuple[Particles, str]:
    """Particles, and what there is to say about how much each weighs."""
    inner = state
    while not hasattr(inner, "log_weights") and hasattr(inner, "inner"):
        inner = inner.inner
    if not hasattr(inner, "log_weights"):
        return state.particles, ""
    if not hasattr(inner, "members"):
        return state.particles, "the weights of the trackers that they belong to are not applied"
    parts = [member.particles for member in inner.members]
    if len({part.shape[1] for part in parts}) > 1:
        raise ValueError(
            f"the members of this bank have {[part.shape[1] for part in parts]} parameters, so that their particles "
            "are no one sample. Export one of them: `to_arviz(state.members[0], …)`."
        )
    weights = np.exp(np.asarray(inner.log_weights, float))
    each = np.concatenate([np.full(len(part), w / len(part)) for part, w in zip(parts, weights, strict=True)])
    places = (np.arange(len(each)) + 0.5) / len(each)  # systematic resampling
    chosen = np.searchsorted(np.cumsum(each) / each.sum(), places)
    return jnp.concatenate(parts)[chosen], "a bank's particles, resampled by its members' weights"


def _posterior(target: Any, particles: Particles) -> Group:
    if hasattr(target, "about"):
        return {"weights": particles}
    if particles.shape[1] != target.dim:
        raise ValueError(
            f"`state` has particles of {particles.shape[1]} numbers, but `target` has {target.dim} parameters. "
            "Give the target that the sampler was made with."
        )
    if _is_numpyro(target):
        return target.constrain(particles)
    return _leaves(jax.vmap(target.unravel)(particles), "", "theta")


def _is_numpyro(target: Any) -> bool:
    """Told by what it has, so that NumPyro need not be there."""
    return hasattr(target, "constrain")


def _leaves(tree: Any, prefix: str, alone: str) -> Group:
    """The leaves by their paths; `alone` names a single array."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
    return {f"{prefix}{name}" if name else alone: leaf for name, (_, leaf) in zip(names, leaves, strict=True)}


def _about_rows(
    state: Any, particles: Particles, target: Any, tracker: Tracker | None, data: Data, key: Key
) -> dict[str, Group]:
    """All groups that need rows."""
    data = cast(batch(data), particles.dtype).data
    pair = isinstance(data, tuple | list) and len(data) == 2
    if hasattr(target, "about") and not pair:
        raise ValueError(f"`data` has leaves of shape {shapes_of(data)}, but this tracker learns from pairs (X, y).")
    if _is_numpyro(target):
        observed, inputs = target.program.observations(data), target.program.inputs(data)
    elif pair:
        observed, inputs = _leaves(data[1], "y.", "y"), _leaves(data[0], "x.", "x")
    else:
        observed, inputs = _leaves(data, "", "y"), {}
    groups = {"observed_data": observed, "constant_data": inputs}
    name = next(iter(observed)) if len(observed) == 1 else "rows"
    predicts = hasattr(target, "about") or (target.predict is not None and pair)
    if tracker is not None and predicts:
        groups["posterior_predictive"] = {name: tracker.predict(state, data[0]).sample(key, len(particles))}
    elif _is_numpyro(target):
        groups["posterior_predictive"] = target.sample(key, particles, data)
    elif predicts:
        groups["posterior_predictive"] = {name: predict(target, particles, data[0]).components.sample(key)}
    if _is_numpyro(target):
        groups["log_likelihood"] = target.log_likelihoods(particles, data)
    elif isinstance(target, Target):
        log_likelihood, unravel = target.log_likelihood, target.unravel
        score = jax.jit(jax.vmap(lambda theta: log_likelihood(unravel(theta), data)))
        groups["log_likelihood"] = {name: score(particles)}
    return groups
