"""A tracker's state carried over to one with more columns of X, or more classes: what was learnt stays learnt."""

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np

from opvi.filters._covariance import Blocks, within
from opvi.filters._kfac import SMALL, WANDERING_DAMPING, KFACState
from opvi.targets import MLP
from opvi.tracking._classifier import ClassifierState
from opvi.tracking._regressor import BUDGET, RegressorState

RELU_SPREAD = 2.0  # squared, of the starting weights of the classifier's ReLU networks, whose weights wander


def widened_regressor(old: RegressorState, fresh: RegressorState, hidden: tuple[int, ...]) -> RegressorState:
    """The old state in the shape of the fresh one, which has more columns: they begin where they are in the fresh one.

    A column that has been constant so far is 0 to the network, so the function stays the same.
    """
    columns, wide = len(old.moments.mean) - 1, len(fresh.moments.mean) - 1
    networks = MLP((columns, *hidden, 1)), MLP((wide, *hidden, 1))
    # Where each of the old parameters goes: only the first layer's weights, input by input, are more.
    width = networks[0].shapes[0][1]
    places = np.r_[0 : columns * width, wide * width : networks[1].dim]
    shape = np.r_[0 : columns + 1, wide + 1 : wide + 4]  # 1, the columns, three more: see `calibration._features`
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
        )
    matrices = _covariances(np.asarray(old.past.matrices), np.array(fresh.past.matrices), blocks, places)
    return old._replace(
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
    )


def widened_classifier(old: ClassifierState, fresh: ClassifierState) -> ClassifierState:
    """The old state in the shape of the fresh one, which has more columns, more classes, or both.

    The fresh one may lack the linear filters, where they have become too dear.
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
    )


def _put(into: Any, where: Any, what: Any) -> Any:
    out = np.array(into)
    out[where] = np.asarray(what)
    return jnp.asarray(out)


def _covariances(old: np.ndarray, new: np.ndarray, blocks: list[Blocks], places: np.ndarray) -> np.ndarray:
    """The new matrices `[n, K, D, D]` with the old ones' entries, where both blocks have them."""
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
