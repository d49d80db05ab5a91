"""How a prediction changes with one column alone: averages over a sample of rows, with a band over the particles.

It needs the predictions of every particle for some rows.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from opvi.app.report._contents import Effect
from opvi.predictive import Classes, Predictive, StudentT
from opvi.tracking._inside import find
from opvi.tracking._mixing._numbers import DOF, NOISE, SPREAD, TILT, NumbersState
from opvi.tracking._recommended import Regressor
from opvi.tracking._wrappers._scaling import Scale, divisor
from opvi.tracking._wrappers._units import UnitsState
from opvi.tracking.experts._networks import NetworksState
from opvi.types import Array, ArrayLike, Sampler, State, Tree

ROWS = 64  # that are averaged over
VALUES = 16  # of a column, at most
MOST = 48  # effects; of more the columns that the predictions follow most closely are taken
LINES = 3  # classes shown, where there are more than two
BAND = 1.645  # standard deviations on each side hold 90 %
TWO_YEARS = 730  # days
# What comes round again in a date: how long a turn is, and what it is called.
CYCLES = {": hour": (24, "hour"), ": weekday": (7, "weekday, 0 is Monday"), ": year": (12, "months since new year")}


class Piece(NamedTuple):
    """Encoded columns that change together, and the values to put there."""

    feature: str
    columns: list[int]
    settings: np.ndarray  # [values, columns]
    values: list[float] | list[str]  # what people call them
    here: np.ndarray  # the sample's own values: numbers, or places in `values`
    missing: bool = False  # the last setting is that of a missing value


class Said(NamedTuple):
    """The predictions of n particles for B rows, which come in groups of 64."""

    values: np.ndarray  # [n, B, outputs]: a number, or the probabilities of the classes
    weights: np.ndarray  # [n, B], adding up to 1
    doubt: np.ndarray  # [n, B / 64]: a particle's own standard deviation of its mean over a group; 0 where not known


def effects(
    sampler: Sampler,
    state: State,
    x: ArrayLike,
    features: Sequence[str],
    origin: Sequence[str],
    classes: Sequence[str] = (),
    texts: Mapping[str, Mapping[str, str]] = {},
) -> list[Effect]:
    r"""Return the effect of each source column, the strongest first.

    With $x_{-j}$ the other columns of the sample's m rows, and f a particle's prediction (or probability of a class),

    $$\bar f_j(v) = \frac1m \sum_{i=1}^m f(v, x_{i,-j})$$

    for values v between the column's 2 % and 98 % quantiles: the weighted mean over the particles, and the band that
    holds 90 % of them, including each particle's own uncertainty where it has one.

    Args:
        sampler: `opvi.regressor(...)` or `opvi.classifier(...)`, watched or remembering, or any other.
        state: its state.
        x: a sample of encoded rows, `[m, k]`; 64 of them are used for the averages.
        features: names of the k columns, such as `weight`, `weight is missing`, `colour=red`, `date: hour sin`.
        origin: the source column of each.
        classes: labels, in the order of the probabilities; none for a regression.
        texts: names for the inputs of hashed source columns: `7+` for 1 in the seventh, `7−` for -1.
    """
    x = np.asarray(x, np.float32)
    if x.ndim != 2 or not x.shape[1] == len(features) == len(origin):
        raise ValueError(
            f"`x` has shape {x.shape}, `features` {len(features)} and `origin` {len(origin)} names, but all must be "
            "about the same columns: (m, k), k and k."
        )
    if not len(x):
        return []

    def ask(rows: np.ndarray) -> Said:
        return said(sampler, state, rows)

    pieces = [piece for piece in _pieces(x, features, origin, texts) if len(piece.values) > 1]
    if len(pieces) > MOST:
        pieces = _followed(pieces, x, ask(spread_out(x, ROWS * VALUES)))
    sample = spread_out(x, ROWS)
    done = [_summary(ask(_varied(sample, piece)), len(piece.settings)) for piece in pieces]
    lines = _lines(done, len(classes))
    names = [classes[line] for line in lines] if classes else [""]
    made = [_effect(piece, out, lines, names) for piece, out in zip(pieces, done, strict=True)]
    return sorted(made, key=lambda effect: -effect.strength)


# --- columns that change together -----------------------------------------------------------------


def _pieces(
    x: np.ndarray, features: Sequence[str], origin: Sequence[str], texts: Mapping[str, Mapping[str, str]] = {}
) -> list[Piece]:
    """Group the encoded columns: a number, the levels of a string, the parts of a date."""
    sources: dict[str, list[int]] = {}
    for index, source in enumerate(origin):
        sources.setdefault(source, []).append(index)
    made = []
    for source, columns in sources.items():
        rest = {column: features[column].removeprefix(source) for column in columns}
        flags = [column for column in columns if rest[column] == " is missing"][:1]
        levels = [column for column in columns if rest[column].startswith("=")]
        hashed = [column for column in columns if rest[column].startswith(": hash ")]
        sines = {rest[column].removesuffix(" sin"): column for column in columns if rest[column].endswith(" sin")}
        cosines = {rest[column].removesuffix(" cos"): column for column in columns if rest[column].endswith(" cos")}
        pairs = {name: [sines[name], cosines[name]] for name in sines if name in cosines}
        taken = {*flags, *levels, *hashed, *(column for pair in pairs.values() for column in pair)}
        numbers = [column for column in columns if column not in taken]
        if levels:
            made.append(_text(x, source, levels, [rest[column][1:] for column in levels], flags))
        if hashed:
            made.append(_hashed(x, source, hashed, flags, texts.get(source, {})))
        alone = len(numbers) + len(flags) == len(columns)  # otherwise a gap shows in other columns as well
        made += [_number(x, features[column], column, flags, alone) for column in numbers]
        if ": days" in rest.values() and ": year" in pairs and np.ptp(x[:, numbers[0]]) < TWO_YEARS:
            made[-1] = _with_season(x, made[-1], pairs.pop(": year"))
        made += [_cycle(x, source, name, pair, flags) for name, pair in pairs.items()]
    return made


def _absent(x: np.ndarray, flags: list[int]) -> np.ndarray:
    """Rows whose value is missing."""
    return x[:, flags[0]] > 0.5 if flags else np.zeros(len(x), bool)


def _number(x: np.ndarray, name: str, column: int, flags: list[int], alone: bool) -> Piece:
    absent = _absent(x, flags)
    here = x[~absent, column]
    here = here[np.isfinite(here)]
    grid = np.unique(here)
    if len(grid) >= VALUES:
        low, high = np.quantile(here, [0.02, 0.98])
        low, high = (low, high) if high > low else (grid[0], grid[-1])
        grid = np.linspace(low, high, VALUES - 1, dtype=np.float32)
    settings = np.zeros((len(grid), 1 + len(flags)), np.float32)
    settings[:, 0] = grid
    missing = bool(absent.any()) and len(grid) > 1 and alone
    if missing:  # as the encoder writes it
        settings = np.concatenate([settings, x[absent][:1][:, [column, *flags]]])
    if len(grid) == 2 and not missing:  # yes or no
        return Piece(name, [column, *flags], settings, [f"{v:g}" for v in grid], np.searchsorted(grid, here))
    return Piece(name, [column, *flags], settings, grid.tolist(), here, missing)


def _text(x: np.ndarray, name: str, columns: list[int], levels: list[str], flags: list[int]) -> Piece:
    """Vary a column of strings: its most frequent levels, and "anything else" and "missing" where rows have them."""
    on, absent = x[:, columns] > 0.5, _absent(x, flags)
    named = [*levels, "(anything else)", "(missing)"]
    counts = np.array([*on.sum(0), (~on.any(1) & ~absent).sum(), absent.sum()])
    settings = np.zeros((len(named), len(columns) + len(flags)), np.float32)
    settings[np.arange(len(levels)), np.arange(len(levels))] = 1
    settings[-1, len(columns) :] = 1
    return _most_frequent(name, columns + flags, settings, named, counts)


def _hashed(x: np.ndarray, name: str, columns: list[int], flags: list[int], texts: Mapping[str, str]) -> Piece:
    """Vary a hashed string by its inputs, each named by its most frequent strings."""
    settings, counts = np.unique(x[:, columns + flags], axis=0, return_counts=True)
    named = []
    for setting in settings[:, : len(columns)]:
        place = int(np.abs(setting).argmax())
        sign = "−" if setting[place] < 0 else "+"
        called = texts.get(f"{place + 1}{sign}", f"place {place + 1}{sign}")
        named.append(called if setting.any() else "(missing)")
    return _most_frequent(f"{name}, many strings", columns + flags, settings, named, counts)


def _most_frequent(name: str, columns: list[int], settings: np.ndarray, named: list[str], counts: np.ndarray) -> Piece:
    kept = np.argsort(-counts, kind="stable")[:VALUES]
    kept = np.sort(kept[counts[kept] > 0])
    here = np.repeat(np.arange(len(kept)), counts[kept])
    return Piece(name, columns, settings[kept], [named[i] for i in kept], here)


def _with_season(x: np.ndarray, days: Piece, season: list[int]) -> Piece:
    """Vary the days together with their season, because within two years the two cannot be separated."""
    nearest = np.abs(x[None, :, days.columns[0]] - days.settings[:, :1]).argmin(1)
    settings = np.concatenate([days.settings, x[nearest][:, season]], 1)
    return days._replace(columns=[*days.columns, *season], settings=settings)


def _cycle(x: np.ndarray, source: str, name: str, pair: list[int], flags: list[int]) -> Piece:
    """Vary the sine and cosine of something periodic, such as the hour."""
    period, called = CYCLES.get(name, (1, f"{name.removeprefix(': ')}, share of a turn"))
    turned = x[(x[:, pair] != 0).any(1)][:, pair]
    here = np.round(np.arctan2(turned[:, 0], turned[:, 1]) / (2 * np.pi) * period, 3) % period
    seen = np.unique(here)
    grid = np.arange(period, dtype=np.float32) if period == 7 else np.linspace(0, period, VALUES, dtype=np.float32)
    if len(seen) <= VALUES:
        grid = seen.astype(np.float32)
    elif period != 7:
        gaps = np.diff(seen, append=seen[0] + period)
        if gaps.max() > period / 6:  # only a part of the turn was seen: nothing is said about the rest
            start = seen[(gaps.argmax() + 1) % len(seen)]
            here = start + (here - start) % period
            grid = np.linspace(here.min(), here.max(), VALUES, dtype=np.float32)
    settings = np.zeros((len(grid), 2 + len(flags)), np.float32)
    settings[:, 0], settings[:, 1] = np.sin(2 * np.pi * grid / period), np.cos(2 * np.pi * grid / period)
    return Piece(f"{source}: {called}", [*pair, *flags], settings, grid.tolist(), here)


def spread_out(x: np.ndarray, rows: int) -> np.ndarray:
    """Return this many rows, evenly spaced from first to last; repeated if there are fewer."""
    return x[np.linspace(0, len(x) - 1, rows).round().astype(int)]


def _varied(sample: np.ndarray, piece: Piece) -> np.ndarray:
    """Return the sample once for each value, `[VALUES · ROWS, k]`; absent values repeat the first."""
    out = np.tile(sample, (VALUES, 1, 1))
    filled = np.concatenate([piece.settings, np.repeat(piece.settings[:1], VALUES - len(piece.settings), 0)])
    out[:, :, piece.columns] = filled[:, None]
    return out.reshape(-1, sample.shape[1])


def _followed(pieces: list[Piece], x: np.ndarray, known: Said) -> list[Piece]:
    """Return the columns that the sample's predictions follow most closely."""
    z = spread_out(x, ROWS * VALUES).astype(float)
    f = (known.weights[..., None] * known.values).sum(0)
    z, f = z - z.mean(0), f - f.mean(0)
    size = np.sqrt((z**2).sum(0))[:, None] * np.sqrt((f**2).sum(0))[None]
    follows = np.abs(np.divide(z.T @ f, size, out=np.zeros_like(size), where=size > 0)).max(1)
    best = sorted(range(len(pieces)), key=lambda i: -follows[pieces[i].columns].max())[:MOST]
    return [pieces[i] for i in sorted(best)]


