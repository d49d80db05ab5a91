r"""Sums over all pairs under the Gaussian kernel, fused on an NVIDIA GPU: memory stays linear in n.

For every particle, with $K_{ij} = e^{-\|x_i - x_j\|^2/h}$ and any columns $c_j$,

$$\sum_j K_{ij}\, c_j \qquad \text{and} \qquad \tfrac2h \sum_j K_{ij}\, (x_i - x_j)$$

are what every field is made of. Three forms, by dimension: differences on the ordinary units where they are few;
tiles on the tensor cores with numbers split into bfloat16 pieces that add up to 24 bits; whole matrix products of
such pieces where dimensions are many. All keep about single precision: near a fixed point of the particles, where
drift and repulsion cancel, few digits are left, so

- sums are taken in parts (a tile, or a few dozen rows) that are added with compensation, because in one long
  sum the many tiny terms would be lost against it;
- a particle's own term, 1 among numbers around 1/n, is added at the end;
- differences are taken of the same rounded coordinates that the kernel saw.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from opvi.types import Array, Particles, Scalar, Tree

FEW = 4  # dimensions, and columns: differences on the ordinary units
MANY = 128  # dimensions from which whole matrix products are faster than tiles
ROW_BLOCKS = 4096  # of work, at least, so that every multiprocessor has some: columns are cut where rows are few
LARGEST_CUT = 16
UNROLLED, PART = 8, 64  # particles a loop's turn, and added up before they join the sum
THREAD_ROWS = 512  # a block's rows in the first form
COMPENSATED = 32  # columns up to which the tiles' sums are compensated; beyond, registers run out and errors are small
CHUNK, CHUNK_ENTRIES = 16_384, 1 << 27  # the last form's tiles: columns, and entries of a tile
TWICE_LOG_TWO = (1.38623046875, 6.389617919921875e-05, -3.809308424251867e-09)  # 12 bits, 12 bits, the rest
Ref = Any  # a block of an array in a kernel; Pallas has no type for it
FAR = 1e18  # where padding stands: its kernel with any particle is 0


class PairSums(NamedTuple):
    """The sums over all pairs, one entry per particle."""

    weighted: Array  # [n, m]: sum of K c
    push: Array  # [n, d]: sum of K (x_i - x_j), times 2/h


def has_gpu_kernels() -> bool:
    """Return whether programs may use the fused sums: there is a GPU, and JAX still has Pallas.

    Pallas is imported only here, because nothing else needs it.
    """
    if jax.default_backend() != "gpu":
        return False
    try:
        from jax.experimental.pallas import triton  # noqa: F401
    except ImportError:
        return False
    return True


def pair_sums(
    x: Particles, columns: Array, h: Scalar, factor: Scalar | float = 1.0, *, interpret: bool = False
) -> PairSums:
    """Return the sums in float32, in the form that suits the shape.

    Args:
        x: particles, centred, so that no digits are lost to their distance from the origin.
        columns: `[n, m]`.
        h: the kernel's bandwidth.
        factor: multiplies both sums. Applied here it costs no extra rounding.
        interpret: run the GPU's programs on a CPU, one operation after another, to test them.
    """
    scale = jnp.sqrt(math.log2(math.e) / h)  # K is then 2^-|y_i - y_j|²
    y = x * scale
    if x.shape[1] <= FEW and columns.shape[1] <= FEW:
        weighted, push = _by_differences(y, columns, interpret)
    elif x.shape[1] < MANY:
        weighted, push = _by_tiles(y, columns, interpret)
    else:
        weighted, push = _by_products(y, columns)
    high, low = _twice_log_two(scale)
    return PairSums(weighted * factor, (push * high + push * low) * factor)


def _twice_log_two(scale: Scalar) -> tuple[Array, Array]:
    r"""$2 \ln 2 \cdot$ scale, which is $2 / (h \cdot \mathrm{scale})$, as a sum of two numbers.

    Rounded to one, it would multiply all of the repulsion by a factor a little off from the one that the kernel saw,
    and where drift and repulsion cancel, that is what would remain.
    """
    first, second, third = TWICE_LOG_TWO
    coarse = lax.reduce_precision(scale, exponent_bits=8, mantissa_bits=11)
    rest = scale - coarse
    high = scale * (first + second)
    # Products of 12 bits each are exact, and so is the first difference.
    low = ((coarse * first - high) + (rest * first + coarse * second)) + (rest * second + scale * third)
    return high, low


def _pallas(kernel: Callable[..., None], interpret: bool, warps: int, stages: int, **spec: Any) -> Callable[..., Array]:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    compiler = None if interpret else triton.CompilerParams(num_warps=warps, num_stages=stages)
    return pl.pallas_call(kernel, interpret=interpret, compiler_params=compiler, **spec)


def _assembly(text: str, *args: Array) -> Array:
    """Apply one GPU instruction to every entry."""
    from jax.experimental.pallas import triton

    shape = jnp.broadcast_shapes(*(a.shape for a in args))
    wide = [jnp.broadcast_to(a, shape) for a in args]
    out = jax.ShapeDtypeStruct(shape, jnp.float32)
    constraints = ",".join(["=f"] + ["f"] * len(args))
    return triton.elementwise_inline_asm(text, args=wide, constraints=constraints, pack=1, result_shape_dtypes=[out])[0]


def _exp2(v: Array, interpret: bool) -> Array:
    # The library's exp2 takes care of numbers below 1e-38, which costs a sixth of the time here.
    return jnp.exp2(v) if interpret else _assembly("ex2.approx.ftz.f32 $0, $1;", v)


def _multiply_add(a: Array, b: Array, c: Array, interpret: bool) -> Array:
    # Triton is not allowed to contract a product and a sum by itself.
    return a * b + c if interpret else _assembly("fma.rn.f32 $0, $1, $2, $3;", a, b, c)


def _dot(a: Array, b: Array, turned: bool = False, *, interpret: bool) -> Array:
    """Return the product of two tiles, the second one transposed if `turned`."""
    if interpret:
        return jnp.dot(a, b.T if turned else b, preferred_element_type=jnp.float32)
    from jax.experimental.pallas import triton

    return triton.dot(a, b, trans_b=turned)


def _add(total: Array, lost: Array, part: Array) -> tuple[Array, Array]:
    """Kahan's compensated sum: `total - lost` is the sum, to twice the digits."""
    part = part - lost
    new = total + part
    return new, (new - total) - part


