r"""A moving posterior and particles that follow it: exact on a grid, measured, and animated.

The mixture's midpoint and gap go around a closed curve. The particles should follow the forgetting posterior,
$\log p_t = \gamma \log p_{t-1} + (1 - \gamma) \log p_0 + \ell_t$. The first lap is a run-in; the second is shown.
"""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import opvi
from paper.mixture import GridPosterior, by_weight, to_midpoint_gap, to_theta, tracking_error

LAP, FRAMES = 400, 100  # rounds in which the truth goes around once, and pictures of a lap
BATCH, HALF_LIFE, PARTICLES = 20, 300.0, 100  # rows, rows, and how many
VARIANCE = 2.0  # of the mixture's components
MIDPOINTS, GAPS = np.linspace(-1.4, 1.4, 101), np.linspace(-3.9, 3.9, 157)
STILLS = 4  # frames in the printed picture
DRAWS = 4  # exact draws a particle, for the distance


class Lap(NamedTuple):
    """The second lap, frame by frame."""

    rounds: list[int]
    truth: np.ndarray  # [frames, 2], midpoint and gap
    exact: list[GridPosterior]
    particles: dict[str, np.ndarray]  # [frames, n, 2], by sampler
    distance: dict[str, list[float]]  # W2 to the exact posterior in its standard deviations
    floor: list[float]  # the same for as many exact draws


def truth(t: Any) -> np.ndarray:
    """The mixture's midpoint and gap in round t."""
    angle = 2 * np.pi * np.asarray(t) / LAP
    return np.stack([0.8 * np.cos(angle), 1.6 + 1.2 * np.sin(angle)], -1)


def samplers() -> dict[str, opvi.types.Sampler]:
    """What `opvi.tracker` picks, and the paper's update with its authors' kernel and step."""
    target = opvi.gaussian_mixture(VARIANCE)
    field = opvi.flows.fields.svgd(opvi.flows.kernels.rbf(normalised=True), opvi.flows.kernels.median_awgf())
    return {
        "opvi.tracker": opvi.tracker(target, half_life=HALF_LIFE),
        "the paper's OPVI": opvi.opvi(target, step=opvi.schedules.decaying(2.0, 0.55), field=field),
    }


def drifting_rows(seed: int) -> np.ndarray:
    """Return two laps of rows, `[rounds, BATCH]`; none is repeated."""
    rng = np.random.default_rng(seed)
    midpoint, gap = truth(np.arange(1, 2 * LAP + 1))[..., None].transpose(1, 0, 2)
    side = rng.choice([-0.5, 0.5], (2 * LAP, BATCH))
    return midpoint + side * gap + VARIANCE**0.5 * rng.normal(size=side.shape)


def exact_posteriors(rows: np.ndarray, rounds: list[int]) -> list[GridPosterior]:
    """The forgetting posterior after these rounds, by its own recursion over every round, in float64."""
    target = opvi.gaussian_mixture(VARIANCE)
    keep = 0.5 ** (rows.shape[1] / HALF_LIFE)
    grid = np.stack(np.meshgrid(MIDPOINTS, GAPS, indexing="ij"), -1)
    found = []
    with jax.enable_x64(True):
        theta = jnp.asarray(to_theta(grid).reshape(-1, 2))
        prior = jax.vmap(target.log_prior)(theta)

        @jax.jit
        def advance(log_mass: Any, batch: Any) -> Any:
            likelihood = jax.vmap(lambda point: target.log_likelihood(point, batch).sum())(theta)
            moved = keep * log_mass + (1 - keep) * prior + likelihood
            return moved - moved.max()

        log_mass = prior
        for t, batch in enumerate(rows, start=1):
            log_mass = advance(log_mass, jnp.asarray(batch))
            if t in rounds:
                mass = np.exp(np.asarray(log_mass)).reshape(grid.shape[:2])
                found.append(GridPosterior(MIDPOINTS, GAPS, mass / mass.sum()))
    return found


def follow(seed: int) -> Lap:
    """Stream two laps through both samplers, and measure the second."""
    rows = drifting_rows(seed)
    rounds = [LAP + round(LAP * k / FRAMES) for k in range(1, FRAMES + 1)]
    exact = exact_posteriors(rows, rounds)
    particles = {}
    for name, sampler in samplers().items():
        batches = opvi.stream(rows.ravel().astype(np.float32), BATCH)
        _, history = opvi.run(sampler, batches, seed, particles=PARTICLES, record=_positions)
        particles[name] = np.asarray(history.record, float)[np.array(rounds) - 1]
    distance = {
        name: [tracking_error(x, p, draws=DRAWS) for x, p in zip(frames, exact, strict=True)]
        for name, frames in particles.items()
    }
    floor = [tracking_error(p.draw(PARTICLES, seed=1 + k), p, draws=DRAWS) for k, p in enumerate(exact)]
    return Lap(rounds, truth(rounds), exact, particles, distance, floor)


