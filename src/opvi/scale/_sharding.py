r"""Particles and rows spread over several devices: a mesh, states laid out on it, and sums over all pairs by a ring.

A mesh has the axes "particles" and "data". Everything that a sampler keeps for each particle (positions, moments of
an optimizer, covariances) is split along the first, the rows of a batch along the second, and XLA adds up what the
devices computed separately. Only sums over all pairs are laid out by hand, in `opvi.flows`.
"""

import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

from opvi._forks import Unforked
from opvi._steps import pieces
from opvi.flows._ring import DATA, PARTICLES
from opvi.types import Array, ArrayLike, Batch, Info, Key, Prediction, Sampler, Start, State, Tree


def mesh(particles: int | None = None, data: int = 1, *, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Return a grid of devices for `opvi.scale.sharded`.

    Args:
        particles: the number of parts that particles are split into; as many as the devices allow if omitted, best for
            most uses: a device then works on its own particles and sees others only in sums over pairs.
        data: the number of parts that the rows of a batch are split into, for few particles and large batches.
        devices: `jax.devices()` if omitted; the first `particles * data` of them are used.
    """
    found = list(jax.devices() if devices is None else devices)
    if not all(isinstance(parts, int) and parts > 0 for parts in (1 if particles is None else particles, data)):
        raise ValueError(
            f"`particles` and `data` are {particles!r} and {data!r}, but must be whole numbers of at least 1."
        )
    across = len(found) // data if particles is None else particles
    if not 0 < across * data <= len(found):
        raise ValueError(
            f"a mesh of {max(across, 1)} × {data} devices was requested, but there are {len(found)}. On a CPU, set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={max(across, 1) * data} before JAX starts."
        )
    # Rows are cut by the outer axis, so that every process holds rows that follow one another.
    return Mesh(np.array(found[: across * data]).reshape(data, across), (DATA, PARTICLES))


@dataclass(frozen=True)
class Sharded(Unforked):
    """A sampler whose states and batches lie on the devices of a mesh. Made by `sharded`."""

    sampler: Sampler
    mesh: Mesh

    def init(self, key: Key, particles: Start = None) -> State:
        """Return the state before any row, drawn on the host and laid out on the mesh."""
        # In the host's memory, because the covariances of all particles may be too much for one device.
        on_host = jax.default_device(jax.local_devices(backend="cpu")[0])
        with nullcontext() if jax.default_backend() == "cpu" else on_host:
            return place(self.sampler.init(key, particles), self.mesh)

    def step(self, key: Key, state: State, batch: Batch) -> tuple[State, Info]:
        """Learn from a batch; the state stays on the mesh."""
        return _on_mesh(self, "step", key, state, batch)

    def predict(self, state: State, x: Tree) -> Prediction:
        """Return the sampler's posterior predictive at inputs x."""
        return self.sampler.predict(state, x)

    @property
    def relearn(self) -> Callable[[Key, State, Batch], State]:
        """Learn from rows seen before. Missing, as an attribute, where the sampler lacks it."""
        if getattr(self.sampler, "relearn", None) is None:
            raise AttributeError(f"{self.sampler} has no `relearn`.")
        return partial(_on_mesh, self, "relearn")

    @property
    def about(self) -> str:
        """One line: what was chosen, and why."""
        return self.sampler.about

    def __str__(self) -> str:
        return str(self.sampler)


def sharded(sampler: Sampler, mesh: Mesh) -> Sharded:
    """Return the same sampler with its particles, and the rows of its batches, over the devices of a mesh.

    `init` draws on the host and lays the state out; `step` keeps it there, so `opvi.run` takes the result. Results
    agree with those of one device to rounding. The fields `svgd`, `blob`, `gfsd` and `gfsf` pass positions and scores
    around a ring. A state that was loaded is laid out by the first step, or by `place`.

    Every set of particles that the mesh divides is split; a set that it does not divide (the few linear filters in a
    classifier) is held by every device; if no set can be split, that is an error. A batch whose rows do not divide
    is filled up with rows of weight 0.

    Args:
        sampler: any sampler.
        mesh: `opvi.scale.mesh()`, or a mesh of your own with the axes "particles" and "data", or one of them.
    """
    mesh = _usable(mesh)
    _warn_of_few_threads(mesh)
    return Sharded(sampler, mesh)


@partial(jax.jit, static_argnums=(0, 1))
def _on_mesh(sampler: Sharded, method: str, key: Key, state: State, batch: Batch) -> Tree:
    """Return what a method of the sampler returns, with the state and the batch laid out on the mesh."""
    mesh = sampler.mesh
    state = lax.with_sharding_constraint(state, layout(state, mesh))
    with use_abstract_mesh(mesh.abstract_mesh):
        out = getattr(sampler.sampler, method)(key, state, _rows(batch, mesh))
    if method == "step":  # what was predicted for rows that fill up is nobody's
        state, info = out
        predicted = jax.tree.map(lambda leaf: leaf[: len(batch.weight)], getattr(info, "predicted", None))
        out = state, info if predicted is None else info._replace(predicted=predicted)
    return lax.with_sharding_constraint(out, layout(out, mesh))


def place(state: State, mesh: Mesh) -> State:
    """Return a state laid out on a mesh, each device holding its part; every process must hold the same state."""
    mesh = _usable(mesh)
    check_counts(state, mesh)

    def put(leaf: ArrayLike, sharding: NamedSharding) -> Array:
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            return jax.device_put(leaf, sharding)
        whole = np.asarray(leaf)
        return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])

    return jax.tree.map(put, state, layout(state, mesh))