def _cut(n: int, block: int, unit: int) -> tuple[int, int]:
    """Return the number of parts to cut the columns into, and the number of particles after padding."""
    cuts = min(LARGEST_CUT, 1 << max(0, math.ceil(math.log2(ROW_BLOCKS * block / n))))
    multiple = math.lcm(block, cuts * unit)
    return cuts, -(-n // multiple) * multiple


def _padded(a: Array, n: int, value: float = 0.0) -> Array:
    return jnp.pad(a, ((0, n - len(a)), *((0, 0),) * (a.ndim - 1)), constant_values=value)


def _by_differences(y: Particles, columns: Array, interpret: bool) -> tuple[Array, Array]:
    """Sum by differences: a thread owns some particles and visits all others; threads exchange nothing."""
    from jax.experimental import pallas as pl

    (n, d), m = y.shape, columns.shape[1]
    cuts, room = _cut(n, THREAD_ROWS, PART)
    each = room // cuts
    y = _padded(y, room, FAR).T
    others = jnp.concatenate([y, _padded(columns, room).T])
    multiply_add = functools.partial(_multiply_add, interpret=interpret)

    def kernel(own_ref: Ref, others_ref: Ref, out_ref: Ref) -> None:
        own = [own_ref[k, :] for k in range(d)]
        zero = tuple(jnp.zeros(THREAD_ROWS, jnp.float32) for _ in range(m + d))
        first = pl.program_id(1) * each

        def meet(j: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
            """Add the term of one other particle."""
            other = [others_ref[k, j] for k in range(d + m)]
            gap = [own[k] - other[k] for k in range(d)]
            exponent = -(gap[0] * gap[0])
            for g in gap[1:]:
                exponent = multiply_add(-g, g, exponent)
            K = _exp2(exponent, interpret)
            factors = [*(jnp.broadcast_to(c, K.shape) for c in other[d:]), *gap]
            return tuple(multiply_add(K, f, a) for f, a in zip(factors, sums, strict=True))

        def part(p: Array, carry: Tree) -> Tree:
            def some(j: Array, sums: Tree) -> Tree:
                for u in range(UNROLLED):
                    sums = meet(first + p * PART + j * UNROLLED + u, sums)
                return sums

            sums = lax.fori_loop(0, PART // UNROLLED, some, zero)
            added = [_add(*three) for three in zip(*carry, sums, strict=True)]
            return tuple(a[0] for a in added), tuple(a[1] for a in added)

        total, lost = lax.fori_loop(0, each // PART, part, (zero, zero))
        for k in range(m + d):
            out_ref[0, k, :] = total[k] - lost[k]

    out = _pallas(
        kernel,
        interpret,
        warps=4,
        stages=1,
        grid=(room // THREAD_ROWS, cuts),
        in_specs=[
            pl.BlockSpec((d, THREAD_ROWS), lambda i, c: (0, i)),
            pl.BlockSpec((d + m, room), lambda i, c: (0, 0)),
        ],
        out_specs=pl.BlockSpec((1, m + d, THREAD_ROWS), lambda i, c: (c, 0, i)),
        out_shape=jax.ShapeDtypeStruct((cuts, m + d, room), jnp.float32),
    )(y, others)
    sums = out.sum(0).T[:n]
    return sums[:, :m], sums[:, m:]


def pieces(a: Array, count: int) -> list[Array]:
    """Return `a` as a sum of bfloat16 arrays, each with eight more bits."""
    parts = []
    for _ in range(count):
        # Not a cast there and back, which XLA takes for nothing and leaves out.
        part = lax.reduce_precision(a, exponent_bits=8, mantissa_bits=7)
        parts.append(part.astype(jnp.bfloat16))
        a = a - part
    return parts


def _tile(out_wide: int) -> tuple[int, int, int]:
    """Return rows and columns of a tile, and the warps that share it; fastest on an H200."""
    if out_wide <= 32:
        return 64, 64, 4
    return (64, 32, 4) if out_wide <= 64 else (128, 64, 8)


def _by_tiles(y: Particles, columns: Array, interpret: bool) -> tuple[Array, Array]:
    r"""Sum over tiles of K on the tensor cores; K is never stored.

    $\sum_j K_{ij} (c_j + r_i)$ with $c = (c, -y)$ and $r = (0, y)$ gives both sums at once.
    """
    from jax.experimental import pallas as pl

    (n, d), m = y.shape, columns.shape[1]
    wide, out_wide = (max(16, 1 << (width - 1).bit_length()) for width in (d, m + d))
    rows, others, warps = _tile(out_wide)
    compensated = out_wide <= COMPENSATED
    cuts, room = _cut(n, rows, others)
    each = room // cuts

    dot = functools.partial(_dot, interpret=interpret)

    def laid_out(a: Array, width: int) -> Array:
        return jnp.pad(_padded(a, room), ((0, 0), (0, width - a.shape[1])))

    points = jnp.stack(pieces(laid_out(y, wide), 3))
    square = _padded((y * y).sum(1), room, jnp.inf)  # K with padding is 0
    # Rounded at random, column entries cancel in the sum: 16 bits are as good as 24 where there are many of them.
    fine = 3 if out_wide <= 64 else 2
    both = jnp.stack(pieces(laid_out(jnp.concatenate([columns, -y], 1), out_wide), fine))
    own = laid_out(jnp.concatenate([jnp.zeros_like(columns), y], 1), out_wide)

    def kernel(
        rows_ref: Ref, row_square_ref: Ref, own_ref: Ref, points_ref: Ref, square_ref: Ref, both_ref: Ref, out_ref: Ref
    ) -> None:
        x = [rows_ref[k] for k in range(3)]
        row_square = row_square_ref[...]
        first = pl.program_id(1) * each
        ahead = [lax.broadcasted_iota(jnp.int32, (rows, others), axis) for axis in (0, 1)]
        ahead_of = pl.program_id(0) * rows + ahead[0] - ahead[1]

        def tile(t: Array, carry: Tree) -> Tree:
            start = first + t * others
            at = pl.ds(start, others)
            z = [points_ref[k, at, :] for k in range(3)]
            S = dot(x[0], z[1], True) + dot(x[1], z[0], True)
            S = S + (dot(x[1], z[1], True) + dot(x[0], z[2], True) + dot(x[2], z[0], True))
            S = S + dot(x[0], z[0], True)
            K = _exp2(jnp.minimum(2 * S - row_square[:, None] - square_ref[at][None, :], 0), interpret)
            K = jnp.where(ahead_of == start, 0, K)  # a particle's own
            high = K.astype(jnp.bfloat16)
            low = (K - high.astype(jnp.float32)).astype(jnp.bfloat16)
            c = [both_ref[k, at, :] for k in range(fine)]
            part = dot(low, c[0])
            for piece in reversed(c):
                part = part + dot(high, piece)
            total, lost, mass, mass_lost = carry
            mass, mass_lost = _add(mass, mass_lost, K.sum(1))
            return (*(_add(total, lost, part) if compensated else (total + part, lost)), mass, mass_lost)

        zero, none = jnp.zeros((rows, out_wide), jnp.float32), jnp.zeros(rows, jnp.float32)
        nothing = zero if compensated else none
        total, lost, mass, mass_lost = lax.fori_loop(0, each // others, tile, (zero, nothing, none, none))
        r = own_ref[...]
        rest = r * mass_lost[:, None] + (lost if compensated else 0)
        # The product is not rounded before the sum, in which most of it cancels.
        out_ref[0] = _multiply_add(r, mass[:, None], total, interpret) - rest

    whole = [points.shape, square.shape, both.shape]
    out = _pallas(
        kernel,
        interpret,
        warps=warps,
        stages=2,
        grid=(room // rows, cuts),
        in_specs=[
            pl.BlockSpec((3, rows, wide), lambda i, c: (0, i, 0)),
            pl.BlockSpec((rows,), lambda i, c: (i,)),
            pl.BlockSpec((rows, out_wide), lambda i, c: (i, 0)),
            *(pl.BlockSpec(shape, lambda i, c, shape=shape: (0,) * len(shape)) for shape in whole),
        ],
        out_specs=pl.BlockSpec((1, rows, out_wide), lambda i, c: (c, i, 0)),
        out_shape=jax.ShapeDtypeStruct((cuts, room, out_wide), jnp.float32),
    )(points, square, own, points, square, both)
    sums = out.sum(0)[:n]
    return sums[:, :m] + columns, sums[:, m : m + d]


def _product(a: list[Array], b: list[Array]) -> Array:
    """Multiply sums of two pieces, smallest terms first; the product of the two small pieces is below 16 bits."""
    multiply = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)
    return (multiply(a[1], b[0]) + multiply(a[0], b[1])) + multiply(a[0], b[0])


def _by_products(y: Particles, columns: Array) -> tuple[Array, Array]:
    """Sum over tiles of K as matrices; in many dimensions most of the work is two matrix products."""
    (n, d), m = y.shape, columns.shape[1]
    chunk = min(CHUNK, n)
    room = -(-n // chunk) * chunk
    rows = min(room, CHUNK_ENTRIES // chunk)
    square = _padded((y * y).sum(1), room, jnp.inf)
    points, both = pieces(_padded(y, room), 2), pieces(_padded(jnp.concatenate([columns, -y], 1), room), 2)
    # One product in three times as many dimensions, instead of three products and their sum.
    x, z = points[0], points[1]
    left, right = jnp.concatenate([z, x, x], 1), jnp.concatenate([x, z, x], 1)

    def block(start: Array) -> tuple[Array, Array]:
        mine, own = lax.dynamic_slice_in_dim(left, start, rows), lax.dynamic_slice_in_dim(square, start, rows)

        def tile(t: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            total, mass = carry
            there = t * chunk
            theirs, their_square, *c = (
                lax.dynamic_slice_in_dim(a, there, chunk) for a in (right, square, both[0], both[1])
            )
            S = jnp.matmul(mine, theirs.T, preferred_element_type=jnp.float32)
            K = jnp.exp2(jnp.minimum(2 * S - own[:, None] - their_square[None, :], 0))
            same = (start + jnp.arange(rows))[:, None] == (there + jnp.arange(chunk))[None, :]
            K = jnp.where(same, 0, K)
            return total + _product(pieces(K, 2), c), mass + K.sum(1)

        nothing = jnp.zeros((rows, m + d), jnp.float32), jnp.zeros(rows, jnp.float32)
        return lax.fori_loop(0, room // chunk, tile, nothing)

    blocks = -(-room // rows)
    starts = jnp.minimum(jnp.arange(blocks) * rows, room - rows)
    if blocks == 1:
        total, mass = block(starts[0])
    else:
        total, mass = lax.map(block, starts)
        # The last block may start earlier, to end with the padding.
        order = jnp.minimum(jnp.arange(room) // rows, blocks - 1)
        inside = jnp.arange(room) - starts[order]
        total, mass = total[order, inside], mass[order, inside]
    total, mass = total[:n], mass[:n]
    return total[:, :m] + columns, total[:, m:] + mass[:, None] * y
