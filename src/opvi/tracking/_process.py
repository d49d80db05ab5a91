r"""A Gaussian process over the last rows: it learns from tens of rows what networks need hundreds for.

$$k(a, b) = s \Big(1 + \tfrac14 \sum_j (a_j - b_j)^2 / \ell_j^2\Big)^{-2} + \frac{v}{F} \sum_j h_j a_j b_j + c, \qquad
  p(x) = k(x, X) (K + \sigma^2 / w)^{-1} y$$

Its settings $\ell, s, \sigma^2, v$ climb the marginal likelihood, a few steps whenever a tenth more rows have come. Of
many columns, one either helps, and has a length of about $\sqrt F$, or it does not, and has one of about $e^3 \sqrt F$;
how many do not is learnt. $h_j$ falls from 1 to 0 as the length becomes long; where columns are few, it is 1. A column
that has been constant so far begins with the long length. The networks' mean m becomes $m + g (p - m)$, with the g in
[0, 1] that would have served the last rows best, each predicted before it was learnt. While there are few rows, or few
since a jump, g is near 1; networks that have seen thousands make it 0. Rows are kept as they came, so nothing changes
with the units of the networks.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from opvi._factors import diagonal, root_inverse
from opvi.filters._covariance import when
from opvi.tracking import _scaling as scaling
from opvi.tracking._calibration import USUAL_ROWS, Beside
from opvi.tracking._neighbours import put
from opvi.tracking._scaling import Scale
from opvi.types import Array, Scalar

ROWS = 512  # the last ones, that it is fitted to
MANY = 1 << 30  # rows from which on the count begins again half-way, before it overflows
TAUGHT = 256  # of them, that a step of the settings is learnt from
BLOCK = 64  # of them, that are factored at once: empty blocks are left out
WIDEST = 64  # columns
EVERY, SELDOM = 100.0, 400.0  # rows, at most, until it is fitted again: after a tenth more, 20 at least
UNUSED = 0.05  # g below which it is fitted seldom
MANY_STEPS, FEW_STEPS, FEWEST_STEPS = 8, 4, 2  # of the settings, at each fit
FEW_ROWS, MORE_ROWS = 200, 1000  # up to which there are many of them, and few
RATE = 0.2  # of a step, in logarithms
DECAY = (0.8, 0.95)  # of the means of slopes and of their squares
CONSTANT = 0.1  # c
USUAL = (1.0, 0.1, 0.3)  # s, σ², v: the middle of their priors
SPREAD = 1.8  # of the logarithms of these three, in their priors; that of the lengths is 1
LONG = 3.0  # logarithm of the length of a column that does not help, in units of √F; the largest is the same
HELP = 10  # columns; of more, the rest is thought not to help, as if that had been seen in so many columns
LESS, STEEP = 2.0, 4.0  # of many columns: the same logarithm at which one has half a straight part, and how steeply
LARGEST_SIZE = 4.0  # of s: sums of larger numbers that nearly cancel would lose their digits
SMALLEST_NOISE = 3e-4  # of the variance of y: with less, rounding would show
MEMORY = 0.95  # of the squared errors behind g, for 20 rows
RIDGE = 5.0  # usual squared errors: pulls g towards a half
LARGEST = 5.0  # times the usual error: what a row may say about g
JUDGED = 180  # rows from which on it can tell which columns help
VANISHED = 2.0  # logarithm of a length, in units of √F, from which on a column does not help by the bent part
SHORT = 1.0  # the same logarithm, below which it helps, surely if it is half a unit less
USEFUL = 0.002  # of the variance of y: a column that explains more helps
LEFT = 0.25  # of the variance of y: if so much is noise to it, columns may help in ways that it cannot see
DOUBT = 12.0  # variances of a straight slope, that are added to that


class Process(NamedTuple):
    """Rows, what is fitted to them, and how well that has predicted."""

    rows: Array  # [ROWS, F + 2]: x and y as they came, and weights; the oldest is replaced
    counts: Array  # [2]: rows since the start, and when it was last fitted; 0: it is not
    settings: Array  # [3, F + 3]: logarithms of lengths, s, σ², v; running means of their slopes, and of the squares
    steps: Scalar  # of the settings
    points: Array  # [ROWS, F]: inputs it was last fitted to, standardised
    root: Array  # [ROWS, ROWS]: inverse of the lower root of their covariance
    alpha: Array  # [ROWS]: its inverse times y
    scale: Scale  # in which that was
    errors: Array  # [3]: discounted sums: squared errors of networks, products of both, squared errors of the process
    straight: Array = 1.0  # type: ignore[assignment]  # [F]: weights of columns in the straight part it was fitted with


def start(columns: int, dtype: jnp.dtype) -> Process:
    """Return a process without rows."""
    zero = jnp.zeros((), dtype)
    return Process(
        jnp.zeros((ROWS, columns + 2), dtype),
        jnp.zeros(2, jnp.int32),
        jnp.concatenate([_prior(columns, dtype)[:1], jnp.zeros((2, columns + 3), dtype)]),
        zero,
        jnp.zeros((ROWS, columns), dtype),
        jnp.zeros((ROWS, ROWS), dtype),
        jnp.zeros(ROWS, dtype),
        Scale(jnp.zeros(columns + 1, dtype), jnp.zeros(columns + 1, dtype)),
        jnp.zeros(3, dtype),
        jnp.ones(columns, dtype),
    )


def _prior(columns: int, dtype: jnp.dtype) -> Array:
    """Return means and precisions of the settings' logarithms, `[2, F + 3]`."""
    middle = [0.5 * math.log(columns)] * columns + [math.log(one) for one in USUAL]
    return jnp.asarray([middle, [1.0] * columns + [SPREAD**-2] * 3], dtype)


