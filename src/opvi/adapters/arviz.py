r"""Draws as ArviZ data: posterior, predictions, log likelihoods, the data, and the position in the stream."""

import warnings
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np

from opvi._steps import posterior_of, target_of
from opvi.checks._rows import log_likelihoods
from opvi.posterior import Posterior
from opvi.running._rows import batch
from opvi.targets import cast
from opvi.targets._target import named_leaves
from opvi.types import Array, ArrayLike, Data, Sampler, Seed, State, as_key, shapes_of

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # ArviZ 0.x announces 1.0 once a day
        try:
            import arviz
        except FileNotFoundError:  # of two processes that are ArviZ's first of a day, one takes the other's note of it
            import arviz
except ImportError as error:
    raise ImportError('`opvi.to_arviz` needs ArviZ: `pip install "opvi[arviz]"`.') from error

Group = dict[str, Any]
BY_ROW = ("observed_data", "log_likelihood", "posterior_predictive")
WITHOUT_TARGET = "in the sampler's own units: `opvi.regressor` and `opvi.classifier` standardise inputs and outputs"


def to_arviz(
    sampler: Sampler,
    state: State,
    data: Data = None,
    *,
    key: Seed = 0,
    n: int = 1000,
    constant_data: Mapping[str, ArrayLike] | None = None,
    coords: Mapping[str, Sequence[object]] | None = None,
    dims: Mapping[str, Sequence[str]] | None = None,
) -> Any:
    """Return draws and what they say about some rows as ArviZ's container: `InferenceData`, or a `DataTree`.

    The one chain holds the draws of `sampler.posterior(state, key, n)`, by the names of the target's parameters, or of
    the sites of `opvi.from_numpyro`'s model in the model's own units. Attributes hold the position in the stream. ESS
    and R-hat are for chains with a history, and mean little here: `az.summary(..., kind="stats")` leaves them out.

    Args:
        sampler: predictions are its own, calibrated as they are. `opvi.regressor` and `opvi.classifier` have no
            target, and their parameters are plain numbers.
        state: what `opvi.run` or a step returned.
        data: rows to predict and score, in the layout of the stream; log likelihoods take draws × rows numbers.
        key: a JAX key or an integer seed.
        n: how many draws.
        constant_data: name -> array, kept as they are next to the data's inputs.
        coords: name of a dimension -> its labels, as ArviZ takes them.
        dims: name of a variable -> the names of its dimensions, after chain and draw; rows are `row` by
            themselves, and axes of NumPyro sites have the names of their plates.
    """
    if not hasattr(sampler, "step"):
        raise TypeError(
            f"`sampler` is a {type(sampler).__name__}, but must be the sampler that made the state: "
            "`opvi.to_arviz(sampler, state)`."
        )
    if not hasattr(state, "particles"):
        raise TypeError(f"`state` is a {type(state).__name__}, but must be a sampler's: `state, _ = opvi.run(...)`.")
    posterior = posterior_of(sampler, state, key, n)
    groups: dict[str, Group] = {"posterior": posterior.draws}
    if data is not None:
        groups |= _about_rows(sampler, state, posterior, data, key)
    if constant_data is not None:
        groups["constant_data"] = {**groups.get("constant_data", {}), **constant_data}
    return as_container(groups, posterior, coords, dims, "" if target_of(sampler) else WITHOUT_TARGET)


def as_container(
    groups: dict[str, Group],
    posterior: Posterior,
    coords: Mapping[str, Sequence[object]] | None = None,
    own_dims: Mapping[str, Sequence[str]] | None = None,
    note: str = "",
) -> Any:
    """Return groups as ArviZ's container, with the draws as one chain."""
    own_dims = posterior.axes | dict(own_dims or {})
    dims = {name: ["row"] for group in BY_ROW for name in groups.get(group, {})}
    dims |= {name: list(names) for name, names in own_dims.items()}
    unknown = set(own_dims) - {name for values in groups.values() for name in values}
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
    about: dict[str, str | int] = {
        "inference_library": "opvi",
        "inference_library_version": version("opvi"),
        "rounds": posterior.rounds,
        "rows": posterior.rows,
        "sampler": posterior.about,
        **({"note": note} if note else {}),
    }
    for holder in (made, made["posterior"]):
        holder.attrs.update(about)
    return made


def _about_rows(sampler: Sampler, state: State, posterior: Posterior, data: Data, key: Seed) -> dict[str, Group]:
    """Return all groups that need rows."""
    target: Any = target_of(sampler)
    matrix, key = posterior.matrix, as_key(key)
    data = cast(batch(data), matrix.dtype).data
    pair = isinstance(data, tuple | list) and len(data) == 2
    if target is None and not pair:
        raise ValueError(f"`data` has leaves of shape {shapes_of(data)}, but this sampler learns from pairs (X, y).")
    named = hasattr(target, "program")  # by a NumPyro model
    observed: dict[str, Array]
    inputs: dict[str, Array] = {}
    if named:
        observed, inputs = target.program.observations(data), target.program.inputs(data)
    elif pair:
        observed, inputs = named_leaves(data[1], "y.", alone="y"), named_leaves(data[0], "x.", alone="x")
    else:
        observed = named_leaves(data, alone="y")
    groups: dict[str, Group] = {"observed_data": observed, "constant_data": inputs}
    name = next(iter(observed)) if len(observed) == 1 else "rows"
    if target is None or (target.predict is not None and pair):
        said: Any = sampler.predict(state, data[0])
        groups["posterior_predictive"] = {name: said.sample(key, len(matrix))}
    elif named:
        groups["posterior_predictive"] = target.sample(key, matrix, data)
    if named:
        groups["log_likelihood"] = target.log_likelihoods(matrix, data)
    elif target is not None:
        groups["log_likelihood"] = {name: log_likelihoods(target, matrix, data)}
    return groups
