r"""What Gauss–Newton particles remember of the past: a covariance each, full, or in blocks if memory is short."""

from collections.abc import Callable
from functools import wraps
from typing import NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from opvi._factors import cholesky, diagonal, solve
from opvi.types import Array

CACHED = 1 << 18  # bytes of one particle's matrices from which on they are changed one after another
FEW = 64  # parameters up to which variances are bounded direction by direction
ABOVE = 1.001  # times the largest variance: what is bounded
MEND_EVERY = 16  # updates; rounding makes matrices lopsided, and a transpose is slow
SMALLEST_SHARE = 1e-6  # of the largest variance allowed: below it a variance is rounding error
LOOSENING = 5e-4  # of what forgetting adds to the variances, the share that it adds to each alone

Tree = TypeVar("Tree")
Given = ParamSpec("Given")
Out = TypeVar("Out")


def exactly(function: Callable[Given, Out]) -> Callable[Given, Out]:
    """Return the function with matrix products in full precision; by default a GPU rounds factors to ten bits."""

    @wraps(function)
    def exact(*arguments: Given.args, **named: Given.kwargs) -> Out:
        with jax.default_matmul_precision("highest"):
            return function(*arguments, **named)

    return exact


def when(flag: Array, change: Callable[[Tree], Tree], tree: Tree) -> Tree:
    """Return `change(tree)` if the flag is set, otherwise the tree unchanged.

    This is a loop of at most one iteration: XLA lets it change large arrays in place or leave them
    untouched, whereas a conditional copies them either way.
    """
    go = jnp.asarray(flag)
    return jax.lax.while_loop(lambda c: c[0], lambda c: (jnp.zeros_like(go), change(c[1])), (go, tree))[1]


def apiece(change: Callable[..., Array], matrices: Array, *others: Array) -> Array:
    """Return `change(matrices, *others)`, large matrices on a CPU particle by particle, in place.

    So those of one particle, and what is made of them, stay in the processor's cache: a third less time, and no
    second copy of all of them. On several devices a loop would gather data from the others.

    Args:
        change: a function that treats particles alike, `[n, K, D, D]` like its result.
        matrices: `[n, K, D, D]`.
        others: further arguments, leaves `[n, ...]`.
    """
    if not large(matrices):
        return change(matrices, *others)

    def turn(i: Array, matrices: Array) -> Array:
        one = [jax.lax.dynamic_slice_in_dim(each, i, 1) for each in (matrices, *others)]
        return jax.lax.dynamic_update_slice_in_dim(matrices, change(*one), i, 0)

    return jax.lax.fori_loop(0, len(matrices), turn, matrices)


