r"""A target: log prior and per-row log likelihood over any pytree, and its scores over flat particles."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from opvi.predictive import Distribution
from opvi.targets._heads import Head
from opvi.targets._mlp import MLP
from opvi.types import Array, Batch, Data, DType, Key, Params, Particles, Tree, as_key, shapes_of


class Architecture(NamedTuple):
    """What an MLP is made of, for samplers that work layer by layer."""

    mlp: MLP
    head: Head


class Layout(NamedTuple):
    """How a pytree of parameters is laid out in a vector."""

    structure: Any  # jax does not export the type
    shapes: tuple[tuple[int, ...], ...]  # of the leaves
    ends: tuple[int, ...]  # of the leaves, in the vector


@dataclass(frozen=True)
class Target:
    """The posterior to track. Made by `opvi.target` or by a ready-made model; equal if its functions are.

    The functions use the user's pytree; samplers hold particles as one `[n, d]` matrix, and convert
    with `ravel` and `unravel`.
    """

    log_prior: Callable[[Params], Array]
    log_likelihood: Callable[[Params, Data], Array]  # one number per row: [B]
    init: Callable[[Key], Params]
    predict: Callable[[Params, Tree], Distribution] | None = None
    architecture: Architecture | None = None  # the layers, where the target is an MLP

    def __hash__(self) -> int:
        return hash(self.log_likelihood)  # jit asks at every step; the others would only repeat it

    @cached_property
    def layout(self) -> Layout:
        """How the parameters are laid out in a vector, from the shapes that `init` returns."""
        leaves, structure = jax.tree.flatten(jax.eval_shape(self.init, as_key(0)))
        for leaf in leaves:
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                raise TypeError(
                    f"`init` returns a leaf of dtype {leaf.dtype}, but parameters move along gradients and must be "
                    "floating point. Keep integers and functions outside the parameters (equinox: `eqx.partition`)."
                )
        ends = np.cumsum([math.prod(leaf.shape) for leaf in leaves]).tolist()
        if not ends or ends[-1] == 0:
            raise ValueError("`init` returns no parameters; a target needs at least one number to infer.")
        return Layout(structure, tuple(leaf.shape for leaf in leaves), tuple(ends))

    @property
    def dim(self) -> int:
        """The number of parameters."""
        return self.layout.ends[-1]

    @property
    def example(self) -> Data | None:
        """An example row, if the model knows what its rows look like."""
        return getattr(getattr(self.log_likelihood, "of", None), "example", None)

    @property
    def is_network(self) -> bool:
        """Whether the model is a network with hidden layers, or may be one."""
        ready_made = hasattr(getattr(self.log_likelihood, "of", None), "apply")
        return ready_made if self.architecture is None else len(self.architecture.mlp.shapes) > 1

    @property
    def most_kept(self) -> int | None:
        """How many rows are worth keeping at most, if the model knows: few where each is a whole data set."""
        return getattr(getattr(self.log_likelihood, "of", None), "most_kept", None)

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        """Names of the axes of parameters, for those that have some."""
        return {}

    def constrain(self, particles: Particles) -> dict[str, Array]:
        """Return the parameters at every particle by their names: name -> `[n, ...]`; a single array is `theta`."""
        particles = jnp.asarray(particles)
        if particles.ndim != 2 or particles.shape[1] != self.dim:
            raise ValueError(
                f"`particles` has shape {particles.shape}, but this target has {self.dim} parameters, so a matrix of "
                f"shape (n, {self.dim}) is needed, e.g. `sampler.draws(state, key, n)`."
            )
        return named_leaves(jax.vmap(self.unravel)(particles), alone="theta")

    def ravel(self, params: Params) -> Array:
        """Return the parameters as a vector `[d]`."""
        return jnp.concatenate([jnp.ravel(leaf) for leaf in self.layout.structure.flatten_up_to(params)])

    def unravel(self, vector: Array) -> Params:
        """Return the parameters that a vector `[d]` holds, in its dtype."""
        structure, shapes, ends = self.layout
        parts = jnp.split(vector, ends[:-1])
        return structure.unflatten([part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)])


def named_leaves(tree: Tree, prefix: str = "", *, alone: str) -> dict[str, Array]:
    """Return the leaves of a pytree by their paths, such as `weights.0.bias`; `alone` names a single array."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
    return {f"{prefix}{name}" if name else alone: leaf for name, (_, leaf) in zip(names, leaves, strict=True)}


