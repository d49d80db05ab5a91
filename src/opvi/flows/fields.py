r"""Velocity fields: SVGD, Blob, GFSD and GFSF, each as a drift and a repulsion kept apart.

Everything is a product with the Gram matrix $K_{ij} = k(r_{ij})$ or the slope matrix
$S_{ij} = k'(r_{ij})$ of squared distances $r_{ij}$, because for a radial kernel

$$\sum_j \nabla_{x_j} K(x_j, x_i) = 2 \big[ (S x)_i - (S 1)_i x_i \big].$$

Rows are worked through in blocks: one block of all n rows is the dense form, with $O(n^2 + nd)$
memory; smaller blocks give the same numbers in $O(n \cdot \mathrm{block} + nd)$. On an NVIDIA GPU, many particles
under a Gaussian kernel go through fused programs instead (`opvi.flows._pairwise`), several times faster.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypedDict, Unpack

import jax
import jax.numpy as jnp
from jax import lax

from opvi.flows._pairwise import has_gpu_kernels, pair_sums
from opvi.flows._ring import is_spread, ring
from opvi.flows.kernels import PRECISION, Bandwidth, Kernel, median, nearly_centred, rbf, squared_distances
from opvi.types import Array, Field, FieldValue, Particles, Scores, Tree

LARGEST_DENSE = 4096  # particles; above this the n² matrices are worked through in blocks
DEFAULT_BLOCK = 512


def _over_rows(function: Callable[[Tree], Tree], rows: Tree, block: int) -> Tree:
    """Apply `function` to blocks of rows and join the results; the last block is padded with its own last row."""
    n = len(jax.tree.leaves(rows)[0])
    if block >= n:
        return function(rows)
    count = -(-n // block)

    def split(a: Array) -> Array:
        padding = jnp.broadcast_to(a[-1:], (count * block - n, *a.shape[1:]))
        return jnp.concatenate([a, padding]).reshape(count, block, *a.shape[1:])

    out = lax.map(function, jax.tree.map(split, rows))
    return jax.tree.map(lambda a: a.reshape(count * block, *a.shape[2:])[:n], out)


class _Pairs:
    """All-pairs products for one set of particles, under one kernel, bandwidth and block size."""

    def __init__(self, x: Particles, kernel: Kernel, h: Array, block: int | None, precision: lax.PrecisionLike):
        self.x = nearly_centred(x)
        self.kernel, self.h, self.precision = kernel, h, precision
        n = len(x)
        self.block = block or (n if n <= LARGEST_DENSE else DEFAULT_BLOCK)
        self.spread = is_spread(n)  # over devices: the sums then go around a ring
        # Whoever asks for a block size or a precision gets just that.
        usual = block is None and precision is PRECISION and x.dtype == jnp.float32 and not self.spread
        self.fused = usual and n > LARGEST_DENSE and kernel.height is not None and has_gpu_kernels()

    def product(self, a: Array, b: Array) -> Array:
        return jnp.matmul(a, b, precision=self.precision)

    def gram(self, rows: Particles, others: Particles) -> tuple[Array, Array]:
        """Return K and S for a block of rows against others."""
        r = squared_distances(rows, others, self.precision)
        d = self.x.shape[1]
        return self.kernel.value(r, self.h, d), self.kernel.slope(r, self.h, d)

    def push(self, slope: Array, rows: Particles, others: Particles) -> Array:
        r"""Return $2[(Sx)_i - (S1)_i x_i]$ for a block of rows, summed over others."""
        slope = 2 * slope
        return self.product(slope, others) - slope.sum(1, keepdims=True) * rows

    def total(self, function: Callable[[Tree, Tree], Tree], rows: Tree, others: Tree) -> Tree:
        """Return a function of blocks of rows that sums over all others."""

        def blocks(rows: Tree, others: Tree) -> Tree:
            return _over_rows(lambda block: function(block, others), rows, self.block)

        return ring(blocks, rows, others) if self.spread else blocks(rows, others)

    def sums(self, columns: Array, factor: float = 1.0) -> tuple[Array, Array]:
        r"""$(K c)_i$ and $\sum_j \nabla_{x_j} K(x_j, x_i)$, both times a factor, in one pass over all pairs."""

        def both(x: Particles, others: tuple[Particles, Array]) -> tuple[Array, Array]:
            y, c = others
            gram, slope = self.gram(x, y)
            return self.product(gram * factor, c), self.push(slope * factor, x, y)

        def tiled(x: Particles, columns: Array, h: Array) -> tuple[Array, Array]:
            return self.total(both, self.x, (self.x, columns))

        def on_gpu(x: Particles, columns: Array, h: Array) -> tuple[Array, Array]:
            height = self.kernel.height(h, x.shape[1])  # type: ignore[misc]  # `fused` has asked
            weighted, push = pair_sums(x, columns, h, height * factor)
            return weighted, push

        if not self.fused:
            return tiled(self.x, columns, self.h)
        return lax.platform_dependent(self.x, columns, self.h, cuda=on_gpu, default=tiled)


@dataclass(frozen=True)
class _Radial:
    """A field computed from all pairs of particles under a radial kernel."""

    compute: Callable[[_Pairs, Scores], tuple[Array, Array]]
    kernel: Kernel
    bandwidth: Bandwidth
    block: int | None
    precision: lax.PrecisionLike

    def __call__(self, particles: Particles, scores: Scores) -> FieldValue:
        h = self.bandwidth(particles)
        pairs = _Pairs(particles, self.kernel, h, self.block, self.precision)
        return FieldValue(*self.compute(pairs, scores), h)


class Products(TypedDict, total=False):
    """How the products are computed; see `svgd`."""

    block: int | None
    precision: lax.PrecisionLike


def _radial(
    compute: Callable[[_Pairs, Scores], tuple[Array, Array]],
    kernel: Kernel | None,
    bandwidth: Bandwidth | None,
    block: int | None = None,
    precision: lax.PrecisionLike = PRECISION,
) -> Field:
    if block is not None and block < 1:
        raise ValueError(f"`block` is {block}, but must be at least 1 row, or None to choose by n.")
    return _Radial(compute, kernel or rbf(), bandwidth or median(), block, precision)


def svgd(
    kernel: Kernel | None = None,
    bandwidth: Bandwidth | None = None,
    *,
    block: int | None = None,
    precision: lax.PrecisionLike = PRECISION,
) -> Field:
    r"""Stein variational gradient descent (Liu and Wang, 2016).

    $$u_i = \tfrac1n \sum_j K(x_j, x_i)\, s_j, \qquad r_i = \tfrac1n \sum_j \nabla_{x_j} K(x_j, x_i)$$

    Args:
        kernel: `kernels.rbf()` if omitted, or `kernels.imq()`.
        bandwidth: a rule of `opvi.flows.kernels`; `median()` if omitted.
        block: rows worked on at once; if omitted, all of them up to 4,096 particles and 512 above.
        precision: the precision of the matrix products; the full precision of the dtype by default, on every device.
    """
    return _radial(_svgd, kernel, bandwidth, block, precision)


def _svgd(pairs: _Pairs, scores: Scores) -> tuple[Array, Array]:
    return pairs.sums(scores, 1 / len(pairs.x))


def gfsd(kernel: Kernel | None = None, bandwidth: Bandwidth | None = None, **how: Unpack[Products]) -> Field:
    r"""Gradient flow with smoothed density (Liu et al., 2019): the score of a kernel density estimate.

    $$u_i = s_i, \qquad r_i = -\sum_k \nabla_{x_i} K(x_i, x_k) \Big/ \sum_j K(x_i, x_j)$$

    The arguments are those of `svgd`.
    """
    return _radial(_gfsd, kernel, bandwidth, **how)


def _gfsd(pairs: _Pairs, scores: Scores) -> tuple[Array, Array]:
    mass, push = pairs.sums(jnp.ones_like(scores[:, :1]))
    return scores, push / mass


def blob(kernel: Kernel | None = None, bandwidth: Bandwidth | None = None, **how: Unpack[Products]) -> Field:
    r"""The Blob method (Chen et al., 2018): GFSD and its mirror term.

    $$u_i = s_i, \qquad r_i = -\sum_k \nabla_{x_i} K(x_i, x_k)
      \Big[ \frac{1}{\sum_j K(x_i, x_j)} + \frac{1}{\sum_j K(x_k, x_j)} \Big]$$

    The arguments are those of `svgd`.
    """
    return _radial(_blob, kernel, bandwidth, **how)


def _blob(pairs: _Pairs, scores: Scores) -> tuple[Array, Array]:
    mass = pairs.total(lambda x, y: pairs.gram(x, y)[0].sum(1), pairs.x, pairs.x)

    def both(rows: tuple[Particles, Array], others: tuple[Particles, Array]) -> Array:
        (x, own), (y, theirs) = rows, others
        _, slope = pairs.gram(x, y)
        return pairs.push(slope, x, y) / own[:, None] + pairs.push(slope / theirs[None, :], x, y)

    return scores, pairs.total(both, (pairs.x, mass), (pairs.x, mass))


SWEPT = 64  # particles up to which a linear system is solved without LAPACK


def _solve(matrix: Array, b: Array, product: Callable[[Array, Array], Array]) -> Array:
    """Solve a symmetric positive definite system.

    Small ones are solved by eliminating one row after another: a LAPACK call inside a compiled loop wakes
    the threads of its BLAS, which on a busy machine costs sixty times the work itself.
    """
    n = len(matrix)
    if n > SWEPT:
        return jax.scipy.linalg.solve(matrix, b, assume_a="pos")

    def sweep(k: Array, a: Array) -> Array:
        row = a[k] / a[k, k]
        swept = a - a[:, k][:, None] * row[None, :]
        swept = swept.at[k].set(row).at[:, k].set(-a[:, k] / a[k, k])
        return swept.at[k, k].set(1 / a[k, k])

    return product(lax.fori_loop(0, n, sweep, matrix), b)


GFSF_RIDGE = 1e-2  # a Gram matrix of close particles is nearly singular


def gfsf(kernel: Kernel | None = None, bandwidth: Bandwidth | None = None, **how: Unpack[Products]) -> Field:
    r"""Gradient flow with smoothed test functions (Liu et al., 2019).

    $$u_i = s_i, \qquad r = (K + \epsilon\, k(0)\, I)^{-1} b, \qquad b_k = \sum_j \nabla_{x_j} K(x_j, x_k)$$

    with $\epsilon = 0.01$. In blocks, and over several devices, it is solved by conjugate gradients instead of a
    factorisation.

    The arguments are those of `svgd`.
    """
    return _radial(_gfsf, kernel, bandwidth, **how)


def _gfsf(pairs: _Pairs, scores: Scores) -> tuple[Array, Array]:
    b = pairs.total(lambda x, y: pairs.push(pairs.gram(x, y)[1], x, y), pairs.x, pairs.x)
    n, dtype = len(pairs.x), pairs.x.dtype
    ridge = GFSF_RIDGE * pairs.kernel.value(jnp.zeros((), dtype), pairs.h, pairs.x.shape[1])
    if pairs.block >= n and not pairs.spread:
        gram = pairs.gram(pairs.x, pairs.x)[0] + ridge * jnp.eye(n, dtype=dtype)
        return scores, _solve(gram, b, pairs.product)

    def multiply(v: Array) -> Array:
        products = pairs.total(lambda x, o: pairs.product(pairs.gram(x, o[0])[0], o[1]), pairs.x, (pairs.x, v))
        return products + ridge * v

    tolerance = 10 * float(jnp.finfo(dtype).eps)
    solution, _ = jax.scipy.sparse.linalg.cg(multiply, b, tol=tolerance, maxiter=2000)
    return scores, solution