def large(matrices: Array) -> bool:
    """Return whether matrices `[n, K, D, D]` are taken particle by particle."""
    alone = jax.default_backend() == "cpu" and jax.device_count() == 1
    return alone and len(matrices) > 1 and (matrices.size // len(matrices)) * matrices.dtype.itemsize >= CACHED


class Covariance(NamedTuple):
    """The covariances of every particle and block."""

    matrices: Array  # [n, K, D, D]
    updates: Array  # since they were last made symmetric


def start(variance: Array) -> Covariance:
    """Return diagonal covariances from variances `[n, K, D]`."""
    diagonal = jnp.eye(variance.shape[-1], dtype=variance.dtype)[None, None]
    return Covariance(variance[..., None] * diagonal, jnp.zeros((), jnp.int32))


def variances(C: Covariance) -> Array:
    """Return the diagonal, `[n, K, D]`."""
    return diagonal(C.matrices)


@exactly
def shed(C: Covariance, Z: Array, gamma: Array, largest: Array) -> Covariance:
    r"""Return $(C - Z^\top Z)/\gamma$, scaled back where a variance would exceed `largest`; small matrices `bounded`.

    Where data determine some directions well and others not at all, the variances of the first are below the rounding
    errors of the matrix and may come out negative; forgetting then lets them grow without bound. So the correlations
    are forgotten a little too: the diagonal grows by $5 \cdot 10^{-4} (1/\gamma - 1)$ of itself, which keeps every
    direction above rounding and is small compared with what forgetting adds anyway.

    Args:
        C: the covariance.
        Z: rows to subtract, `[n, K, R, D]`.
        gamma: forgetting, one number per particle; 1 forgets nothing.
        largest: the largest variances, `[n, K, D]`.
    """
    gamma = gamma[:, None, None]
    variance = jnp.maximum(variances(C) - (Z**2).sum(2), SMALLEST_SHARE * largest)
    few = Z.shape[-1] <= FEW
    scale = jnp.sqrt((jnp.ones_like(variance) if few else jnp.minimum(1, largest * gamma / variance)) / gamma)
    Z = Z * scale[:, :, None]
    diagonal = jnp.eye(Z.shape[-1], dtype=Z.dtype)[None, None]
    after = variance * scale**2
    loose = LOOSENING * (1 / gamma - 1) * after
    moved = (Z != 0).any()  # a refused batch takes nothing off, and leaves everything as it was
    updates = jnp.where(moved, jax.lax.rem(C.updates + 1, jnp.asarray(MEND_EVERY, C.updates.dtype)), C.updates)

    def lessened(matrices: Array, Z: Array, scale: Array, after: Array, loose: Array) -> Array:
        matrices = matrices * (scale[..., :, None] * scale[..., None, :])
        matrices = matrices - jnp.einsum("nkrd,nkre->nkde", Z, Z)
        matrices = matrices + loose[..., None] * diagonal

        def mend(matrices: Array) -> Array:
            """Make the covariances symmetric (forgetting would amplify asymmetry), variances bounded from below."""
            return (matrices + matrices.mT) / 2 * (1 - diagonal) + (after + loose)[..., None] * diagonal

        return when(moved & (updates == 0), mend, matrices)

    matrices = apiece(lessened, C.matrices, Z, scale, after, loose)
    return Covariance(bounded(matrices, largest) if few else matrices, updates)


def bounded(matrices: Array, largest: Array) -> Array:
    r"""Return covariances `[n, K, D, D]` with no variance above `largest`, as if such parameters had been looked at.

    $$C \gets C - \frac{C_{jj} - l_j}{C_{jj}^2} C_j C_j^\top$$

    for one parameter after another, the worst first. So what is known of other directions stays as it is: of two equal
    columns only the difference of their weights is unknown, and their sum keeps its variance.
    """
    turns = matrices.shape[-1]

    def over(matrices: Array) -> Array:
        return diagonal(matrices) / largest

    def turn(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        i, matrices = carry
        ratio = over(matrices)
        j = jnp.argmax(ratio, -1)[..., None]
        most, v = jnp.take_along_axis(ratio, j, -1), jnp.take_along_axis(diagonal(matrices), j, -1)
        column = jnp.take_along_axis(matrices, j[..., None], -1)[..., 0] / jnp.where(most > ABOVE, v, 1)
        less = jnp.where(most > ABOVE, v * (1 - 1 / most), 0)
        return i + 1, matrices - less[..., None] * column[..., :, None] * column[..., None, :]

    def more(carry: tuple[Array, Array]) -> Array:
        return (carry[0] < turns) & (over(carry[1]) > ABOVE).any()  # not the largest: one may be NaN

    return jax.lax.while_loop(more, turn, (jnp.zeros((), jnp.int32), matrices))[1]


class Fading(NamedTuple):
    """The effect of forgetting on a covariance: $C \\gets s C s + \\mathrm{diag}(l)$."""

    scale: Array  # s: [n, K, D]
    loose: Array  # l: [n, K, D]


def fading(C: Covariance, gamma: Array, largest: Array) -> Fading:
    """Return the forgetting of `shed`, to be applied before rows are absorbed instead of after."""
    variance = jnp.maximum(variances(C), SMALLEST_SHARE * largest)
    few = largest.shape[-1] <= FEW  # bounded afterwards
    scale = jnp.sqrt((jnp.ones_like(variance) if few else jnp.minimum(1, largest * gamma / variance)) / gamma)
    return Fading(scale, LOOSENING * (1 / gamma - 1) * variance * scale**2)


def faded_times(rows: Array, C: Covariance, fade: Fading) -> Array:
    """Return the product of rows `[n, K, R, D]` with the covariances after forgetting."""
    return ((rows * fade.scale[:, :, None]) @ C.matrices) * fade.scale[:, :, None] + rows * fade.loose[:, :, None]


@exactly
def faded_shed(C: Covariance, fade: Fading, Z: Array, largest: Array) -> Covariance:
    r"""Return the covariances after forgetting, minus $Z^\top Z$; the result is the posterior's."""
    diagonal = jnp.eye(Z.shape[-1], dtype=Z.dtype)[None, None]
    matrices = C.matrices * (fade.scale[..., :, None] * fade.scale[..., None, :]) + fade.loose[..., None] * diagonal
    matrices = matrices - jnp.einsum("nkrd,nkre->nkde", Z, Z)

    def mend(matrices: Array) -> Array:
        after = jnp.maximum(variances(C._replace(matrices=matrices)), SMALLEST_SHARE * largest)
        return (matrices + matrices.mT) / 2 * (1 - diagonal) + after[..., None] * diagonal

    moved = (Z != 0).any()
    updates = jnp.where(moved, jax.lax.rem(C.updates + 1, jnp.asarray(MEND_EVERY, C.updates.dtype)), C.updates)
    matrices = when(moved & (updates == 0), mend, matrices)
    return Covariance(bounded(matrices, largest) if Z.shape[-1] <= FEW else matrices, updates)


@exactly
def restored(C: Array, w: Array, gamma: Array, mean: Array, precision: Array) -> tuple[Array, Array]:
    r"""Return the covariance and mean of a Gaussian $N(w, C)^{\gamma}$ times the prior's density to $1 - \gamma$.

    $$M = \gamma I + (1 - \gamma)\, C P_0^{-1}, \qquad C \gets M^{-1} C, \qquad
      w \gets m_0 + \gamma M^{-1} (w - m_0)$$

    Args:
        C: `[n, K, D, D]`.
        w: `[n, K, D]`.
        gamma: what is left of the past.
        mean: $m_0$, `[K, D]`.
        precision: $P_0^{-1}$, `[K, D, D]`.
    """
    identity = jnp.eye(C.shape[-1], dtype=C.dtype)[None, None]
    M = gamma * identity + (1 - gamma) * (C @ precision[None])
    away = (w - mean[None])[..., None]
    solved = solve(M, jnp.concatenate([C, away], -1))
    C, away = solved[..., :-1], solved[..., -1]
    return (C + C.mT) / 2, mean[None] + gamma * away


def roots(C: Covariance) -> Array:
    """Return lower triangular roots of the covariances, `[n, K, D, D]`, with a small ridge against rounding errors.

    A matrix that is not positive definite within rounding counts as its diagonal.
    """
    diagonal = jnp.maximum(variances(C), jnp.finfo(C.matrices.dtype).tiny)
    sd = jnp.sqrt(diagonal)
    identity = jnp.eye(C.matrices.shape[-1], dtype=sd.dtype)[None, None]
    correlation = C.matrices / (sd[..., :, None] * sd[..., None, :])
    correlation = (correlation + correlation.mT) / 2

    def wider(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        ridge, _ = carry
        L = cholesky((correlation + ridge * identity) / (1 + ridge))
        return 100 * ridge, L

    def fails(carry: tuple[Array, Array]) -> Array:
        ridge, L = carry
        return ~jnp.isfinite(L).all() & (ridge < 1)

    first = jnp.asarray(1e-6, sd.dtype), jnp.full_like(correlation, jnp.nan)
    found = jax.lax.while_loop(fails, wider, first)[1]
    found = jnp.where(jnp.isfinite(found).all((2, 3), keepdims=True), found, identity)
    return sd[..., :, None] * found


def without_correlations(C: Covariance, which: Array) -> Covariance:
    """Return the covariances, those of the particles in `which` reduced to their diagonals."""

    def cut(matrices: Array, which: Array) -> Array:
        eye = jnp.eye(matrices.shape[-1], dtype=matrices.dtype)[None, None]
        alone = jnp.maximum(diagonal(matrices), 0)[..., None] * eye
        return jnp.where(which[:, None, None, None], alone, matrices)

    return C._replace(matrices=when(which.any(), lambda all: apiece(cut, all, which), C.matrices))


class Blocks(NamedTuple):
    """A partition of a vector's indices."""

    order: np.ndarray  # [K, D]: places in the vector; d where a block is padded
    dim: int
    aligned: bool = False  # whether every block begins with whole units, and ends with what belongs to none

    @property
    def run(self) -> slice | None:
        """The places of the only block, if they follow each other: what is cut out, not looked up, costs less."""
        first, size = int(self.order[0, 0]), self.order.shape[1]
        follow = len(self.order) == 1 and first + size <= self.dim and (np.diff(self.order[0]) == 1).all()
        return slice(first, first + size) if follow else None

    def gather(self, vectors: Array) -> Array:
        """Return vectors `[..., d]` as blocks `[..., K, D]`, padded with 0."""
        if self.order.shape == (1, self.dim):
            return vectors[..., None, :]
        if self.run is not None:
            return vectors[..., None, self.run]
        padded = jnp.concatenate([vectors, jnp.zeros((*vectors.shape[:-1], 1), vectors.dtype)], -1)
        return padded[..., self.order]

    def scatter(self, blocks: Array) -> Array:
        """Return blocks `[..., K, D]` as vectors `[..., d]`."""
        if self.order.shape == (1, self.dim):
            return blocks[..., 0, :]
        if self.run is not None:
            room = [(0, 0)] * (blocks.ndim - 2) + [(self.run.start, self.dim - self.run.stop)]
            return jnp.pad(blocks[..., 0, :], room)
        empty = jnp.zeros((*blocks.shape[:-2], self.dim + 1), blocks.dtype)
        return empty.at[..., self.order].set(blocks)[..., :-1]

    @property
    def numbers(self) -> int:
        """How many numbers the matrices of one particle hold."""
        return self.order.size * self.order.shape[1]


def within(places: np.ndarray, unit: int, largest: float) -> Blocks:
    """Return the fewest blocks whose matrices together hold at most `largest` numbers.

    Args:
        places: the vector's indices, related ones side by side.
        unit: how many of them belong together (a hidden unit's weights); blocks hold whole units if possible.
        largest: how many numbers the matrices of one particle may hold.
    """
    d = len(places)
    if d * d <= largest:
        return Blocks(np.arange(d)[None], d)
    size, rest = max(1, int(largest // d)), d % unit
    if 1 < unit <= size - rest and d > unit:  # whole units, and room for what belongs to none
        units = (d - rest) // unit
        count = -(-units // ((size - rest) // unit))
        together = -(-units // count) * unit  # of about equal size: padding is work, too
        order = np.full((count, together + rest), d)
        padded = np.full(count * together, d)
        padded[: d - rest] = places[: d - rest]
        order[:, :together] = padded.reshape(count, together)
        order[-1, together:] = places[d - rest :]
        return Blocks(order, d, True)
    order = np.full((-(-d // size), size), d)
    order.ravel()[:d] = places
    return Blocks(order, d)
