r"""NumPyro models as targets: latent sites on the real line, prior and rows separated, names kept.

A model is run under handlers that put unconstrained values at its latent sites. Each site's log density then falls
on one of two sides: sites inside the data plate give one number per row, all others are the prior. The data plate is
the one whose size follows the rows.
"""

from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp

from opvi.adapters._program import Program, examined
from opvi.adapters._sites import Model
from opvi.targets import Target
from opvi.targets._target import Method
from opvi.types import Array, Data, Key, Params, Particles, Seed, as_key


@dataclass(frozen=True)
class NumPyroTarget(Target):
    """The result of `opvi.from_numpyro`: a target that also knows the model's sites and how to map back to them."""

    program: Program = field(kw_only=True)

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        """Names of the axes of every site: those of its plates."""
        return dict(zip(self.program.names, self.program.axes, strict=True))

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
                f"`particles` has shape {particles.shape}, but this target has {self.dim} parameters, so a matrix of "
                f"shape (n, {self.dim}) is needed, e.g. `sampler.draws(state, key, n)`."
            )
        return jax.vmap(self.unravel)(particles)


def from_numpyro(model: Model, example: Data, *, series: bool = False) -> NumPyroTarget:
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
            every row, are summed out: discrete ones exactly, over up to 1,024 combinations per row; continuous ones by
            quadrature if they are one number per row, otherwise by 128 weighted points around the most likely values.
        example: at least one row of data in the form the stream will have.
        series: whether a row is a whole data set of its own, such as a time series: the model is then called with one
            row, `model(y[0])` for batches `y` of shape (series, times), and all that it observes is that row's. For
            scans, Gaussian processes and differential equations. Latent sites are shared by all rows.
    """
    if not callable(model):
        raise TypeError(f"`model` is a {type(model).__name__}, but must be a NumPyro model: a Python function.")
    program = examined(model, example, series)
    log_prior, log_likelihood, init = (Method(program, name) for name in ("log_prior", "log_likelihood", "init"))
    predict = Method(program, "predict") if program.alone and program.can_predict() else None
    return NumPyroTarget(log_prior, log_likelihood, init, predict, program=program)


@partial(jax.jit, static_argnums=0)
def _constrain(program: Program, params: Params) -> dict[str, Array]:
    def one(params: Params) -> dict[str, Array]:
        sites, _ = program.sites(params, program.arrays(program.example, params))
        return {name: sites[name]["value"] for name in program.names}

    return jax.vmap(one)(params)


@partial(jax.jit, static_argnums=0)
def _sample(program: Program, keys: Key, params: Params, data: Data) -> dict[str, Array]:
    return jax.vmap(lambda key, theta: program.draw(key, theta, data))(keys, params)


@partial(jax.jit, static_argnums=0)
def _log_likelihoods(program: Program, params: Params, data: Data) -> dict[str, Array]:
    if program.local:
        name = program.observed[0] if len(program.observed) == 1 else "rows"
        return {name: jax.vmap(lambda theta: program.summed_out(theta, data))(params)}
    return jax.vmap(lambda theta: program.terms(theta, data, inside=True))(params)