def _pull(settings: Array, prior: Array) -> Array:
    r"""Return the slope of minus the logarithm of the settings' prior.

    A length's logarithm u, from that of √F, has density $(1 - \pi) N(0, 1) + \pi N(L, 1)$; its slope is $u - L r$ with
    r the probability that the column does not help. π is learnt from all columns, and 0 where they are few.
    """
    off, columns = settings - prior[0], len(settings) - 3
    if columns <= HELP:
        return prior[1] * off
    apart = LONG * (off[:columns] - LONG / 2)
    useless = (HELP * (1 - HELP / columns) + jax.nn.sigmoid(apart).sum()) / (HELP + columns)
    vanishes = jax.nn.sigmoid(apart + jnp.log(useless / (1 - useless)))
    return prior[1] * off - LONG * jnp.pad(vanishes, (0, 3))


def share(process: Process) -> Scalar:
    """Return g; 0 while nothing is fitted."""
    own, both, its = process.errors
    best = jnp.clip((own - both + RIDGE) / (own + its - 2 * both + 2 * RIDGE), 0, 1)
    return jnp.where(process.counts[1] > 0, best, 0)


def vanished(process: Process | None, above: int = 0) -> Array | None:
    r"""Return how surely each of more than `above` columns does not help, from 0 to 1; below 0, that it does help.

    If it does not, its length is long, and its straight slope, whose square is the share of the variance of y that it
    explains, small; if it does, its length is short. Both count less where networks predict better, or where much is
    noise to the process.
    """
    if process is None or process.points.shape[1] <= above:
        return None
    columns, fitted = process.points.shape[1], process.counts[1]
    u, (_, noise, v) = process.settings[0, :columns] - 0.5 * math.log(columns), jnp.exp(process.settings[0, columns:])
    straight = v / columns * process.straight * (process.alpha @ process.points)
    least = USEFUL + DOUBT * noise / jnp.clip(fitted.astype(noise.dtype), 1, ROWS)
    trust = jnp.where(fitted >= JUDGED, share(process), 0) * jnp.maximum(1 - noise / LEFT, 0)
    known = (u > VANISHED) & (process.scale.sd[:-1] > 0)  # a column that has not moved yet has not been seen
    surely = jnp.where(known, jnp.clip(jnp.log(least / (straight**2 + 1e-9)), 0, 1), 0)
    return trust * (surely - jnp.clip(2 * (SHORT - u), 0, 1))


def beside(process: Process | None, scale: Scale, x: Array) -> Beside | None:
    """Return what the process says of rows as they came `[B, F]`, in the units of `scale`; None without one."""
    if process is None:
        return None
    columns, there = x.shape[1], process.scale
    z = scaling.readable(scaling.of_inputs(there), x)
    here = _filled(process.counts[1])
    (_, bent), line = _parts(process.settings[0], process.straight, z, process.points, True)
    k = jnp.where(here[None], bent + line, 0)
    own = _own(process.settings[0], process.straight, z)
    variance = jnp.maximum(own - ((k @ process.root.T) ** 2).sum(1), 1e-4 * own)
    unit, old = scaling.divisor(scale)[columns], scaling.divisor(there)[columns]
    # Large terms nearly cancel: partial sums lose fewer digits, and not others for one row than for many.
    mean = (k * process.alpha[None]).reshape(len(x), 32, -1).sum(2).sum(1) * (old / unit) + (
        there.mean[columns] - scale.mean[columns]
    ) / unit
    return Beside(share(process), mean, variance * (old / unit) ** 2)


