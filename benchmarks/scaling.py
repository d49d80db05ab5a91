"""Cost over particles, dimensions, devices and processes: `python -m benchmarks.scaling --out bench-output`.

A core stands for a device: one device is given one core, two devices or processes two. More devices than cores show
what spreading costs, not what it gains.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import opvi
from benchmarks.machine import machine
from benchmarks.measure import Timing, interleave
from opvi.flows import fields

COUNTS = [256, 512, 1024, 2048, 4096, 8192, 16_384]  # particles, of 8 dimensions
DIMENSIONS = [2, 4, 8, 16, 64, 256, 1024]  # of 2,048 particles
DEVICES = [1, 2, 4, 8]
PROCESSES = [1, 2]
ROWS, REPEATS = 40, 5
EXCHANGED = [1, 1 << 12, 1 << 18, 1 << 22]  # numbers added up over all processes


def field(n: int, d: int) -> Timing:
    """One direction of SVGD, its median bandwidth included."""
    x = jax.random.normal(jax.random.key(0), (n, d))
    direction = jax.jit(lambda x: fields.svgd()(x, -x))
    return interleave({"field": partial(direction, x)}, seconds=2)["field"]


def curve(sizes: list[int], timings: list[Timing]) -> dict[str, Any]:
    """Milliseconds by size, and the slope of their logarithms over the last three: 2 is quadratic."""
    last = np.log(sizes[-3:]), np.log([timing.median for timing in timings[-3:]])
    slope = float(np.polyfit(*last, 1)[0])
    return {"ms": dict(zip(sizes, [t.median for t in timings], strict=True)), "slope": slope}


# --- a round, as one worker of several sees it ---------------------------------------------------


def samplers() -> dict[str, tuple[opvi.Sampler, int, int]]:
    """A first-order sampler bound by all pairs, and one bound by its covariances; particles, and rounds to time."""
    network = opvi.mlp(8, (50,), activation=jnp.tanh, prior_variance=None)
    return {
        "OPVI, 8,192 particles of 9 parameters": (opvi.opvi(opvi.logistic_regression(8), step=0.01), 8192, 4),
        "Gauss–Newton, 32 particles of 501 parameters": (opvi.gauss_newton(network), 32, 40),
    }


def rounds(algorithm: opvi.Sampler, particles: int, count: int) -> Timing:
    """A round of `opvi.run` on all devices of all processes."""
    x = np.random.default_rng(0).standard_normal((count * ROWS, 8), dtype=np.float32)
    rows = x, (x[:, 0] > 0).astype(np.float32)
    spread = opvi.scale.sharded(algorithm, opvi.scale.mesh())
    state = spread.init(jax.random.key(0), particles)

    def run() -> Any:
        return opvi.run(spread, opvi.stream(rows, ROWS), 0, state=state)[0].particles

    timing = interleave({"run": run}, at_least=REPEATS, at_most=REPEATS)["run"]
    return timing.each(count)


def exchange() -> dict[int, float]:
    """Milliseconds to add up an array over all processes, by its length."""
    mesh = opvi.scale.mesh()
    parts = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("particles"))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    out = {}
    for size in EXCHANGED:
        own = np.ones((len(mesh.local_devices), size), np.float32)
        x = jax.make_array_from_process_local_data(parts, own, (mesh.size, size))
        add = jax.jit(lambda x: x.sum(0), out_shardings=whole)
        out[size] = interleave({"add": partial(add, x)}, at_least=20, at_most=20)["add"].median
    return out


def worker(path: str, address: str, processes: int, process: int) -> None:
    if processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(address, processes, process)
    out: dict[str, Any] = {name: rounds(*how).summary() for name, how in samplers().items()}
    if processes > 1:
        out["exchange"] = exchange()
    if process == 0:
        Path(path).write_text(json.dumps(out))


def spread_over(devices: int, processes: int, path: Path) -> dict[str, Any]:
    """Run workers with one core per device, as far as there are cores; return what the first of them measured."""
    cores, port = sorted(os.sched_getaffinity(0)), socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{port.getsockname()[1]}"
    port.close()
    started = []
    for process in range(processes):
        own = cores[:devices] if processes == 1 else [cores[process % len(cores)]]
        environment = {
            **os.environ,
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
            "JAX_PLATFORMS": "cpu",
            "NPROC": str(2 * devices),
        }
        command = ["taskset", "-c", ",".join(map(str, own)), sys.executable, "-m", "benchmarks.scaling"]
        started.append(
            subprocess.Popen([*command, "--worker", str(path), address, str(processes), str(process)], env=environment)
        )
    statuses = [process.wait() for process in started]
    if any(statuses):
        raise SystemExit(f"a worker of {devices} devices and {processes} processes failed; see above.")
    return json.loads(path.read_text())


def strong(found: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """For each sampler and number of devices or processes: milliseconds, and the share of the ideal speed."""
    names = [name for name in found[1] if name != "exchange"]
    cores = len(os.sched_getaffinity(0))
    out: dict[str, Any] = {}
    for name in names:
        alone = found[1][name]["median"]
        out[name] = {
            count: {"ms": ours[name]["median"], "efficiency": alone / ours[name]["median"] / min(count, cores)}
            for count, ours in found.items()
        }
    return out


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench-output"), help="folder for scaling.json")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        path, address, processes, process = options.worker
        worker(path, address, int(processes), int(process))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"machine": machine("python -m benchmarks.scaling")}
    note = options.out / ".worker.json"
    over_devices = {count: spread_over(count, 1, note) for count in DEVICES}
    over_processes = {count: spread_over(1, count, note) for count in PROCESSES}
    note.unlink()
    report["devices"], report["processes"] = strong(over_devices), strong(over_processes)
    report["exchange"] = over_processes[PROCESSES[-1]]["exchange"]
    report["particles"] = curve(COUNTS, [field(n, 8) for n in COUNTS])
    report["dimensions"] = curve(DIMENSIONS, [field(2048, d) for d in DIMENSIONS])
    (options.out / "scaling.json").write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    (options.out / "scaling.md").write_text(tables(report))
    print(tables(report))


def tables(report: dict[str, Any]) -> str:
    """The report as the tables of docs/scale.md."""
    lines = ["| sampler | spread over | ms per round | efficiency |", "| --- | --- | ---: | ---: |"]
    for what in ("devices", "processes"):
        for name, line in report[what].items():
            for count, one in line.items():
                unit = what if int(count) > 1 else {"devices": "device", "processes": "process"}[what]
                lines.append(f"| {name} | {count} {unit} | {one['ms']:.3g} | {one['efficiency']:.0%} |")
    lines += ["", "| numbers added up over two processes | ms |", "| ---: | ---: |"]
    lines += [f"| {int(size):,} | {ms:.3g} |" for size, ms in report["exchange"].items()]
    for what in ("particles", "dimensions"):
        curve = report[what]
        lines += ["", "| " + what + " | " + " | ".join(f"{int(size):,}" for size in curve["ms"]) + " | slope |"]
        lines += ["| --- |" + " ---: |" * (len(curve["ms"]) + 1)]
        lines += ["| ms | " + " | ".join(f"{ms:.3g}" for ms in curve["ms"].values()) + f" | {curve['slope']:.2f} |"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
