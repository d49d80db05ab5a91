"""Carries a tracker's state over to one with more columns or classes, keeping what was learnt."""

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np

from opvi.filters._kfac import SMALL, WANDERING_DAMPING, KFACState
from opvi.tracking._class_memory import ClassMemory, Kept
from opvi.tracking._classifier import ClassifierState
from opvi.tracking.experts import _metric as metrics

RELU_SPREAD = 2.0  # squared, of the starting weights of the classifier's ReLU networks, whose weights wander


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


def _class_memory(old: ClassMemory, fresh: ClassMemory) -> ClassMemory:
    classes = np.s_[..., : len(old.shares)]
    return old._replace(
        all=Kept(*_rows(*old.all, *fresh.all)),
        recent=Kept(*_rows(*old.recent, *fresh.recent)),
        shares=_put(jnp.zeros_like(fresh.shares), classes, old.shares),
        last=_put(jnp.zeros_like(fresh.last), classes, old.last),
        metric=metrics.widen(old.metric, fresh.metric),
    )


def _rows(x: Any, facts: Any, wide_x: Any, wide_facts: Any) -> tuple[Any, Any]:
    count = min(len(x), len(wide_x))  # a wider memory has room for fewer
    unknown = np.full(wide_x.shape, np.nan, wide_x.dtype)
    return _put(unknown, np.s_[:count, : x.shape[1]], x[:count]), _put(wide_facts, np.s_[:count], facts[:count])


def _put(into: Any, where: Any, what: Any) -> Any:
    out = np.array(into)
    out[where] = np.asarray(what)
    return jnp.asarray(out)


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
