"""A NumPyro model as functions of parameters and rows."""

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp

from opvi.adapters import _sites
from opvi.adapters._choices import Choice, choices, combinations
from opvi.adapters._heads import head
from opvi.adapters._local import log_integral
from opvi.adapters._sites import Model, Site, is_discrete, is_factor, is_latent, within
from opvi.predictive import Distribution
from opvi.running._rows import row_count
from opvi.types import Array, ArrayLike, Data, Key, Params, Tree, shapes_of


@dataclass(frozen=True)
class Program:
    """A model, one row of its data, its classified sites and the target's functions; equal if model and row are."""

    model: Model
    structure: Any  # of a row; jax does not export the type
    leaves: tuple[tuple[str, tuple[int, ...], bytes], ...]  # of a row: dtype, shape and numbers
    plates: frozenset[str]  # those that follow the rows
    names: tuple[str, ...]  # sites that do not follow the rows, in the model's order
    observed: tuple[str, ...]
    alone: bool  # whether the observed site is the only one inside the plates
    axes: tuple[tuple[str, ...], ...]  # names of the axes of those that do not follow the rows
    local: tuple[str, ...]  # latent sites that have one value per row: summed out
    choices: tuple[Choice, ...]  # what the discrete ones of them can be

    @cached_property
    def example(self) -> Data:
        arrays = [np.frombuffer(numbers, dtype).reshape(shape) for dtype, shape, numbers in self.leaves]
        return self.structure.unflatten(arrays)

    def arrays(self, data: Data, params: Params) -> Data:
        """Return the data as arrays: whole numbers where the example has them, floats in the parameters' dtype."""
        structure: Any = jax.tree.structure(data)
        if structure != self.structure:
            raise ValueError(
                f"`data` has leaves of shape {shapes_of(data)}, but the target was made with an example of shape "
                f"{shapes_of(self.example)} in a {type(self.example).__name__}. Give the same arguments."
            )
        dtype = jax.tree.leaves(params)[0].dtype

        def convert(leaf: ArrayLike, like: np.ndarray) -> Array:
            return jnp.asarray(leaf, dtype if like.dtype.kind == "f" else like.dtype)

        return jax.tree.map(convert, data, self.example)

    @partial(jax.jit, static_argnums=0)
    def init(self, key: Key) -> Params:
        drawn = _sites.draw(self.model, jax.tree.map(jnp.asarray, self.example), key)[0]
        return {name: value for name, value in drawn.items() if name not in self.local}

    def log_prior(self, params: Params) -> Array:
        return _sites.total(self.terms(params, self.arrays(self.example, params), inside=False))

    def log_likelihood(self, params: Params, data: Data) -> Array:
        if self.local:
            return self.summed_out(params, data)
        return _sites.total(self.terms(params, data, inside=True))

    def summed_out(self, params: Params, data: Data) -> Array:
        """Return the log likelihood of each row, summed over its own latent sites."""
        drawn = jax.eval_shape(lambda key: _sites.draw(self.model, self.example, key)[0], jax.random.key(0))
        shapes = {name: drawn[name].shape for name in self.local if name in drawn}
        sizes = [math.prod(shape) for shape in shapes.values()]
        dtype = jax.tree.leaves(params)[0].dtype

        def one(row: Data, given: dict[str, Array]) -> Array:
            alone = jax.tree.map(lambda a: a[None], row)

            def log_joint(z: Array) -> Array:
                parts = jnp.split(z, np.cumsum(sizes)[:-1].tolist()) if sizes else []
                own = {name: part.reshape(shapes[name]) for name, part in zip(shapes, parts, strict=True)}
                return _sites.total(self.terms({**params, **own}, alone, inside=True, given=given)).sum()

            return log_integral(log_joint, sum(sizes), dtype) if sizes else log_joint(jnp.zeros(0, dtype))

        if not self.choices:
            return jax.vmap(lambda row: one(row, {}))(data)
        every = combinations(self.choices)
        return jax.vmap(lambda row: logsumexp(jax.vmap(lambda given: one(row, given))(every)))(data)

    def predict(self, params: Params, x: Tree) -> Distribution:
        rows = row_count(x)
        y = jax.tree.map(lambda a: np.zeros((rows, *a.shape[1:]), a.dtype), self.example[1])  # never looked at
        found: Any = self._head_of(params, self.arrays((x, y), params))
        return found

    def sites(
        self, params: Params, data: Data, given: dict[str, Array] | None = None
    ) -> tuple[dict[str, Site], dict[str, float]]:
        return _sites.run(self.model, data, jax.random.key(0), _sites.from_unconstrained(params, given))

    def terms(
        self, params: Params, data: Data, *, inside: bool, given: dict[str, Array] | None = None
    ) -> dict[str, Array]:
        """Return log densities of the sites inside the data plate, row by row, or of those outside."""
        sites, ratio = self.sites(params, data, given)
        terms = {}
        for name, site in sites.items():
            if site["type"] == "sample" and within(site, self.plates) == inside:
                value = _sites.log_density(site, ratio)
                terms[name] = _sites.by_row(site, value, self.plates) if inside else jnp.sum(value)
        return terms

    def some_params(self) -> Params:
        """Return parameters that are valid at every site, none of them 0: that could hide what depends on it."""

        def some(leaf: jax.ShapeDtypeStruct) -> Array:
            return 0.3 * jnp.cos(jnp.arange(leaf.size, dtype=leaf.dtype)).reshape(leaf.shape)

        return jax.tree.map(some, jax.eval_shape(self.init, jax.random.key(0)))

    def check(self, example: Data) -> None:
        """Refuse rows that cannot be scored one by one, and a prior that is not the same for every batch."""
        params = self.some_params()
        data = self.arrays(example, params)
        last = row_count(data) - 1
        alone, among = (jax.tree.map(lambda a, i=i: a[np.array(i)], data) for i in ([0], [0, last, 0]))

        def outside(data: Data) -> dict[str, Array]:
            return self.terms(params, data, inside=False)

        def both(data: Data) -> tuple[dict[str, Array], Array | None]:
            # Latents of rows are summed out row by row: such rows cannot depend on others.
            return outside(data), None if self.local else self.log_likelihood(params, data)

        jax.eval_shape(self.log_likelihood, params, among)
        (once, row), (again, rows) = jax.jit(both)(alone), jax.jit(both)(among)
        for name, used in _sites.sources(outside, among).items():
            if any(used) or not np.allclose(once[name], again[name], rtol=1e-4, equal_nan=True):
                raise ValueError(
                    f"site '{name}' lies outside the data plate but depends on the rows, while a prior must be the "
                    "same for every batch. A term of the likelihood belongs inside the plate; a number taken from "
                    "data, such as a mean, is computed once and closed over."
                )
        if row is not None and not np.allclose(rows[np.array([0, 2])], row, rtol=1e-3, atol=1e-4, equal_nan=True):
            raise ValueError(
                f"the log density of a row is {row[0]:.4g} alone, but {rows[0]:.4g} and {rows[2]:.4g} as the first and "
                "the last of three: it depends on the row's place in the batch or on other rows, while a stream learns "
                "each row for itself. Give what a row needs of others, such as its time, as columns of its own; or let "
                "a row be a whole series: `from_numpyro(model, example, series=True)`."
            )

    def can_predict(self) -> bool:
        """Return whether batches are pairs (x, y) and the head depends on x alone."""
        params = self.some_params()
        data = self.arrays(self.example, params)
        if type(data) is not tuple or len(data) != 2:
            return False
        if jax.eval_shape(self._head_of, params, data) is None:
            return False

        def outputs(y: Tree) -> dict[str, Array]:
            found: Any = self._head_of(params, (data[0], y))
            return found._asdict()

        return not any(any(used) for used in _sites.sources(outputs, data[1]).values())

    def _head_of(self, params: Params, data: Data) -> Distribution | None:
        sites, ratio = self.sites(params, data)
        return head(sites[self.observed[0]], ratio)

    def draw(self, key: Key, params: Params, data: Data) -> dict[str, Array]:
        """Return the observed sites, drawn."""
        drawn = _sites.Drawn(self.model, self.plates)
        sites, _ = _sites.run(drawn, data, key, _sites.from_unconstrained(params))
        return {name: sites[name]["value"] for name in self.observed}

    def observations(self, data: Data) -> dict[str, Array]:
        """Return the values at the observed sites."""
        sites, _ = self.sites(self.some_params(), data)
        return {name: sites[name]["value"] for name in self.observed}

    def inputs(self, data: Data) -> dict[str, Array]:
        """Return the model's arguments that are not observations, by name."""
        seen = {id(value) for value in self.observations(data).values()}
        return {name: value for name, value in self._arguments(data).items() if id(value) not in seen}

    def _arguments(self, data: Data) -> dict[str, Array]:
        if isinstance(data, Mapping):
            return dict(data)
        values = _sites.arguments(data)
        try:
            return dict(inspect.signature(self.model).bind(*values).arguments)
        except (TypeError, ValueError):
            return {f"argument_{i}": value for i, value in enumerate(values)}


