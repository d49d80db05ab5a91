r"""NumPyro models as targets: latent sites on the real line, prior and rows separated, names kept.

A model is run under handlers that put unconstrained values at its latent sites. Each site's log density then falls
on one of two sides: sites inside the data plate give one number per row, all others are the prior. The data plate is
the one whose size follows the rows.
"""

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from opvi.adapters import _sites
from opvi.adapters._local import log_integral
from opvi.adapters._sites import Model, Site, is_factor, is_latent, within
from opvi.predictive import Distribution
from opvi.running._rows import row_count
from opvi.targets import Target
from opvi.targets._target import Method
from opvi.types import Array, ArrayLike, Data, Key, Params, Particles, Seed, Tree, as_key, shapes_of


@dataclass(frozen=True)
class NumPyroTarget(Target):
    """The result of `opvi.from_numpyro`: a target that also knows the model's sites and how to map back to them."""

    program: "_Program" = field(kw_only=True)

    def constrain(self, particles: Particles) -> dict[str, Array]:
        """Return latent and deterministic sites at every particle, in the model's own units: name -> `[n, ...]`.

        Sites that follow the rows, such as a regression's mean, are left out.
        """
        found = _constrain(self.program, self._params(particles))
        return {name: found[name] for name in self.program.names}  # in the model's order

    def sample(self, key: Seed, particles: Particles, data: Data) -> dict[str, Array]:
        """Return one draw of every observed site from each particle: name -> `[n, rows, ...]`.

        What `data` holds at the observed sites is ignored.
        """
        params = self._params(particles)
        keys = jax.random.split(as_key(key), len(particles))
        return _sample(self.program, keys, params, self.program.arrays(data, params))

    def log_likelihoods(self, particles: Particles, data: Data) -> dict[str, Array]:
        """Return the `log_likelihood` of every particle, site by site: name -> `[n, rows]`."""
        params = self._params(particles)
        return _log_likelihoods(self.program, params, self.program.arrays(data, params))

    def _params(self, particles: Particles) -> Params:
        particles = jnp.asarray(particles)
        if particles.ndim != 2 or particles.shape[1] != self.dim:
            raise ValueError(
                f"`particles` has shape {particles.shape}, but this target has {self.dim} parameters: give "
                f"`state.particles`, a matrix of shape (n, {self.dim})."
            )
        return jax.vmap(self.unravel)(particles)


def from_numpyro(model: Model, example: Data) -> NumPyroTarget:
    r"""Return a target from a NumPyro model with a data plate.

    $$\log p_0(u) = \sum_s \log p(\theta_s) + \log \Big| \frac{\partial \theta}{\partial u} \Big|, \qquad
      \log p(r \mid u) = \sum_s \log p(r_s \mid \theta)$$

    with $s$ the sites outside and inside the plate. Parameters are a dict of unconstrained values $u$, one for each
    latent site; `target.constrain(particles)` returns the sites $\theta$. Particles start from the prior, or uniformly
    in ±2 where it is improper. Targets of the same model and an equal first row are equal.

    The model is called with the rows of a batch: `model(X, y)` for batches `(X, y)`, `model(X, group, y)` for batches
    `((X, group), y)`, `model(X=X, y=y)` for batches `{"X": X, "y": y}`, `model(y)` for an array. What does not come in
    rows, the number of groups for example, is closed over. The plate is as long as the batch:
    `numpyro.plate("rows", len(y))`. A plate that would draw a subsample takes the batch's rows instead, and each
    counts once.

    Where batches are pairs and the only observed site is Normal, Student-t with given degrees of freedom, Poisson,
    negative binomial, Bernoulli, Categorical or OrderedLogistic with parameters that do not depend on the second part,
    the target can predict: `opvi.predict(target, particles, X)`.

    Args:
        model: with continuous latent sites. Sites outside the data plate (`numpyro.factor` too) belong to the prior and
            must not depend on the rows; sites inside it belong to the likelihood. Latent ones inside, with a value for
            every row, are summed out: by quadrature if they are one number per row, otherwise by 128 weighted points
            around the most likely values.
        example: at least one row of data in the form the stream will have.
    """
    if not callable(model):
        raise TypeError(f"`model` is a {type(model).__name__}, but must be a NumPyro model: a Python function.")
    program = _examined(model, example)
    log_prior, log_likelihood, init = (Method(program, name) for name in ("log_prior", "log_likelihood", "init"))
    predict = Method(program, "predict") if program.alone and program.can_predict() else None
    return NumPyroTarget(log_prior, log_likelihood, init, predict, program=program)


def _numbers(leaf: ArrayLike) -> np.ndarray:
    leaf = np.asarray(leaf)
    if leaf.dtype.kind not in "fiub":
        raise TypeError(
            f"`example` holds an array of dtype {leaf.dtype}, but a stream carries numbers. Encode strings."
        )
    return leaf.astype(jax.dtypes.canonicalize_dtype(leaf.dtype))