def _positions(state: Any, info: Any, batch: Any) -> Any:
    return by_weight(state, PARTICLES)


def summary(lap: Lap) -> dict[str, Any]:
    """The lap's numbers, for a file."""
    return {
        "batch": BATCH,
        "half_life": HALF_LIFE,
        "particles": PARTICLES,
        "lap": LAP,
        "rounds": lap.rounds,
        "rows": [BATCH * t for t in lap.rounds],
        "distance": lap.distance,
        "mean_distance": {name: float(np.mean(values)) for name, values in lap.distance.items()},
        "mean_distance_of_exact_draws": float(np.mean(lap.floor)),
    }


# --- pictures ---------------------------------------------------------------------------------


def _panel(ax: Any, lap: Lap, name: str, k: int) -> None:
    """One sampler's particles over the exact posterior, with the truth and where it has been."""
    from paper import plots

    exact = lap.exact[k]
    particles = to_midpoint_gap(lap.particles[name][k])
    plots.particles_over_density(ax, particles, exact.midpoints, exact.gaps, exact.mass)
    path = truth(np.linspace(0, LAP, 120))
    for sign in (1, -1):  # a mixture is the same with its components exchanged: two truths
        ax.plot(*(path * [1, sign]).T, color="0.75", linewidth=0.8, zorder=0)
        ax.plot(*(lap.truth[k] * [1, sign]), "+", color=plots.INK, markersize=9, markeredgewidth=1.6, zorder=4)
    ax.set(xlim=MIDPOINTS[[0, -1]], ylim=GAPS[[0, -1]], xticks=[-1, 0, 1], yticks=[-3, 0, 3])


def animate(lap: Lap, path: Path) -> Path:
    """The second lap as an animation that begins where it ends."""
    import matplotlib.pyplot as plt
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image  # matplotlib needs it, too

    from paper import plots

    images = []
    with plots.style():
        figure, axes = plt.subplots(1, len(lap.particles), figsize=(7.2, 4.2), dpi=100, sharex=True, sharey=True)
        canvas = FigureCanvasAgg(figure)
        figure.subplots_adjust(left=0.075, right=0.985, bottom=0.185, top=0.84, wspace=0.06)
        note = "blue: the exact posterior of the recent rows · dots: particles · +: the truth, moving on"
        figure.text(0.5, 0.025, note, ha="center", fontsize=9)
        rows = figure.text(0.5, 0.945, "", ha="center", fontsize=11)
        for k, t in enumerate(lap.rounds):
            rows.set_text(f"{BATCH * t:,} rows seen, each once")
            for ax, name in zip(axes, lap.particles, strict=True):
                ax.clear()
                _panel(ax, lap, name, k)
                ax.set_title(f"{name}: {lap.distance[name][k]:.1f} sd away", fontsize=11)
                ax.set_xlabel("midpoint of the two Gaussians")
            axes[0].set_ylabel("gap between them")
            canvas.draw()
            images.append(Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3]))
        plt.close(figure)
    # One palette of few colours for all frames: a small file, and no flicker.
    palette = images[0].quantize(32, dither=Image.Dither.NONE)
    palette.putpalette([255 if level > 247 else level for level in palette.getpalette() or ()])  # paper is white
    first, *others = (image.quantize(palette=palette, dither=Image.Dither.NONE) for image in images)
    path.parent.mkdir(parents=True, exist_ok=True)
    first.save(path, save_all=True, append_images=others, duration=80, loop=0)
    return path


def draw_stills(lap: Lap, path: Path) -> Path:
    """A few frames side by side, for print."""
    import matplotlib.pyplot as plt

    from paper import plots

    shown = [round(FRAMES * k / STILLS) for k in range(STILLS)]
    with plots.style():
        figure, axes = plt.subplots(
            len(lap.particles), STILLS, figsize=(9.6, 5.2), sharex=True, sharey=True, squeeze=False
        )
        for row, name in zip(axes, lap.particles, strict=True):
            for ax, k in zip(row, shown, strict=True):
                _panel(ax, lap, name, k)
                ax.set_title(f"{BATCH * lap.rounds[k]:,} rows: {lap.distance[name][k]:.1f} sd away", fontsize=9)
            row[0].set_ylabel(f"{name}\ngap between Gaussians")
        for ax in axes[-1]:
            ax.set_xlabel("their midpoint")
        figure.tight_layout()
        return plots.save(figure, path)