def scored(
    process: Process | None, said: Beside | None, mean: Array, y: Array, weight: Array, size: Scalar
) -> Process | None:
    """Return the process with the squared errors of some rows, predicted by networks and by the process.

    Args:
        process: before the rows.
        said: what it predicted.
        mean: what the networks predicted.
        y: the targets, in the same units.
        weight: the weights of the rows.
        size: the usual squared error.
    """
    if process is None or said is None:
        return None
    reach = LARGEST * jnp.sqrt(size)
    own, its = (jnp.clip(one - y, -reach, reach) for one in (mean, said.mean))
    new = jnp.stack([own * own, own * its, its * its]) @ weight / size
    keep = MEMORY ** (weight.sum() / USUAL_ROWS)
    good = (process.counts[1] > 0) & jnp.isfinite(new).all()
    return process._replace(errors=jnp.where(good, keep * process.errors + new, process.errors))


def jumped(process: Process | None, old: Scale, new: Scale, known: Array) -> Process | None:
    """Return the process after a jump: its targets in new units if that is all that is `known`, else without rows."""
    if process is None:
        return None
    y = process.rows[:, -2]
    ratio = scaling.divisor(new)[-1] / scaling.divisor(old)[-1]
    there = process.scale
    moved = process._replace(
        rows=jnp.concatenate(
            [process.rows[:, :-2], (new.mean[-1] + (y - old.mean[-1]) * ratio)[:, None], process.rows[:, -1:]], 1
        ),
        scale=Scale(
            scaling.with_last(there.mean, new.mean[-1] + (there.mean[-1] - old.mean[-1]) * ratio),
            scaling.with_last(there.sd, scaling.divisor(there)[-1] * ratio),
        ),
    )
    fresh = start(process.points.shape[1], y.dtype)
    return jax.tree.map(lambda a, b: jnp.where(known, a, b), moved, fresh)


def widened(old: Process, fresh: Process) -> Process:
    """Return the process with the columns of a fresh one, which has more; of the old rows they are missing."""
    columns, wide = old.points.shape[1], fresh.points.shape[1]
    more, width = wide - columns, jnp.log(jnp.asarray(wide / columns, old.steps.dtype))

    def padded(leaf: Array, last: int, value: float = 0.0) -> Array:
        before, after = jnp.split(leaf, [leaf.shape[-1] - last], -1)
        room = [(0, 0)] * (leaf.ndim - 1) + [(0, more)]
        return jnp.concatenate([jnp.pad(before, room, constant_values=value), after], -1)

    settings = padded(old.settings, 3).at[0, columns:wide].set(fresh.settings[0, columns:wide])
    return old._replace(
        rows=padded(old.rows, 2, jnp.nan),
        settings=settings.at[0, -1].add(width),  # of v: the straight part is one of all columns
        points=padded(old.points, 0),
        scale=Scale(*(padded(one, 1) for one in old.scale)),
        straight=padded(old.straight, 0, 1.0),
    )


