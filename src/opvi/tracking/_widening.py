"""Carries a tracker's state over to one with more columns or classes, keeping what was learnt."""

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np

from opvi.filters._covariance import Blocks, within
from opvi.filters._kfac import SMALL, WANDERING_DAMPING, KFACState
from opvi.targets import MLP
from opvi.tracking import _pace as pacing
from opvi.tracking import _process as processes
from opvi.tracking._class_memory import ClassMemory, Kept
from opvi.tracking._classifier import ClassifierState
from opvi.tracking._memory import Memory
from opvi.tracking._metric import Metric
from opvi.tracking._regressor import BUDGET, RegressorState

RELU_SPREAD = 2.0  # squared, of the starting weights of the classifier's ReLU networks, whose weights wander


def widened_regressor(old: RegressorState, fresh: RegressorState, hidden: tuple[int, ...]) -> RegressorState:
    """Return the old state in the shape of the fresh one, which has more columns; those start as in the fresh one.

    A column that has been constant so far is 0 to the network, so the function stays the same.
    """
    columns, wide = len(old.moments.mean) - 1, len(fresh.moments.mean) - 1
    networks = MLP((columns, *hidden, 1)), MLP((wide, *hidden, 1))
    # Where each of the old parameters goes: only the first layer's weights, input by input, are more.
    width = networks[0].shapes[0][1]
    places = np.r_[0 : columns * width, wide * width : networks[1].dim]
    others = len(fresh.calibration.shape) - wide - 1  # after 1 and the columns: see `calibration._features`
    shape = np.r_[0 : columns + 1, wide + 1 : wide + 1 + others]
    column = np.r_[0:columns, wide]  # X, then y
    known = fresh.calibration._replace(
        **{name: getattr(old.calibration, name) for name in ("weights", "products", "seen", "error", "rounds")},
        scores=old.calibration.scores,
        shape=_put(fresh.calibration.shape, shape, old.calibration.shape),
        shape_covariance=_put(
            fresh.calibration.shape_covariance, np.ix_(shape, shape), old.calibration.shape_covariance
        ),
        shape_mean=old.calibration.shape_mean,
    )
    blocks = [within(*network.units, BUDGET / 4 / len(old.particles)) for network in networks]
    gates = fresh.gates
    if gates is not None and old.gates is not None:
        gates = gates._replace(
            factor=_put(gates.factor, np.s_[:columns], old.gates.factor),
            product=_put(gates.product, np.s_[:columns], old.gates.product),
            square=_put(gates.square, np.s_[:columns], old.gates.square),
            error=old.gates.error,
            seen=old.gates.seen,
            linear=_put(gates.linear, np.s_[:columns], old.gates.linear),
            bent=_put(gates.bent, np.s_[:columns], old.gates.bent),
        )
    matrices = _covariances(np.asarray(old.past.matrices), np.array(fresh.past.matrices), blocks, places)
    return old._replace(
        process=None if fresh.process is None or old.process is None else processes.widened(old.process, fresh.process),
        particles=_put(fresh.particles, np.s_[:, places], old.particles),
        past=old.past._replace(matrices=jnp.asarray(matrices)),
        calibration=known,
        moments=old.moments._replace(
            mean=_put(fresh.moments.mean, column, old.moments.mean),
            square=_put(fresh.moments.square, column, old.moments.square),
        ),
        scale=old.scale._replace(
            mean=_put(fresh.scale.mean, column, old.scale.mean), sd=_put(fresh.scale.sd, column, old.scale.sd)
        ),
        gates=gates,
        memory=None if fresh.memory is None or old.memory is None else _memory(old.memory, fresh.memory),
        held=_put(fresh.held, np.s_[:, np.r_[0:columns, wide : wide + 3]], old.held),
        odd=_put(fresh.odd, np.s_[:columns], old.odd),
        begin=_put(fresh.begin, np.s_[:, places], old.begin),
        pace=pacing.without_trail(old.pace),
        trail=fresh.trail,
    )


def widened_classifier(old: ClassifierState, fresh: ClassifierState) -> ClassifierState:
    """Return the old state in the shape of the fresh one, which has more columns, more classes, or both.

    The fresh one may lack the linear filters, if they have become too expensive.
    """
    columns, wide = len(old.moments.mean), len(fresh.moments.mean)
    trackers = len(fresh.log_weights)
    log_weights = old.log_weights[:trackers]
    members = np.s_[: trackers + 1]
    return old._replace(
        moments=old.moments._replace(
            mean=_put(fresh.moments.mean, np.s_[:columns], old.moments.mean),
            square=_put(fresh.moments.square, np.s_[:columns], old.moments.square),
        ),
        networks=tuple(_network(a, b, columns, wide) for a, b in zip(old.networks, fresh.networks, strict=True)),
        linear=None if fresh.linear is None else _filters(old.linear, fresh.linear, columns, wide),
        log_weights=log_weights - jnp.logaddexp.reduce(log_weights),
        exponents=old.exponents._replace(
            value=old.exponents.value[members], covariance=old.exponents.covariance[members, members]
        ),
        memory=None if fresh.memory is None or old.memory is None else _class_memory(old.memory, fresh.memory),
        first=_put(fresh.first, np.s_[:, np.r_[0:columns, wide]], old.first),
        odd=_put(fresh.odd, np.s_[:columns], old.odd),
    )