@dataclass(frozen=True)
class OneRow:
    """A model of a whole data set, as a model of batches that have one row each."""

    model: Model

    def __call__(self, *data: Data, **named: Data) -> None:
        """Run the model with the first row."""
        one, other = jax.tree.map(lambda a: a[0], (data, named))
        self.model(*one, **other)


class Series(Program):
    """A program whose rows are whole data sets."""

    most_kept = 10  # by a tracker: each costs what a whole data set does, whether it has come already or not

    def terms(
        self, params: Params, data: Data, *, inside: bool, given: dict[str, Array] | None = None
    ) -> dict[str, Array]:
        def one(row: Data) -> dict[str, Array]:
            sites, ratio = self.sites(params, jax.tree.map(lambda a: a[None], row), given)
            chosen = {n: s for n, s in sites.items() if s["type"] == "sample" and within(s, self.plates) == inside}
            return {name: jnp.sum(_sites.log_density(site, ratio)) for name, site in chosen.items()}

        return jax.vmap(one)(data) if inside else one(jax.tree.map(lambda a: a[0], data))

    def draw(self, key: Key, params: Params, data: Data) -> dict[str, Array]:
        def one(key: Key, row: Data) -> dict[str, Array]:
            return Program.draw(self, key, params, jax.tree.map(lambda a: a[None], row))

        return jax.vmap(one)(jax.random.split(key, row_count(data)), data)


