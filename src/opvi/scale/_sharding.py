r"""Particles and rows over several devices: a mesh, states laid out on it, and sums over all pairs by a ring.

A mesh has the axes "particles" and "data". Everything that a sampler keeps for each particle (positions, moments of
an optimizer, covariances) is cut along the first, the rows of a batch along the second, and XLA adds up what the
devices computed apart. Only sums over all pairs are laid out by hand, in `opvi.flows`.
"""

import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

from opvi.flows._ring import DATA, PARTICLES
from opvi.types import Algorithm, Array, Batch, Key, Tracker

Sampler = TypeVar("Sampler", Algorithm, Tracker)


def mesh(particles: int | None = None, data: int = 1, *, devices: Sequence[Any] | None = None) -> Mesh:
    """A grid of devices for `opvi.scale.sharded`.

    Args:
        particles: parts that the particles are cut into; if not given, as many as the devices allow. Best for most
            uses: a device then works on its own particles, and learns of the others only where they meet.
        data: parts that the rows of a batch are cut into, for few particles and large batches.
        devices: `jax.devices()` if not given; the first `particles * data` of them are used.
    """
    found = list(jax.devices() if devices is None else devices)
    if not all(isinstance(parts, int) and parts > 0 for parts in (1 if particles is None else particles, data)):
        raise ValueError(f"`particles` and `data` are {particles!r} and {data!r}, but must be whole numbers from 1 on.")
    across = len(found) // data if particles is None else particles
    if not 0 < across * data <= len(found):
        raise ValueError(
            f"a mesh of {max(across, 1)} × {data} devices was asked for, but there are {len(found)}. On a CPU, set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={max(across, 1) * data} before JAX starts."
        )
    # Rows are cut by the outer axis, so that every process holds rows that follow one another.
    return Mesh(np.array(found[: across * data]).reshape(data, across), (DATA, PARTICLES))


def sharded(algorithm: Sampler, mesh: Mesh) -> Sampler:
    """The same sampler with its particles, and the rows of its batches, over the devices of a mesh.

    `init` draws on the host and lays the state out; `step` keeps it there, so `opvi.run` takes the result. Results
    agree with those of one device to rounding. The fields `svgd`, `blob`, `gfsd` and `gfsf` pass positions and scores
    around a ring. A state that was loaded is laid out by the first step, or by `place`.

    Every set of particles that the mesh divides is cut; a set that it does not (the few linear filters in a
    classifier) is held by every device, and if no set can be cut that is an error. A batch whose rows do not divide
    is filled up with rows of weight 0.

    Args:
        algorithm: any sampler or tracker.
        mesh: `opvi.scale.mesh()`, or a mesh of your own with the axes "particles" and "data", or one of them.
    """
    mesh = _usable(mesh)
    _warn_of_few_threads(mesh)

    def init(key: Key, *particles: Any) -> Any:
        if jax.default_backend() == "cpu":
            return place(algorithm.init(key, *particles), mesh)
        # In the host's memory, because the covariances of all particles may be too much for one device.
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            return place(algorithm.init(key, *particles), mesh)

    def spread(function: Callable[..., Any]) -> Callable[..., Any]:
        @jax.jit
        def step(key: Key, state: Any, batch: Batch) -> Any:
            state = lax.with_sharding_constraint(state, layout(state, mesh))
            with use_abstract_mesh(mesh.abstract_mesh):
                out = function(key, state, _rows(batch, mesh))
            return lax.with_sharding_constraint(out, layout(out, mesh))

        return step

    step, relearn = spread(algorithm.step), getattr(algorithm, "relearn", None)
    if not hasattr(algorithm, "predict"):
        return algorithm._replace(init=init, step=step)
    return Tracker(init, step, algorithm.predict, algorithm.about, None if relearn is None else spread(relearn))


def place(state: Any, mesh: Mesh) -> Any:
    """A state laid out on a mesh, each device holding its part. Every process of several must hold the same state."""
    mesh = _usable(mesh)
    check_counts(state, mesh)

    def put(leaf: Any, sharding: NamedSharding) -> Array:
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            return jax.device_put(leaf, sharding)
        whole = np.asarray(leaf)
        return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])

    return jax.tree.map(put, state, layout(state, mesh))


