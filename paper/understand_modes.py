"""The experiment behind the page "Understand" on several modes: particles on the two-parameter mixture."""

from functools import partial

import numpy as np

import opvi
from opvi.types import Sampler
from paper.mixture import GridPosterior, tracking_error
from paper.results import Book, Check, Experiment, Record, Row, no_more_than, summary
from paper.tracking import SETTINGS, exact_after
from paper.understand_common import BATCH, Size, experiment_of, size_of


def mixture_samplers() -> dict[str, Sampler]:
    """The paper's flow with its authors' kernel and step, a flow made for one Gaussian, and a tracker."""
    target = opvi.gaussian_mixture()
    field = opvi.flows.fields.svgd(opvi.flows.kernels.rbf(normalised=True), opvi.flows.kernels.median_awgf())
    return {
        "the paper's OPVI": opvi.opvi(target, step=opvi.schedules.decaying(2.0, 0.55), field=field),
        "gain_one, made for one mode": opvi.gain_one(target),
        "opvi.tracker": opvi.tracker(target),
    }


def mixture_after(seed: int, rounds: int) -> GridPosterior:
    """The exact posterior of a seed's stream."""
    return exact_after(SETTINGS["B = 20"], seed, rounds, rounds)


def modes_trial(name: str, size: Size, seed: int) -> Record:
    """One stream of the mixture: the share of the upper mode, and the distance to the exact posterior."""
    stream = opvi.stream(SETTINGS["B = 20"].rows(seed, size.modes), BATCH)
    state, _ = opvi.run(mixture_samplers()[name], stream, seed, particles=size.particles)
    x, posterior = np.asarray(state.particles, float), mixture_after(seed, size.modes)
    share, exactly = (x[:, 1] > 0).mean(), posterior.mass[:, posterior.gaps > 0].sum()
    record: Record = {"upper": share, "upper_exact": exactly, "share_off": abs(share - exactly)}
    record["distance"] = tracking_error(x, posterior)
    return record | ({"particles": x} if seed == 0 else {})


def modes(smoke: bool) -> Experiment:
    """Particles on the mixture's two modes."""
    size = size_of(smoke)
    names = list(mixture_samplers())[: 1 if smoke else None]  # the others take longer to compile than to run
    return experiment_of(
        "modes",
        smoke,
        f"the mixture after {size.modes} rounds of {BATCH} rows: mirrored modes, {size.particles} particles",
        [Row(name, {}, partial(modes_trial, name, size)) for name in names],
        5,
        {"in the upper mode": ("upper", 3), "exact": ("upper_exact", 3), "off": ("share_off", 3)}
        | {"W2 / sd, folded": ("distance", 2)},
        _modes_checks,
    )


def _modes_checks(book: Book) -> list[Check]:
    found = book.records("opvi.tracker")
    return [
        no_more_than("opvi.tracker: W2 / sd", summary(found, "distance").mean, 0.25),
        no_more_than("opvi.tracker: share of the upper mode off", summary(found, "share_off").mean, 0.02),
    ]