# --- from a model to a program ------------------------------------------------------------------


def _numbers(leaf: ArrayLike) -> np.ndarray:
    leaf = np.asarray(leaf)
    if leaf.dtype.kind not in "fiub":
        raise TypeError(
            f"`example` holds an array of dtype {leaf.dtype}, but a stream carries numbers. Encode strings."
        )
    return leaf.astype(jax.dtypes.canonicalize_dtype(leaf.dtype))


def examined(model: Model, example: Data, series: bool) -> Program:
    """Return the model with its classified sites; refuse models that cannot be learnt from a stream."""
    example = jax.tree.map(_numbers, example)
    if row_count(example) == 0:
        raise ValueError("`example` has 0 rows, but at least 1 is needed to see what the model's data look like.")
    row = jax.tree.map(lambda a: a[:1], example)
    if series:
        return _of_series(OneRow(model), row)
    few, more = (_sites.layouts(model, row, rows) for rows in (_sites.FEW, _sites.MORE))
    plates = _sites.data_plates(few, more)
    sites = {name: layout.site for name, layout in few.items()}
    fixed = {name for name, layout in few.items() if layout[1:] == more[name][1:]}  # do not follow the rows
    local = [name for name, site in sites.items() if is_latent(site) and within(site, plates)]
    some = [name for name in local if is_discrete(sites[name])]
    described = _described(model, row, few, plates, fixed)
    program = Program(**described, local=tuple(local), choices=choices(model, row, some))
    program.check(example)
    return program


def _of_series(model: OneRow, row: Data) -> Program:
    """Return the model of whole series with its classified sites: what depends on the data is observed."""
    layouts = _sites.layouts(model, row, 1)
    for layout in layouts.values():
        _sites.refuse_discrete(layout.site)
    whole = Series(**_described(model, row, layouts, set(), set()), local=(), choices=())
    params = whole.some_params()
    data = whole.arrays(row, params)
    used = _sites.sources(lambda data: whole.terms(params, data, inside=False), data)
    seen = {f"rows of {name}" for name, leaves in used.items() if any(leaves) and layouts[name].site["is_observed"]}
    if not seen:
        raise ValueError(
            f"nothing that the model observes depends on its data (its sites: {', '.join(layouts)}), so there is "
            "nothing to learn from. Observe them: `numpyro.sample('y', …, obs=y)`."
        )
    values = _sites.sources(lambda data: {name: s["value"] for name, s in whole.sites(params, data)[0].items()}, data)
    fixed = {name for name in layouts if not any(values[name])}
    program = Series(**_described(model, row, layouts, seen, fixed), local=(), choices=())
    program.check(row)
    return program


def _described(model: Model, row: Data, layouts: dict[str, Any], plates: set[str], fixed: set[str]) -> dict[str, Any]:
    """Return the fields of a program: the model, a row and what its sites are."""
    sites = {name: layout.site for name, layout in layouts.items()}
    inside = [name for name, site in sites.items() if site["type"] == "sample" and within(site, plates)]
    latent = [name for name, site in sites.items() if is_latent(site) and name not in inside]
    if not latent:
        local = [name for name in inside if is_latent(sites[name])]
        alone = f" that all rows share ({', '.join(local)} has a value for each row)" if local else ""
        raise ValueError(f"the model has no latent site{alone}, so there is nothing to infer.")
    known = {name for name, site in sites.items() if site["type"] == "deterministic"} & fixed
    kept = [name for name in sites if name in latent or name in known]
    leaves, structure = jax.tree.flatten(row)
    return {
        "model": model,
        "structure": structure,
        "leaves": tuple((a.dtype.name, a.shape, a.tobytes()) for a in leaves),
        "plates": frozenset(plates),
        "names": tuple(kept),
        "observed": tuple(name for name in inside if sites[name]["is_observed"] and not is_factor(sites[name])),
        "alone": len(inside) == 1 and not is_factor(sites[inside[0]]),
        "axes": tuple(_sites.named_axes(layouts[name]) for name in kept),
    }
