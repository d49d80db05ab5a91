"""The particles in a plane, by what they predict; the weights of a linear model."""

from collections.abc import Sequence

import numpy as np

from opvi.app.report._contents import Coefficient, Projection
from opvi.app.report._effects import BAND, ROWS, confirmed, innermost, network_weights, said, spread_out, units_of
from opvi.filters._covariance import variances
from opvi.tracking._class_memory import MEMBERS
from opvi.tracking._inside import find
from opvi.tracking._recommended import Regressor
from opvi.tracking._wrappers._scaling import divisor
from opvi.tracking.experts._layers import RELU, SINE, TANH
from opvi.tracking.experts._networks import Networks, NetworksState
from opvi.types import ArrayLike, Sampler, State, Tree

KINDS = {TANH: "tanh network", RELU: "ReLU network", SINE: "sine network"}
NETWORKS = ("ReLU, long memory", "tanh, long memory", "ReLU, short memory", "tanh, short memory")


def projection(
    sampler: Sampler, state: State, x: ArrayLike, features: Sequence[str] = (), classes: Sequence[str] = ()
) -> Projection:
    r"""Return the first two principal components of the particles' predictions at a sample of rows.

    Weights of networks mean little by themselves (hidden units can change places); predictions do. With $F_{ij}$ what
    particle i predicts for row j of m and w the particles' weights, the points are $(F - w^\top F)\,V_{1:2} / \sqrt m$,
    V from the singular vectors of $\sqrt w\,(F - w^\top F)$. Distances are root mean squared differences between
    predictions, as far as the plane shows them. For linear models the weights are returned as well.

    Args:
        sampler: `opvi.regressor(...)` or `opvi.classifier(...)` with their own settings, watched or remembering.
        state: its state.
        x: a sample of encoded rows, `[m, k]`; 64 of them are used.
        features: names of the k columns.
        classes: labels; none for a regression.
    """
    x = np.asarray(x, np.float32)
    if x.ndim != 2 or not len(x):
        raise ValueError(f"`x` has shape {x.shape}, but a sample of at least one row is needed: (m, k).")
    known = said(sampler, state, spread_out(x, ROWS))
    weights = known.weights.mean(1)
    weights = weights / max(weights.sum(), 1e-300)
    points, explained = plane(known.values.reshape(len(weights), -1), weights)
    inner, own = innermost(sampler, state)
    if isinstance(inner, Regressor):
        nets = inner.networks
        kinds = [KINDS[kind] for kind in nets.settings.kind] if nets else ["component"] * len(weights)
        groups = kinds if not nets or nets.hidden else ["linear model"] * len(weights)
        told = _line(nets, own, features) if nets and not nets.hidden else []
        unit = "change of the prediction"
    else:
        groups = _groups(own, len(weights))
        told, unit = [] if own.networks else _lines(own, features, classes), "change of the log odds"
    return Projection(points.tolist(), explained, weights.tolist(), groups, told, unit)


def plane(values: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, tuple[float, float]]:
    """Return rows `[n, m]` in the plane that keeps most of their weighted differences, and the shares of its axes."""
    good = np.isfinite(values).all(1)
    w = np.where(good, weights, 0)[:, None] / max(weights[good].sum(), 1e-300)
    kept = np.where(good[:, None], values, 0)
    centred = np.where(good[:, None], kept - (w * kept).sum(0), 0) / np.sqrt(values.shape[1])
    _, S, V = np.linalg.svd(np.sqrt(w) * centred, full_matrices=False)
    points, shares = np.zeros((len(values), 2)), np.zeros(2)
    count = min(2, len(S))
    points[:, :count] = centred @ V[:count].T
    points *= np.where(points[0] < 0, -1, 1)  # the same way round every time
    points[~good] = np.nan
    shares[:count] = S[:count] ** 2 / max((S**2).sum(), 1e-300)
    return points, (float(shares[0]), float(shares[1]))


def _line(nets: Networks, state: State, features: Sequence[str]) -> list[Coefficient]:
    """Return the coefficients with intervals, from the particles' weights and covariances, in units of y."""
    inner = find(state, NetworksState)
    assert inner is not None
    w = np.asarray(inner.particles, float)
    blocks = nets.blocks(w.shape[1] - 1)
    own = np.asarray(blocks.scatter(variances(inner.past)), float) * float(confirmed(state))
    share = np.asarray(network_weights(state), float)[:, None]
    mean = (share * w).sum(0)
    sd = np.sqrt((share * (np.maximum(own, 0) + (w - mean) ** 2)).sum(0))
    unit = float(divisor(units_of(state))[-1])
    return _named(features, unit * mean[:-1], unit * sd[:-1])


def _groups(state: Tree, count: int) -> list[str]:
    """Return the kind of each component: the networks in order, then remembered rows, then the filters."""
    names = NETWORKS if len(state.networks) == 4 else ("ReLU network", "tanh network")
    groups = [name for name, net in zip(names, state.networks, strict=False) for _ in range(len(net.particles))]
    groups += ["rows remembered"] * (0 if state.memory is None else MEMBERS)
    return groups + ["linear filter"] * (count - len(groups))


def _lines(state: Tree, features: Sequence[str], classes: Sequence[str]) -> list[Coefficient]:
    """Return the weights of the filters' mixture: the second class against the first, or each against their mean."""
    count = len(state.moments.mean) + 1
    w = np.asarray(state.linear.particles, float)
    w = w.reshape(len(w), -1, count)
    C = w.shape[1]
    covariance = np.asarray(state.linear.covariance, float).reshape(len(w), C, count, C, count)
    C = min(C, max(2, len(classes)))  # a model may have room for more
    w, own = w[:, :C], np.einsum("ncfdf->nfcd", covariance)[:, :, :C, :C]  # [n, F + 1, C, C]
    contrast = np.array([[-1.0, 1.0]]) if C == 2 else np.eye(C) - 1 / C
    share = np.exp(np.asarray(state.log_weights, float))[-len(w) :]  # after those of rows remembered
    share = (share / share.sum())[:, None, None]
    values = np.einsum("kc,ncf->nkf", contrast, w)
    spread = np.einsum("kc,nfcd,kd->nkf", contrast, own, contrast)
    mean = (share * values).sum(0)
    sd = np.sqrt((share * (np.maximum(spread, 0) + (values - mean) ** 2)).sum(0))
    if C == 2:
        return _named(features, mean[0, :-1], sd[0, :-1])
    each = [
        _named([f"{feature} → {label}" for feature in features], mean[k, :-1], sd[k, :-1])
        for k, label in enumerate(classes)
    ]
    return [one for group in each for one in group]


def _named(features: Sequence[str], mean: np.ndarray, sd: np.ndarray) -> list[Coefficient]:
    triples = zip(features, mean.tolist(), sd.tolist(), strict=True)
    return [Coefficient(name, m, m - BAND * s, m + BAND * s) for name, m, s in triples]
