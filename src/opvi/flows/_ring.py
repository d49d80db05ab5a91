r"""Inside a step that is spread over devices: which axes are split, and sums over all pairs by a ring."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec, get_abstract_mesh

from opvi.types import Array, Tree

PARTICLES, DATA = "particles", "data"


def _around() -> dict[str, int]:
    """Return the mesh axes over which the step being traced is spread; none if it is not."""
    found = get_abstract_mesh()
    ours = bool(found.axis_names) and set(found.axis_names) <= {PARTICLES, DATA} and found.are_all_axes_auto
    return dict(found.shape) if ours else {}


def is_spread(n: int) -> bool:
    """Return whether the step being traced has n particles cut over devices."""
    parts = _around().get(PARTICLES, 1)
    return parts > 1 and n % parts == 0


def everywhere(x: Array) -> Array:
    """Return a small array on every device, so that what is computed from it needs no exchange."""
    return lax.with_sharding_constraint(x, PartitionSpec()) if _around() else x


def ring(function: Callable[[Tree, Tree], Tree], rows: Tree, others: Tree) -> Tree:
    r"""Return $\sum_q f(\mathrm{rows}_p, \mathrm{others}_q)$ on every device p, over the parts q of all devices.

    The parts of `others` go around: each device works on one part, hands it to the next device and gets another from
    the one before. So a device holds n/P entries of its own and n/P of another, never all n, and no n × n/P matrix
    beyond the block that `function` makes. Rows are cut over the data axis as well, so all devices share the work.

    Args:
        function: a function of some rows and some others, pytrees with a leading axis; its result has the rows' axis.
        rows: n rows, split over devices.
        others: also split over devices.
    """
    around = _around()
    parts, n = around[PARTICLES], len(jax.tree.leaves(rows)[0])
    both = DATA in around and n % (parts * around[DATA]) == 0
    mine = PartitionSpec((PARTICLES, DATA) if both else PARTICLES)
    onwards = [(p, (p + 1) % parts) for p in range(parts)]

    def own(rows: Tree, others: Tree) -> Tree:
        def turn(_: Array, carry: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
            total, here = carry
            coming = jax.tree.map(lambda a: lax.ppermute(a, PARTICLES, onwards), here)  # while this part is worked on
            return jax.tree.map(jnp.add, total, function(rows, here)), coming

        nothing = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(function, rows, others))
        return lax.fori_loop(0, parts, turn, (nothing, others))[0]

    cut = jax.shard_map(own, in_specs=(mine, PartitionSpec(PARTICLES)), out_specs=mine, check_vma=False)
    return cut(rows, others)