def layout(state: Any, mesh: Mesh) -> Any:
    """Where each leaf of a state goes, as a tree of `NamedSharding`: cut along its particles, or whole everywhere.

    A leaf has an axis of particles where its first is as long as the `particles` of the state around it. Should
    another axis happen to be as long, the result is the same and only costs an exchange.
    """
    cut, whole = NamedSharding(mesh, PartitionSpec(PARTICLES)), NamedSharding(mesh, PartitionSpec())
    n = len(state.particles) if _is_set(state) else 0
    divides = n and PARTICLES in mesh.shape and n % mesh.shape[PARTICLES] == 0

    def one(leaf: Any) -> Any:
        if _is_set(leaf):
            return layout(leaf, mesh)
        return cut if divides and np.shape(leaf)[:1] == (n,) else whole

    return jax.tree.map(one, state, is_leaf=lambda leaf: leaf is not state and _is_set(leaf))


def _is_set(tree: Any) -> bool:
    """Whether this is a state that holds particles itself, and not only the states of others."""
    return isinstance(tree, tuple) and "particles" in getattr(tree, "_fields", ())


def _sets(state: Any) -> list[int]:
    """The sizes of all sets of particles in a state."""
    inner = jax.tree.leaves(state, is_leaf=lambda leaf: leaf is not state and _is_set(leaf))
    sizes = [size for leaf in inner if _is_set(leaf) for size in _sets(leaf)]
    return [len(state.particles), *sizes] if _is_set(state) else sizes


def check_counts(state: Any, mesh: Any) -> None:
    """Refuse a state none of whose sets of particles the mesh divides."""
    parts, sizes = mesh.shape.get(PARTICLES, 1), _sets(state)
    if sizes and not any(n % parts == 0 for n in sizes):
        counts = " and ".join(map(str, sorted(set(sizes))))
        several = "sets of " if len(sizes) > 1 else ""
        raise ValueError(
            f"this sampler has {several}{counts} particles, which do not divide into the {parts} parts of the mesh. "
            f"Use a multiple of {parts}, or another mesh: `opvi.scale.mesh(particles=...)`."
        )


def _usable(mesh: Mesh) -> Mesh:
    """The mesh with axes that XLA takes care of; one made by `jax.make_mesh` asks the caller to."""
    if not isinstance(mesh, Mesh) or not set(mesh.axis_names) <= {PARTICLES, DATA}:
        names = getattr(mesh, "axis_names", type(mesh).__name__)
        raise ValueError(
            f'`mesh` has {names}, but must be a `jax.sharding.Mesh` with the axes "{PARTICLES}" and "{DATA}", or one '
            "of them: `opvi.scale.mesh()`."
        )
    return Mesh(mesh.devices, mesh.axis_names)


def _warn_of_few_threads(mesh: Mesh) -> None:
    """Several devices of a CPU share one pool of threads, where LAPACK's calls can wait for each other for ever."""
    devices = len(mesh.local_devices)
    threads = max(int(os.environ.get("NPROC") or os.cpu_count() or 1), devices)
    if mesh.devices.flat[0].platform == "cpu" and devices > 1 and threads < 2 * devices:
        warnings.warn(
            f"{devices} devices of this process's CPU share {threads} threads, and samplers that solve linear systems "
            f"may then stop for ever. Set NPROC={2 * devices} before JAX starts, or start a process for each device.",
            RuntimeWarning,
            stacklevel=3,
        )


def _rows(batch: Batch, mesh: Mesh) -> Batch:
    """The rows cut along the mesh, after filling up with rows that repeat the first and weigh 0."""
    if not isinstance(batch, Batch):
        return batch  # for the sampler to refuse
    batch = jax.tree.map(jnp.asarray, batch)
    parts = mesh.shape.get(DATA, 1)
    missing = -len(batch.weight) % parts
    if missing:
        data = jax.tree.map(lambda a: jnp.concatenate([a, jnp.repeat(a[:1], missing, 0)]), batch.data)
        batch = Batch(data, jnp.concatenate([batch.weight, jnp.zeros(missing, batch.weight.dtype)]))
    spec = PartitionSpec(DATA) if parts > 1 else PartitionSpec()
    return lax.with_sharding_constraint(batch, NamedSharding(mesh, spec))