def _examined(model: Model, example: Data) -> "_Program":
    """Return the model with its classified sites; refuse models that cannot be learnt from a stream."""
    example = jax.tree.map(_numbers, example)
    if row_count(example) == 0:
        raise ValueError("`example` has 0 rows, but at least 1 is needed to see what the model's data look like.")
    row = jax.tree.map(lambda a: a[:1], example)
    few, more = (_sites.layouts(model, row, rows) for rows in (_sites.FEW, _sites.MORE))
    plates = _sites.data_plates(few, more)
    sites = {name: layout.site for name, layout in few.items()}
    fixed = {name for name, layout in few.items() if layout[1:] == more[name][1:]}  # do not follow the rows
    local = [name for name, site in sites.items() if is_latent(site) and within(site, plates)]
    latent = [name for name, site in sites.items() if is_latent(site) and name not in local]
    if not latent:
        raise ValueError("the model has no latent site, so there is nothing to infer.")
    known = {name for name, site in sites.items() if site["type"] == "deterministic"} & fixed
    inside = [name for name, site in sites.items() if site["type"] == "sample" and within(site, plates)]
    seen = [name for name in inside if name not in local]
    leaves, structure = jax.tree.flatten(row)
    program = _Program(
        model,
        structure,
        tuple((a.dtype.name, a.shape, a.tobytes()) for a in leaves),
        frozenset(plates),
        tuple(name for name in sites if name in latent or name in known),
        tuple(name for name in seen if not is_factor(sites[name])),
        len(inside) == 1 and not is_factor(sites[inside[0]]),
        tuple(_sites.named_axes(few[name]) for name in sites if name in latent or name in known),
        tuple(local),
    )
    program.check()
    return program


@dataclass(frozen=True)
class _Program:
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
        """Return the log likelihood of each row, integrated over its own latent sites."""
        drawn = jax.eval_shape(lambda key: _sites.draw(self.model, self.example, key)[0], jax.random.key(0))
        shapes = {name: drawn[name].shape for name in self.local}
        sizes = [math.prod(shape) for shape in shapes.values()]
        dtype = jax.tree.leaves(params)[0].dtype

        def one(row: Data) -> Array:
            alone = jax.tree.map(lambda a: a[None], row)

            def log_joint(z: Array) -> Array:
                parts = jnp.split(z, np.cumsum(sizes)[:-1].tolist())
                own = {name: part.reshape(shapes[name]) for name, part in zip(shapes, parts, strict=True)}
                return _sites.total(self.terms({**params, **own}, alone, inside=True)).sum()

            return log_integral(log_joint, sum(sizes), dtype)

        return jax.vmap(one)(data)

    def predict(self, params: Params, x: Tree) -> Distribution:
        rows = row_count(x)
        y = jax.tree.map(lambda a: np.zeros((rows, *a.shape[1:]), a.dtype), self.example[1])  # never looked at
        found: Any = self._head_of(params, self.arrays((x, y), params))
        return found

    def sites(self, params: Params, data: Data) -> tuple[dict[str, Site], dict[str, float]]:
        return _sites.run(self.model, data, jax.random.key(0), _sites.from_unconstrained(params))

    def terms(self, params: Params, data: Data, *, inside: bool) -> dict[str, Array]:
        """Return log densities of the sites inside the data plate, row by row, or of those outside."""
        sites, ratio = self.sites(params, data)
        terms = {}
        for name, site in sites.items():
            if site["type"] == "sample" and within(site, self.plates) == inside:
                value = _sites.log_density(site, ratio)
                terms[name] = _sites.by_row(site, value, self.plates) if inside else jnp.sum(value)
        return terms

    def _zeros(self) -> Params:
        """Return parameters that are valid at every site."""
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(self.init, jax.random.key(0)))

    def check(self) -> None:
        """Refuse rows that cannot be scored, and a prior that is not the same for every batch."""
        params = self._zeros()
        data = self.arrays(self.example, params)
        twice = jax.tree.map(lambda a: jnp.concatenate([a, a]), data)

        def terms(data: Data) -> dict[str, Array]:
            return self.terms(params, data, inside=False)

        jax.eval_shape(self.log_likelihood, params, twice)
        once, again = jax.jit(terms)(data), jax.jit(terms)(twice)
        for name, used in _sites.sources(terms, twice).items():
            if any(used) or not np.allclose(once[name], again[name], rtol=1e-4, equal_nan=True):
                raise ValueError(
                    f"site '{name}' lies outside the data plate but depends on the rows, while a prior must be the "
                    "same for every batch. A term of the likelihood belongs inside the plate; a number taken from "
                    "data, such as a mean, is computed once and closed over."
                )

    def can_predict(self) -> bool:
        """Return whether batches are pairs (x, y) and the head depends on x alone."""
        params = self._zeros()
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
        return _sites.head(sites[self.observed[0]], ratio)

    def observations(self, data: Data) -> dict[str, Array]:
        """Return the values at the observed sites."""
        sites, _ = self.sites(self._zeros(), data)
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


@partial(jax.jit, static_argnums=0)
def _constrain(program: _Program, params: Params) -> dict[str, Array]:
    def one(params: Params) -> dict[str, Array]:
        sites, _ = program.sites(params, program.arrays(program.example, params))
        return {name: sites[name]["value"] for name in program.names}

    return jax.vmap(one)(params)


@partial(jax.jit, static_argnums=0)
def _sample(program: _Program, keys: Key, params: Params, data: Data) -> dict[str, Array]:
    def one(key: Key, params: Params) -> dict[str, Array]:
        sites, _ = _sites.run(_sites.Drawn(program.model, program.plates), data, key, _sites.from_unconstrained(params))
        return {name: sites[name]["value"] for name in program.observed}

    return jax.vmap(one)(keys, params)


@partial(jax.jit, static_argnums=0)
def _log_likelihoods(program: _Program, params: Params, data: Data) -> dict[str, Array]:
    if program.local:
        name = program.observed[0] if len(program.observed) == 1 else "rows"
        return {name: jax.vmap(lambda theta: program.summed_out(theta, data))(params)}
    return jax.vmap(lambda theta: program.terms(theta, data, inside=True))(params)