# --- what every particle says -----------------------------------------------------------------------


def innermost(sampler: Sampler, state: State) -> tuple[Sampler, Tree]:
    """Return the regressor or classifier itself and its state, without wrappers."""
    while hasattr(state, "inner"):
        sampler, state = sampler.sampler, state.inner  # type: ignore[attr-defined]
    return sampler, state


def confirmed(state: State) -> Array:
    """Return the multiple of the particles' own variances that predictions made before learning have confirmed.

    Filters that forget can be far too uncertain where the data say little.
    """
    head = find(state, NumbersState)
    assert head is not None
    scores = jax.nn.softmax(head.scores).reshape(len(DOF), len(NOISE), len(SPREAD), len(TILT))
    return scores.sum((0, 1, 3)) @ jnp.asarray(SPREAD, scores.dtype)


def said(sampler: Sampler, state: State, x: np.ndarray) -> Said:
    """Return what the particles predict for the rows x `[B, k]`, B a multiple of 64.

    A regressor's networks differ as they do, around what the whole model says. For other samplers the components of
    the predictive stand for the particles.
    """
    inner, own = innermost(sampler, state)
    nets = isinstance(inner, Regressor) and inner.networks is not None
    out = _networks(inner, own, x) if nets else _components(sampler, state, x)
    return Said(*(np.asarray(part, float) for part in out))