def learn(
    process: Process | None, scale: Scale, rows: tuple[Array, Array, Array], half_life: float | None
) -> Process | None:
    """Return the process with rows added, x and y as they came; fitted again if there are enough new ones."""
    if process is None:
        return None
    x, y, weight = rows
    here = weight > 0
    number = process.counts[0] + jnp.cumsum(here, dtype=jnp.int32)
    place = jnp.where(
        here & (number > number[-1] - ROWS), jax.lax.rem(number - 1, jnp.asarray(ROWS, number.dtype)), ROWS
    )
    kept = put(process.rows, place, jnp.concatenate([x, y[:, None], weight[:, None]], 1))
    counts = jnp.stack([number[-1], process.counts[1]])
    process = process._replace(rows=kept, counts=counts - jnp.where(number[-1] > MANY, MANY // 2, 0))
    new, last = jnp.stack([counts[0] - counts[1], counts[1]]).astype(x.dtype)
    due = new >= jnp.clip(last / 10, USUAL_ROWS, jnp.where(share(process) < UNUSED, SELDOM, EVERY))
    return when(due, lambda p: _fitted(p, scale, half_life), process)


def _fitted(process: Process, scale: Scale, half_life: float | None) -> Process:
    """Return the process fitted to its rows, after a few steps of its settings."""
    columns, seen = process.points.shape[1], process.counts[0]
    here, dtype = _filled(seen), process.rows.dtype
    x = process.rows[:, :-2]
    z = scaling.readable(scaling.of_inputs(scale), jnp.where(jnp.isnan(x), scale.mean[None, :-1], x))
    y = jnp.where(here, (process.rows[:, -2] - scale.mean[-1]) / scaling.divisor(scale)[-1], 0)
    weight = process.rows[:, -1]
    if half_life is not None:
        age = ((seen - 1 - jnp.arange(ROWS, dtype=jnp.int32)) % ROWS).astype(dtype)
        weight = weight * jnp.exp2(-age / half_life)
    known, prior = jnp.concatenate([z, y[:, None], weight[:, None]], 1), _prior(columns, dtype)
    longest, free = 0.5 * math.log(columns) + LONG, jnp.full(3, -jnp.inf, dtype)
    least = jnp.concatenate([jnp.where(scale.sd[:-1] > 0, -jnp.inf, longest), free])  # of columns that have not moved
    most = jnp.asarray([longest] * columns + [math.log(LARGEST_SIZE), math.inf, math.inf], dtype)

    def between(settings: Array, a: Array, b: Array, some: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        bend, line = _parts(settings, _lines(settings), a[:, :columns], b[:, :columns])
        return jnp.where(some[0][:, None] & some[1][None], bend[1] + line, 0), *bend

    def noisy(settings: Array, K: Array, rows: Array, some: Array) -> Array:
        return K + jnp.diag(jnp.where(some, _noise(settings) / jnp.maximum(rows[:, -1], 1e-3), 1))

    def climb(turn: Array, carry: tuple[Array, Scalar, Array]) -> tuple[Array, Scalar, Array]:
        """Factor one half of the rows, the first and the last in turn, and move the settings.

        In the turn after the last, only factor the first half.
        """
        (now, slope, square), steps, _ = carry
        moves = turn < count
        at = jnp.where(moves, turn & 1, 0) * jnp.clip(seen - TAUGHT, 0, ROWS - TAUGHT)
        rows, some = jax.lax.dynamic_slice_in_dim(known, at, TAUGHT), here[:TAUGHT]
        K, inner, bent = between(now, rows, rows, (some, some))
        root, inverse = _rooted(noisy(now, K, rows, some), seen)
        alpha = inverse @ rows[:, columns]
        G = jnp.where(some[:, None] & some[None], inverse - alpha[:, None] * alpha[None], 0) / 2
        down = _slopes(now, G, inner * bent, bent, rows[:, :columns], rows[:, -1]) + _pull(now, prior)
        more, (a, b) = steps + 1, DECAY
        slope, square = a * slope + (1 - a) * down, b * square + (1 - b) * down**2
        move = RATE * slope / (1 - a**more) / (jnp.sqrt(square / (1 - b**more)) + 1e-3)
        new = jnp.stack([jnp.clip(now - move, least, most), slope, square])
        return jnp.where(moves & jnp.isfinite(new).all(), new, carry[0]), jnp.where(moves, more, steps), root

    def whole(root: Array) -> Array:
        """Factor the second half, given the first."""
        (first, some), (second, others) = (known[:TAUGHT], here[:TAUGHT]), (known[TAUGHT:], here[TAUGHT:])
        W = root[:TAUGHT, :TAUGHT]
        A = between(settings[0], second, first, (others, some))[0] @ W.T
        K = noisy(settings[0], between(settings[0], second, second, (others, others))[0], second, others)
        below = root_inverse(K - A @ A.T)
        return jnp.concatenate([root[:TAUGHT], jnp.concatenate([-(below @ A) @ W, below], 1)])

    count = jnp.where(seen <= FEW_ROWS, MANY_STEPS, jnp.where(seen <= MORE_ROWS, FEW_STEPS, FEWEST_STEPS))
    begin = process.settings, process.steps, process.root[:TAUGHT, :TAUGHT]
    settings, steps, root = jax.lax.fori_loop(0, count + 1, climb, begin)
    root = when(seen > TAUGHT, whole, jnp.pad(root, (0, ROWS - TAUGHT)))
    alpha = root.T @ (root @ y)
    good = jnp.isfinite(alpha).all()
    return process._replace(
        counts=jnp.stack([seen, jnp.where(good, seen, 0)]),
        settings=jnp.where(good, settings, start(columns, dtype).settings),
        steps=jnp.where(good, steps, 0),
        points=z,
        root=jnp.where(good, root, 0),
        alpha=jnp.where(good, alpha, 0),
        scale=scale,
        straight=jnp.where(good, _lines(settings[0]), 1),
    )


def _rooted(K: Array, filled: Array) -> tuple[Array, Array]:
    r"""Return the inverse W of the lower root of a covariance `[R, R]`, and the covariance's inverse.

    Block after block of rows, $W \gets (W, \; [-L^{-1} A W, \; L^{-1}])$ with $A = K_b W^\top$ and
    $L L^\top = K_{bb} - A A^\top$. Blocks of which no row is `filled` are left out, and are 0.
    """

    def extended(W: Array, inverse: Array) -> tuple[Array, Array]:
        return (W, inverse) if len(W) == len(K) else jax.lax.cond(filled > len(W), with_block, with_none, W, inverse)

    def with_block(W: Array, inverse: Array) -> tuple[Array, Array]:
        before, here = slice(len(W)), slice(len(W), len(W) + BLOCK)
        A = K[here, before] @ W.T
        below = root_inverse(K[here, here] - A @ A.T)
        new = jnp.concatenate([-(below @ A) @ W, below], 1)
        return extended(jnp.concatenate([jnp.pad(W, ((0, 0), (0, BLOCK))), new]), _wider(inverse, BLOCK) + new.T @ new)

    def with_none(W: Array, inverse: Array) -> tuple[Array, Array]:
        return _wider(W, len(K) - len(W)), _wider(inverse, len(K) - len(W))

    none = jnp.zeros((0, 0), K.dtype)
    return extended(none, none)


def _wider(square: Array, more: int) -> Array:
    """Return a square matrix with rows and columns of zeros after its own."""
    return jnp.pad(square, (0, more))


def _filled(rows: Array) -> Array:
    """Return which places hold a row, of this many rows so far."""
    return jnp.arange(ROWS, dtype=jnp.int32) < rows


def _parts(settings: Array, h: Array, a: Array, b: Array, apart: bool = False) -> tuple[tuple[Array, Array], Array]:
    """Return 1 / (1 + q / 4) and the bent part of the covariances between a and b, and their straight part.

    With `apart`, q is a sum of differences squared, which keeps all its digits, and the same ones for any number of
    rows; products of matrices are faster.
    """
    columns = a.shape[1]
    length, (s, _, v) = jnp.exp(settings[:columns]), jnp.exp(settings[columns:])
    u, w, b = a / length[None], b / length[None], b * h[None]
    if apart:
        q = ((u.T[:, :, None] - w.T[:, None]) ** 2).sum(0)
        product = (a.T[:, :, None] * b.T[:, None]).sum(0)
    else:
        q, product = jnp.maximum((u**2).sum(1)[:, None] + (w**2).sum(1)[None] - 2 * u @ w.T, 0), a @ b.T
    inner = 1 / (1 + q / 4)
    return (inner, s * inner**2), v / columns * product + CONSTANT


def _lines(settings: Array) -> Array:
    r"""Return the weights $h_j$ of the columns in the straight part: of many, those with long lengths have less."""
    columns = len(settings) - 3
    if columns <= HELP:
        return jnp.ones(columns, settings.dtype)
    return jax.nn.sigmoid(STEEP * (LESS + 0.5 * math.log(columns) - settings[:columns]))


def _noise(settings: Array) -> Scalar:
    return jnp.exp(settings[-2]) + SMALLEST_NOISE


def _slopes(settings: Array, G: Array, bend: Array, bent: Array, z: Array, weight: Array) -> Array:
    r"""Return the gradient in the settings of a function of K whose gradient in K is G.

    With $M = G \circ s (1 + q / 4)^{-3}$ and $u = z / \ell$, the slope in $\log \ell_j$ is
    $\sum_{ik} M_{ik} (u_{ij} - u_{kj})^2$.
    """
    columns = z.shape[1]
    noise, v = jnp.exp(settings[-2]), jnp.exp(settings[-1])
    M, u = G * bend, z / jnp.exp(settings[:columns])[None]
    lengths = 2 * (M.sum(1) @ u**2 - (u * (M @ u)).sum(0))
    h = _lines(settings)
    line = (z * (G @ z)).sum(0) * h * v / columns
    if columns > HELP:
        lengths -= STEEP * (1 - h) * line
    rest = [(G * bent).sum(), (diagonal(G) / jnp.maximum(weight, 1e-3)).sum() * noise, line.sum()]
    return jnp.concatenate([lengths, jnp.stack(rest)])


def _own(settings: Array, h: Array, z: Array) -> Array:
    """Return the variances of the function at z."""
    columns = z.shape[1]
    s, _, v = jnp.exp(settings[columns:])
    return s + v / columns * (z**2 * h[None]).sum(1) + CONSTANT