@dataclass(frozen=True, repr=False)
class Method:
    """A method that is equal to the same method of an equal object; Python's own compares identities."""

    of: object
    name: str

    def __call__(self, *arguments: Tree) -> Tree:
        return getattr(self.of, self.name)(*arguments)

    def __repr__(self) -> str:
        return f"{type(self.of).__name__.lstrip('_')}.{self.name}"


class Scored(NamedTuple):
    """What one pass over a batch says about every particle."""

    likelihood: Array  # [n, d]: gradient of the weighted sum of row log likelihoods
    prior: Array  # [n, d]: gradient of the log prior
    log_likelihood: Array  # [n, B]


def target(
    log_prior: Callable[[Params], Array],
    log_likelihood: Callable[[Params, Data], Array],
    init: Callable[[Key], Params],
    predict: Callable[[Params, Tree], Distribution] | None = None,
) -> Target:
    r"""A posterior from plain functions.

    $$\log p(\theta \mid D_{1:t}) = \log p_0(\theta) + \sum_{s \le t} \sum_{r \in D_s} \log p(r \mid \theta) + c$$

    Args:
        log_prior: $\log p_0(\theta)$, up to a constant.
        log_likelihood: $\log p(r \mid \theta)$ for every row of a batch: shape `[B]`, not their sum.
        init: draws one starting particle from a key. Drawing from the prior is a good choice.
        predict: what the model says about y at inputs x, as `opvi.Normal`, `opvi.Bernoulli`, `opvi.Categorical` or
            another distribution of `opvi.predictive`. Needed only for predictions.
    """
    made = Target(log_prior, log_likelihood, init, predict)
    made.layout  # noqa: B018  # refuse at once what `init` must not return
    return made


def cast(batch: Batch, dtype: DType) -> Batch:
    """Return the batch with floating-point leaves in the particles' dtype."""
    if not isinstance(batch, Batch):
        raise TypeError(
            f"`batch` is a {type(batch).__name__}, but `step` takes an `opvi.Batch`. "
            "Wrap rows with `opvi.batch((X, y))`, or iterate over `opvi.stream(...)`."
        )
    if jnp.shape(batch.weight) == (0,):
        raise ValueError("a batch has 0 rows, but needs at least 1.")

    def convert(leaf: Tree) -> Array:
        leaf = jnp.asarray(leaf)
        return leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return jax.tree.map(convert, batch)


def check_batch(target: Target, particle: Array, batch: Batch) -> None:
    """Refuse a batch this target cannot score, from shapes alone. It runs while tracing, so it costs nothing later."""
    rows = np.shape(batch.weight)
    spec = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype), batch.data)
    params = jax.eval_shape(target.unravel, particle)
    try:
        out = jax.eval_shape(target.log_likelihood, params, spec)
    except Exception as error:
        raise ValueError(
            f"`log_likelihood` failed on a batch with leaves of shape {shapes_of(batch.data)}: {error} "
            "Check the number of features and the order of the leaves against what the target expects."
        ) from error
    if np.shape(out) != rows:
        raise ValueError(
            f"`log_likelihood` returned shape {np.shape(out)} for a batch of {rows[0]} rows, but must return one "
            f"number per row: shape {rows}. Do not sum over rows; the sampler does that, with weights."
        )


def score(target: Target, particles: Particles, batch: Batch) -> Scored:
    r"""Return $\nabla \ell_t(x_i)$ and $\nabla \log p_0(x_i)$ for every particle, with the row log likelihoods."""
    check_batch(target, particles[0], batch)

    def weighted_sum(x: Array) -> tuple[Array, Array]:
        rows = target.log_likelihood(target.unravel(x), batch.data)
        return (rows * batch.weight).sum(), rows

    likelihood, rows = jax.vmap(jax.grad(weighted_sum, has_aux=True))(particles)
    prior = jax.vmap(jax.grad(lambda x: target.log_prior(target.unravel(x))))(particles)
    return Scored(likelihood, prior, rows)