def layout(state: Tree, mesh: Mesh) -> Tree:
    """Return where each leaf of a state goes, as a tree of `NamedSharding`: split along its particles, or whole.

    A leaf has an axis of particles where its first is as long as the `particles` of the state around it. Should
    another axis happen to be as long, the result is the same and costs only an exchange.
    """
    cut, whole = NamedSharding(mesh, PartitionSpec(PARTICLES)), NamedSharding(mesh, PartitionSpec())
    n = len(state.particles) if _is_set(state) else 0
    divides = n and PARTICLES in mesh.shape and n % mesh.shape[PARTICLES] == 0

    def one(leaf: Tree) -> Tree:
        if _is_set(leaf):
            return layout(leaf, mesh)
        return cut if divides and np.shape(leaf)[:1] == (n,) else whole

    return jax.tree.map(one, state, is_leaf=lambda leaf: leaf is not state and _is_set(leaf))


def _is_set(tree: Tree) -> bool:
    """Return whether this state holds particles itself, and not only other states."""
    return isinstance(tree, tuple) and "particles" in getattr(tree, "_fields", ())


def _sets(state: Tree) -> list[int]:
    """Return the sizes of all sets of particles in a state."""
    inner = jax.tree.leaves(state, is_leaf=lambda leaf: leaf is not state and _is_set(leaf))
    sizes = [size for leaf in inner if _is_set(leaf) for size in _sets(leaf)]
    return [len(state.particles), *sizes] if _is_set(state) else sizes


def check_counts(state: Tree, mesh: Mesh | AbstractMesh) -> None:
    """Refuse a state if the mesh divides none of its sets of particles."""
    parts, sizes = mesh.shape.get(PARTICLES, 1), _sets(state)
    if sizes and not any(n % parts == 0 for n in sizes):
        counts = " and ".join(map(str, sorted(set(sizes))))
        several = "sets of " if len(sizes) > 1 else ""
        raise ValueError(
            f"this sampler has {several}{counts} particles, which do not divide into the {parts} parts of the mesh. "
            f"Use a multiple of {parts}, or another mesh: `opvi.scale.mesh(particles=...)`."
        )


def _usable(mesh: Mesh) -> Mesh:
    """Return the mesh with axes that XLA handles; one made by `jax.make_mesh` leaves them to the caller."""
    if not isinstance(mesh, Mesh) or not set(mesh.axis_names) <= {PARTICLES, DATA}:
        names = getattr(mesh, "axis_names", type(mesh).__name__)
        raise ValueError(
            f'`mesh` has {names}, but must be a `jax.sharding.Mesh` with the axes "{PARTICLES}" and "{DATA}", or one '
            "of them: `opvi.scale.mesh()`."
        )
    return Mesh(mesh.devices, mesh.axis_names)


def _warn_of_few_threads(mesh: Mesh) -> None:
    """Warn of too few threads: CPU devices share one pool, where LAPACK calls can wait for each other forever."""
    devices = len(mesh.local_devices)
    threads = max(int(os.environ.get("NPROC") or os.cpu_count() or 1), devices)
    if mesh.devices.flat[0].platform == "cpu" and devices > 1 and threads < 2 * devices:
        warnings.warn(
            f"{devices} devices of this process's CPU share {threads} threads, and samplers that solve linear systems "
            f"may then hang forever. Set NPROC={2 * devices} before JAX starts, or start a process for each device.",
            RuntimeWarning,
            stacklevel=3,
        )


def _rows(batch: Batch, mesh: Mesh) -> Batch:
    """Return the rows split along the mesh, padded with copies of the first row of weight 0."""
    if not isinstance(batch, Batch):
        return batch  # for the sampler to refuse
    parts = mesh.shape.get(DATA, 1)
    batch = jax.tree.map(jnp.asarray, batch)
    if len(batch.weight) % parts:
        whole = -(-len(batch.weight) // parts) * parts
        batch = jax.tree.map(lambda leaf: leaf[0], Batch(*pieces(batch.data, batch.weight, whole)))
    spec = PartitionSpec(DATA) if parts > 1 else PartitionSpec()
    return lax.with_sharding_constraint(batch, NamedSharding(mesh, spec))