def _memory(old: Memory, fresh: Memory) -> Memory:
    """Widen the memory; rows kept before a column appeared have a gap there, which counts as its mean."""
    x, facts = _rows(old.x, old.facts, fresh.x, fresh.facts)
    terms = np.s_[: min(len(old.weights), len(fresh.weights))]  # two, then those of each column
    levels = fresh.levels
    if levels is not None and old.levels is not None:
        levels = _put(levels, np.s_[: len(old.levels)], old.levels)
    return old._replace(
        x=x,
        facts=facts,
        metric=_metric(old.metric, fresh.metric),
        products=_put(fresh.products, (terms, terms), old.products[terms, terms]),
        moments=_put(fresh.moments, terms, old.moments[terms]),
        weights=_put(fresh.weights, terms, old.weights[terms]),
        levels=levels,
    )


def _class_memory(old: ClassMemory, fresh: ClassMemory) -> ClassMemory:
    classes = np.s_[..., : len(old.shares)]
    return old._replace(
        all=Kept(*_rows(*old.all, *fresh.all)),
        recent=Kept(*_rows(*old.recent, *fresh.recent)),
        shares=_put(jnp.zeros_like(fresh.shares), classes, old.shares),
        last=_put(jnp.zeros_like(fresh.last), classes, old.last),
        metric=_metric(old.metric, fresh.metric),
    )


def _rows(x: Any, facts: Any, wide_x: Any, wide_facts: Any) -> tuple[Any, Any]:
    count = min(len(x), len(wide_x))  # a wider memory has room for fewer
    unknown = np.full(wide_x.shape, np.nan, wide_x.dtype)
    return _put(unknown, np.s_[:count, : x.shape[1]], x[:count]), _put(wide_facts, np.s_[:count], facts[:count])


def _metric(old: Metric, fresh: Metric) -> Metric:
    columns = np.s_[: len(old.root)]
    if fresh.root.ndim == 1:  # of many columns, each by itself
        slopes, root = (np.diagonal(a) if a.ndim == 2 else a for a in (old.slopes, old.root))
        return old._replace(slopes=_put(fresh.slopes, columns, slopes), root=_put(fresh.root, columns, root))
    corner = (columns, columns)
    return old._replace(slopes=_put(fresh.slopes, corner, old.slopes), root=_put(fresh.root, corner, old.root))


def _put(into: Any, where: Any, what: Any) -> Any:
    out = np.array(into)
    out[where] = np.asarray(what)
    return jnp.asarray(out)


def _covariances(old: np.ndarray, new: np.ndarray, blocks: list[Blocks], places: np.ndarray) -> np.ndarray:
    """Return the new matrices `[n, K, D, D]` with the old entries where both blocks have them."""
    whole = np.zeros((blocks[1].dim + 1,) * 2, old.dtype)  # of one particle, in the new places
    placed = np.append(places, blocks[1].dim)
    within_new = np.isin(np.arange(blocks[1].dim + 1), places)
    for particle in range(len(old)):
        whole[:] = 0
        for order, matrix in zip(blocks[0].order, old[particle], strict=True):
            whole[np.ix_(placed[order], placed[order])] = matrix
        for k, order in enumerate(blocks[1].order):
            kept = within_new[order]
            new[particle, k][np.ix_(kept, kept)] = whole[np.ix_(order[kept], order[kept])]
    return new


def _network(old: KFACState, fresh: KFACState, columns: int, wide: int) -> KFACState:
    sizes = [
        (columns, *(f.outputs.shape[-1] for f in old.factors)),
        (wide, *(f.outputs.shape[-1] for f in fresh.factors)),
    ]
    particles, starts = np.array(fresh.particles), [0, 0]
    factors = []
    for index, (mine, theirs) in enumerate(zip(*(itertools.pairwise(s) for s in sizes), strict=True)):
        # A layer is its weights [inputs, outputs] and its bias [outputs], one after the other.
        blocks = [
            np.arange(start, start + (rows + 1) * width).reshape(rows + 1, width)
            for start, (rows, width) in zip(starts, (mine, theirs), strict=True)
        ]
        row = np.r_[0 : mine[0], theirs[0]]
        particles[:, blocks[1][np.ix_(row, np.arange(mine[1]))]] = np.asarray(old.particles)[:, blocks[0]]
        starts = [start + block.size for start, block in zip(starts, blocks, strict=True)]
        a, b = old.factors[index], fresh.factors[index]
        corner = np.s_[:, : mine[1], : mine[1]]
        outputs = _put(b.outputs, corner, a.outputs)
        inside = (slice(None), *np.ix_(row, row))
        if a.inputs is None:
            spread = float((np.trace(a.outputs, axis1=1, axis2=2) / mine[1] + SMALL).mean())
            variance = spread * RELU_SPREAD / (wide + 1) / WANDERING_DAMPING  # as before any row
            begin = variance * np.eye(theirs[0] + 1, dtype=b.inverse.dtype)[None].repeat(len(b.inverse), 0)
            factors.append(b._replace(inverse=_put(begin, inside, a.inverse), outputs=outputs))
        else:
            inputs = _put(b.inputs, inside, a.inputs)
            factors.append(b._replace(inputs=inputs, inverse=_put(b.inverse, inside, a.inverse), outputs=outputs))
    # Nothing kept of the damping: the next round inverts afresh.
    return old._replace(particles=jnp.asarray(particles), factors=factors, kept=jnp.zeros_like(old.kept))


def _filters(old: Any, fresh: Any, columns: int, wide: int) -> Any:
    n = len(old.particles)
    classes = old.particles.shape[1] // (columns + 1), fresh.particles.shape[1] // (wide + 1)
    every = np.arange(fresh.particles.shape[1]).reshape(classes[1], wide + 1)
    place = every[: classes[0], np.r_[0:columns, wide]].ravel()
    everyone = np.arange(n)
    return old._replace(
        particles=_put(fresh.particles, np.ix_(everyone, place), old.particles),
        covariance=_put(fresh.covariance, np.ix_(everyone, place, place), old.covariance),
    )