@partial(jax.jit, static_argnums=0)
def _networks(sampler: Regressor, state: Tree, x: Array) -> tuple[Array, Array, Array]:
    r"""With $\bar J$ the mean Jacobian of a group's rows and C a network's covariance, its uncertainty is
    $\sqrt{s \bar J C \bar J^\top}$, with s from `confirmed`.
    """
    model, (scale, weights) = sampler.model, (units_of(state), network_weights(state))
    place = sampler.experts.index(sampler.networking)

    def group(x: Array) -> tuple[Array, Array]:  # group by group: Jacobians are large
        zero = jnp.zeros(len(x), scale.mean.dtype)
        forecast = model.predict(state.model, model.rows(state.model, x, zero, zero))
        belief = forecast.beliefs[place]
        seen = belief.work
        variance = (seen.J.mean(2) * seen.JC.mean(2)).sum((1, 2))
        return seen.mean + (forecast.one.mean - belief.mean)[None], jnp.sqrt(jnp.maximum(variance, 0))

    y, doubt = jax.lax.map(group, x.astype(scale.mean.dtype).reshape(-1, ROWS, x.shape[1]))
    y = jnp.moveaxis(y, 0, 1).reshape(y.shape[1], -1)
    unit = divisor(scale)[-1]
    shares = jnp.broadcast_to(weights[:, None], y.shape)
    return (y * unit + scale.mean[-1])[..., None], shares, doubt.T * unit * jnp.sqrt(confirmed(state))


