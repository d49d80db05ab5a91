"""`make demo`: samplers beside the exact posterior, on a stationary stream and on one that moves."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

import opvi
from paper import moving
from paper.mixture import GridPosterior, by_weight, exact_posterior, to_midpoint_gap, tracking_error

ROUNDS, ROWS, PARTICLES = 500, 10_000, 100
SHOWN = (10, 100, 500)  # rounds


def methods() -> dict[str, tuple[opvi.types.Sampler, Any]]:
    """The paper's samplers on its synthetic experiment, with its authors' kernel and step, and the recommended one."""
    target = opvi.gaussian_mixture()
    kernel, bandwidth = opvi.flows.kernels.rbf(normalised=True), opvi.flows.kernels.median_awgf()
    step = opvi.schedules.decaying(2.0, 0.55)
    field = opvi.flows.fields.svgd(kernel, bandwidth)
    return {
        "OPVI, growing batch": (opvi.opvi(target, step=step, field=field), opvi.schedules.power(0.55)),
        "SVGD, 20 rows per round": (opvi.svgd(target, step=step, kernel=kernel, bandwidth=bandwidth), 20),
        "Langevin, 20 rows per round": (opvi.langevin(target, step=opvi.schedules.decaying(0.1, 0.55)), 20),
        "opvi.tracker, 20 rows per round": (opvi.tracker(target), 20),
    }


def rows_seen(compared: opvi.running.Compared, t: int) -> int:
    """Return how many rows a method had seen after round t."""
    return int(compared.history.info.rows[t - 1])


def draw_picture(
    results: dict[str, opvi.running.Compared],
    posteriors: dict[int, GridPosterior],
    errors: dict[str, list[float]],
    path: Path,
) -> Path:
    """Draw particles over the exact posterior of the rows seen, along the stream."""
    import matplotlib.pyplot as plt

    from paper import plots

    with plots.style():
        figure, axes = plt.subplots(len(results), len(SHOWN), figsize=(8.3, 7.5), sharex="col", sharey="col")
        for row, (name, compared) in zip(axes, results.items(), strict=True):
            for ax, t, error in zip(row, SHOWN, errors[name], strict=True):
                n = rows_seen(compared, t)
                posterior = posteriors[n]
                x = to_midpoint_gap(compared.history.record[t - 1])
                plots.particles_over_density(ax, x, posterior.midpoints, posterior.gaps, posterior.mass)
                ax.set_title(f"round {t}: {n:,} rows seen, {error:.1f} sd away", fontsize=8)
            row[0].set_ylabel(name.replace(", ", "\n") + "\ngap θ₂", fontsize=9)
        for ax in axes[-1]:
            ax.set_xlabel("midpoint θ₁ + θ₂/2")
        figure.suptitle("Particles (dots) over the exact posterior of the rows seen (50, 90 and 99 % of its mass)")
        figure.tight_layout()
        return plots.save(figure, path)


def distances(
    results: dict[str, opvi.running.Compared], posteriors: dict[int, GridPosterior]
) -> dict[str, list[float]]:
    """W2 to the exact posterior of the rows seen, in its standard deviations, for every method and shown round."""
    return {
        name: [tracking_error(compared.history.record[t - 1], posteriors[rows_seen(compared, t)]) for t in SHOWN]
        for name, compared in results.items()
    }


def print_table(errors: dict[str, list[float]], floor: float) -> None:
    """Print the distances, and those of exact draws."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Distance to the exact posterior of the rows seen (W2 in posterior sd, mirrored modes folded)")
    table.add_column("sampler")
    for t in SHOWN:
        table.add_column(f"round {t}", justify="right")
    for name, row in errors.items():
        table.add_row(name, *(f"{error:.2f}" for error in row))
    table.add_row(f"{PARTICLES} exact draws", *([""] * (len(SHOWN) - 1)), f"{floor:.2f}", style="dim")
    Console(width=None if sys.stdout.isatty() else 100).print(table)


def main(arguments: list[str] | None = None) -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("demo-output"), help="folder for the pictures")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    try:
        options.out.mkdir(parents=True, exist_ok=True)  # now, not after a minute's work
    except OSError as error:
        parser.error(f"`--out` is {str(options.out)!r}, where nothing can be written: {error}.")
    data = np.asarray(opvi.targets.sample_mixture(jax.random.key(options.seed + 1), ROWS))
    print(f"Streaming {ROWS:,} rows of a two-component Gaussian mixture once, in {ROUNDS} rounds.", flush=True)
    results = opvi.compare(
        methods(),
        data,
        options.seed,
        rounds=ROUNDS,
        rows=ROWS,
        particles=jax.random.normal(jax.random.key(options.seed), (PARTICLES, 2)),  # the authors' start
        record=lambda state, info, batch: by_weight(state, PARTICLES),
        progress=True,
    )
    print("Computing the exact posterior on a grid …", flush=True)
    needed = {rows_seen(compared, t) for compared in results.values() for t in SHOWN}
    posteriors = {n: exact_posterior(data[:n]) for n in sorted(needed)}
    errors = distances(results, posteriors)
    floor = tracking_error(posteriors[ROWS].draw(PARTICLES, seed=1), posteriors[ROWS])
    print_table(errors, floor)
    path = draw_picture(results, posteriors, errors, options.out / "demo.png")
    print("Following a posterior that moves …", flush=True)
    lap = moving.follow(options.seed)
    for name, values in lap.distance.items():
        print(f"{name}: {np.mean(values):.2f} sd away, mean over a lap")
    print(f"{moving.PARTICLES} exact draws: {np.mean(lap.floor):.2f}", flush=True)
    stills = moving.draw_stills(lap, options.out / "demo-moving.png")
    animation = moving.animate(lap, options.out / "demo.gif")
    report = {
        "command": f"python -m paper.demo --seed {options.seed}",
        "version": opvi.__version__,
        "rounds": SHOWN,
        "distance": errors,
        "distance_of_exact_draws": floor,
        "moving": moving.summary(lap),
    }
    (options.out / "demo.json").write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    for picture in (path, stills, animation):
        print(f"Picture: {picture.resolve()}")


if __name__ == "__main__":
    main()