def units_of(state: State) -> Scale:
    """Return the units in use."""
    found = find(state, UnitsState)
    assert found is not None
    return found.scale


def network_weights(state: State) -> Array:
    """Return how a regressor's networks are weighed."""
    found = find(state, NetworksState)
    assert found is not None
    return found.members.weights


@partial(jax.jit, static_argnums=0)
def _components(sampler: Sampler, state: State, x: Array) -> tuple[Array, Array, Array]:
    """Return the components; uncertainties within a group of rows are treated as fully correlated."""
    predictive = cast("Predictive", sampler.predict(state, x))
    head = predictive.components
    values = jnp.exp(head.log_probabilities()) if isinstance(head, Classes) else head.mean[..., None]
    own = jnp.sqrt(jnp.maximum(head.spread, 0)) if isinstance(head, StudentT) else jnp.zeros_like(values[..., 0])
    weights = jnp.broadcast_to(jnp.exp(predictive.log_mixture_weights()), values.shape[:2])
    return values, weights, own.reshape(len(own), -1, ROWS).mean(2)


def _summary(known: Said, count: int) -> np.ndarray:
    """Return mean, low and high of the averages over the rows, `[3, values, outputs]`."""

    def over_rows(a: np.ndarray) -> np.ndarray:
        return a.reshape(len(a), VALUES, ROWS, *a.shape[2:]).mean(2)[:, :count]

    w = np.maximum(over_rows(known.weights), 1e-300)
    values, doubt = over_rows(known.weights[..., None] * known.values) / w[..., None], known.doubt[:, :count, None]
    w = w / w.sum(0)
    mean = (w[..., None] * values).sum(0)
    if doubt.any():
        sd = np.sqrt((w[..., None] * ((values - mean) ** 2 + doubt**2)).sum(0))
        return np.stack([mean, mean - BAND * sd, mean + BAND * sd])
    return np.stack([mean, _quantile(values, w, 0.05), _quantile(values, w, 0.95)])


def _quantile(values: np.ndarray, weights: np.ndarray, level: float) -> np.ndarray:
    """Return a quantile of weighted values `[n, values, outputs]`, over n."""
    order = np.argsort(values, 0)
    below = np.cumsum(np.take_along_axis(np.broadcast_to(weights[..., None], values.shape), order, 0), 0)
    place = (below < level).sum(0).clip(max=len(values) - 1)
    return np.take_along_axis(np.take_along_axis(values, order, 0), place[None], 0)[0]


def _lines(done: list[np.ndarray], classes: int) -> list[int]:
    """Return the outputs to show: the second of two classes; of more, those whose probabilities change most."""
    if classes <= 2:
        return [max(classes - 1, 0)]
    if not done:
        return []
    reach = sum(np.ptp(out[0], 0)[:classes] for out in done)  # a model may have room for more
    return sorted(np.argsort(-np.asarray(reach), kind="stable")[:LINES].tolist())


def _effect(piece: Piece, out: np.ndarray, lines: list[int], names: list[str]) -> Effect:
    out = out[..., lines]
    missing = [(float(m), float(a), float(b)) for m, a, b in out[:, -1].T] if piece.missing else []
    out = out[:, : len(piece.values)]
    mean, low, high = (part.T.tolist() for part in out)
    text = isinstance(piece.values[0], str)
    told = [
        out[0, piece.here, k] if text else np.interp(piece.here, np.asarray(piece.values, float), out[0, :, k])
        for k in range(len(lines))
    ]
    return Effect(
        piece.feature,
        "text" if text else "number",
        piece.values,
        mean,
        low,
        high,
        strength=max((float(np.std(one)) for one in told if len(one)), default=0.0),
        lines=names,
        seen=[] if text else np.quantile(piece.here, np.linspace(0.1, 0.9, 9)).tolist(),
        missing=missing,
    )
