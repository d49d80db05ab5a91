"""Break one line at a time and see a test fail: `python -m tests.mutants [NAME ...]`.

Each mutant is a line that was once wrong, or might be, without any test noticing. A survivor is an error.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Mutant(NamedTuple):
    """A line, what it becomes, and the tests that must notice."""

    name: str
    path: str
    old: str
    new: str
    tests: str


MUTANTS = [
    Mutant(
        "wind-up: a variance that is too large takes along what is known of other directions",
        "src/opvi/filters/_covariance.py",
        "    few = Z.shape[-1] <= FEW\n",
        "    few = False\n",
        "tests/filters/test_covariance.py tests/tracking/test_regressor.py",
    ),
    Mutant(
        "wind-up: the first of those above the largest variance is bounded, whatever the others",
        "src/opvi/filters/_covariance.py",
        "j = jnp.argmax(ratio, -1)[..., None]",
        "j = jnp.argmax(ratio > ABOVE, -1)[..., None]",
        "tests/filters/test_covariance.py",
    ),
    Mutant(
        "large matrices: all at once",
        "src/opvi/filters/_covariance.py",
        "    return alone and len(matrices) > 1 and",
        "    return False and len(matrices) > 1 and",
        "tests/filters/test_covariance.py",
    ),
    Mutant(
        "large matrices: rows of another particle are taken off",
        "src/opvi/filters/_covariance.py",
        "[jax.lax.dynamic_slice_in_dim(each, i, 1) for each in (matrices, *others)]",
        "[jax.lax.dynamic_slice_in_dim(each, i * (each is matrices), 1) for each in (matrices, *others)]",
        "tests/filters/test_covariance.py",
    ),
    Mutant(
        "seats: distances remember the gradients of the networks before",
        "src/opvi/tracking/_regressor_seats.py",
        "        memory=memory._replace(metric=metrics.begun_again(memory.metric, due)),\n",
        "",
        "tests/tracking/test_seats.py",
    ),
    Mutant(
        "evidence: the scales of the fitted coordinates do not count",
        "src/opvi/filters/_evidence.py",
        "volume += jnp.log(to.size).sum() + jnp.log(to.scale).sum()",
        "volume += jnp.log(to.scale).sum()",
        "tests/filters/test_evidence.py",
    ),
    Mutant(
        "evidence: constants of rows that are gone do not count",
        "src/opvi/filters/_sl_opvi.py",
        "return found.value + gone - log_mass(self.target)",
        "return found.value - log_mass(self.target)",
        "tests/filters/test_evidence.py",
    ),
    Mutant(
        "evidence: what a polynomial loses in a new frame counts only where a row leaves",
        "src/opvi/filters/_sl_opvi.py",
        "(pool.after[sampler.memory_rows :] > 0).any() | _fitted(before)",
        "(pool.after[sampler.memory_rows :] > 0).any()",
        "tests/filters/test_evidence.py",
    ),
    Mutant(
        "evidence: a Gaussian prior is taken as it is given",
        "src/opvi/filters/_sl_opvi.py",
        "return found.value + gone - log_mass(self.target)",
        "return found.value + gone",
        "tests/filters/test_evidence.py",
    ),
    Mutant(
        "rows stored: room that holds none is evaluated, too",
        "src/opvi/filters/_pool.py",
        "jnp.arange(1, several + 1), 0).max()",
        "jnp.arange(1, several + 1), several).max()",
        "tests/filters/test_pool.py",
    ),
    Mutant(
        "draws: frozen chains stay",
        "src/opvi/filters/_moves.py",
        "look & (made >= first),",
        "look & (made < 0),",
        "tests/filters/test_diagnosis.py",
    ),
    Mutant(
        "draws: chains are replaced though most of them are slow",
        "src/opvi/filters/_moves.py",
        "return still & outside & (still.mean() <= FEW)",
        "return still & outside",
        "tests/filters/test_diagnosis.py",
    ),
    Mutant(
        "diagnosis: Stein's discrepancy raises no concern",
        "src/opvi/filters/_diagnosis.py",
        "elif self.stein > LARGEST_STEIN:",
        "elif self.stein > 1e9:",
        "tests/filters/test_diagnosis.py",
    ),
    Mutant(
        "diagnosis: places that hold no row count as rows",
        "src/opvi/filters/_sl_opvi.py",
        "stored, below = state.weight > 0, None",
        "stored, below = state.weight >= 0, None",
        "tests/filters/test_diagnosis.py",
    ),
    Mutant(
        "process: rows after the first 256 do not count",
        "src/opvi/tracking/_process.py",
        "when(seen > TAUGHT, whole,",
        "when(seen > ROWS, whole,",
        "tests/tracking/test_process.py -k oldest",
    ),
    Mutant(
        "process: settings move in the turn that only factors",
        "src/opvi/tracking/_process.py",
        "moves = turn < count",
        "moves = turn <= count",
        "tests/tracking/test_process.py -k scikit",
    ),
    Mutant(
        "row by row: a copy learns first rows again that it has learnt",
        "src/opvi/running/_row_by_row.py",
        "new = self.waiting[self.copied :]",
        "new = self.waiting",
        "tests/running/test_row_by_row.py -k copy",
    ),
    Mutant(
        "row by row: what was pickled is computed by JAX's threads again",
        "src/opvi/running/_engine.py",
        "        self._state = inline(state)\n",
        "        self._state = state\n",
        "tests/running/test_row_by_row.py -k whole_networks",
    ),
    Mutant(
        "single rows: a state that was taken changes with the next row",
        "src/opvi/running/_packed.py",
        "np.array(part) for part in held.small",
        "np.asarray(part) for part in held.small",
        "tests/running/test_packed.py",
    ),
    Mutant(
        "single rows: the device has a thread for every processor",
        "src/opvi/_cpu.py",
        'with _environment(THREADS, "1"):',
        'with _environment(THREADS, ""):',
        "tests/test_cpu.py -k inline",
    ),
    Mutant(
        "seeds: JAX's offset of all of them is not heeded",
        "src/opvi/types.py",
        " and not said.get(SEED_OFFSET)",
        "",
        "tests/test_values.py -k offset",
    ),
    Mutant(
        "draws: the map's volume does not count",
        "src/opvi/filters/_straight.py",
        "jnp.exp(s) * v)), s.sum()",
        "jnp.exp(s) * v)), 0 * s.sum()",
        "tests/filters/test_straight.py",
    ),
    Mutant(
        "draws: no parameter drives the scale of another",
        "src/opvi/filters/_straight.py",
        "driver = excess > 0",
        "driver = excess > 1e9",
        "tests/filters/test_straight.py",
    ),
    Mutant(
        "draws: scales are fitted, means that follow them are not",
        "src/opvi/filters/_straight.py",
        "use = jnp.concatenate([always, before, drives.any(1, keepdims=True)], 1)",
        "use = jnp.concatenate([always, before, ~always], 1)",
        "tests/filters/test_straight.py",
    ),
    Mutant(
        "draws: coordinates are never fitted to chains",
        "src/opvi/filters/_moves.py",
        "MOVED, STUCK = 1e-3, 0.5",
        "MOVED, STUCK = 1e-3, 1.0",
        "tests/filters/test_straight.py",
    ),
    Mutant(
        "numpyro: in a scan, every step gets the values of all",
        "src/opvi/adapters/_sites.py",
        "            u = u[moment]",
        "            u = u[0]",
        "tests/adapters/test_numpyro_rows.py -k scans_too",
    ),
    Mutant(
        "numpyro: one combination of discrete latents is left out",
        "src/opvi/adapters/_choices.py",
        "list(itertools.product(*cells))",
        "list(itertools.product(*cells))[1:]",
        "tests/adapters/test_numpyro_rows.py -k scans_too",
    ),
    Mutant(
        "numpyro: rows may depend on their place",
        "src/opvi/adapters/_program.py",
        "np.allclose(rows[np.array([0, 2])], row,",
        "np.allclose(row, row,",
        "tests/adapters/test_numpyro_rows.py -k one_by_one",
    ),
    Mutant(
        "numpyro: rows may depend on other rows",
        "src/opvi/adapters/_program.py",
        "([0], [0, last, 0])",
        "([0], [0, 0, 0])",
        "tests/adapters/test_numpyro_rows.py -k one_by_one",
    ),
    Mutant(
        "numpyro: every series is the first",
        "src/opvi/adapters/_program.py",
        "return jax.vmap(one)(data) if inside",
        "return jax.vmap(one)(jax.tree.map(lambda a: a[:1].repeat(len(a), 0), data)) if inside",
        "tests/adapters/test_numpyro_rows.py -k whole_series",
    ),
    Mutant(
        "numpyro: what depends on the data of a series is given as a parameter's function",
        "src/opvi/adapters/_program.py",
        "if not any(values[name])}",
        "if True}",
        "tests/adapters/test_numpyro_rows.py -k whole_series",
    ),
    Mutant(
        "kfac: rows fade twice as fast",
        "src/opvi/filters/_kfac.py",
        "    ratio = 2 ** (-rows / half_life)",
        "    ratio = 4 ** (-rows / half_life)",
        "tests/filters/test_forgetting.py -k kronecker",
    ),
    Mutant(
        "process: columns never vanish",
        "src/opvi/tracking/_process.py",
        "LONG * jnp.pad(vanishes, (0, 3))",
        "0 * jnp.pad(vanishes, (0, 3))",
        "tests/tracking/test_process.py -k usual_or_long",
    ),
    Mutant(
        "process: columns that vanish stay in its straight part",
        "src/opvi/tracking/_process.py",
        "return jax.nn.sigmoid(STEEP",
        "return 1 - 0 * jax.nn.sigmoid(STEEP",
        "tests/tracking/test_process.py -k slopes",
    ),
    Mutant(
        "process: how many columns vanish is not learnt",
        "src/opvi/tracking/_process.py",
        "+ jax.nn.sigmoid(apart).sum())",
        "+ 0)",
        "tests/tracking/test_process.py",
    ),
    Mutant(
        "process: the first half of the rows teaches its settings",
        "src/opvi/tracking/_process.py",
        "jnp.where(moves, turn & 1, 0)",
        "jnp.where(moves, 0, 0)",
        "tests/tracking/test_process.py",
    ),
    Mutant(
        "gates: what the process says of columns is not heard",
        "src/opvi/tracking/_gates.py",
        "push -= jnp.maximum(vanished, 0) *",
        "push -= 0 *",
        "tests/tracking/test_gates.py",
    ),
    Mutant(
        "seats: networks begin again for columns that had nearly faded",
        "src/opvi/tracking/_seats.py",
        "jnp.abs(factor**2 - seats.factor**2)",
        "jnp.abs(factor - seats.factor)",
        "tests/tracking/test_seats.py -k doubled",
    ),
    Mutant(
        "gates: columns fade that help the process",
        "src/opvi/tracking/_gates.py",
        "(1 + jnp.minimum(vanished, 0)) * push",
        "push",
        "tests/tracking/test_gates.py -k process",
    ),
    Mutant(
        "process: it never says that a column helps",
        "src/opvi/tracking/_process.py",
        "surely - jnp.clip(2 * (SHORT - u), 0, 1)",
        "surely",
        "tests/tracking/test_process.py -k climb",
    ),
    Mutant(
        "process: rows' weights do not count",
        "src/opvi/tracking/_process.py",
        "_noise(settings) / jnp.maximum(rows[:, -1], 1e-3), 1)",
        "_noise(settings), 1)",
        "tests/tracking/test_process.py",
    ),
    Mutant(
        "process: rows do not fade by the half-life",
        "src/opvi/tracking/_process.py",
        "weight = weight * jnp.exp2(-age / half_life)",
        "weight = weight * 1",
        "tests/tracking/test_process.py",
    ),
    Mutant(
        "process: the newest rows stay where the oldest were",
        "src/opvi/tracking/_process.py",
        "jax.lax.rem(number - 1, jnp.asarray(ROWS, number.dtype))",
        "jnp.minimum(number - 1, ROWS - 1)",
        "tests/tracking/test_process.py",
    ),
    Mutant(
        "process: its mean is not moved to the units asked for",
        "src/opvi/tracking/_process.py",
        "there.mean[columns] - scale.mean[columns]",
        "there.mean[columns] - there.mean[columns]",
        "tests/tracking/test_process.py",
    ),
    Mutant(
        "process: settings stay as they begin",
        "src/opvi/tracking/_process.py",
        "move = RATE * slope",
        "move = 0 * slope",
        "tests/tracking/test_process.py",
    ),
    Mutant(
        "process: slopes of the noise are missing",
        "src/opvi/tracking/_process.py",
        "(diagonal(G) / jnp.maximum(weight, 1e-3)).sum() * noise",
        "0 * noise",
        "tests/tracking/test_process.py",
    ),
    Mutant(
        "process: the share is always a half",
        "src/opvi/tracking/_process.py",
        "best = jnp.clip((own - both + RIDGE) /",
        "best = 0 * own + 0.5 + 0 * jnp.clip((own - both + RIDGE) /",
        "tests/tracking/test_process.py",
    ),
    Mutant(
        "process: one row says anything about the share",
        "src/opvi/tracking/_process.py",
        "jnp.clip(one - y, -reach, reach)",
        "(one - y + 0 * reach)",
        "tests/tracking/test_process.py",
    ),
    Mutant(
        "process: a jump of units is forgotten",
        "src/opvi/tracking/_process.py",
        "jnp.where(known, a, b), moved, fresh",
        "jnp.where(known, b, b), moved, fresh",
        "tests/tracking/test_process.py",
    ),
    Mutant(
        "process: a jump is not forgotten",
        "src/opvi/tracking/_process.py",
        "jnp.where(known, a, b), moved, fresh",
        "jnp.where(known, a, a), moved, fresh",
        "tests/tracking/test_process.py",
    ),
    Mutant(
        "process: what cannot be factored stays",
        "src/opvi/tracking/_process.py",
        "jnp.where(good, seen, 0)])",
        "seen])",
        "tests/tracking/test_process.py",
    ),
    Mutant(
        "process: counts overflow",
        "src/opvi/tracking/_process.py",
        "jnp.where(number[-1] > MANY, MANY // 2, 0)",
        "0",
        "tests/tracking/test_process.py",
    ),
    Mutant(
        "process: networks alone predict",
        "src/opvi/tracking/_calibration.py",
        "g, apart = beside.share, beside.mean - together",
        "g, apart = 0 * beside.share, beside.mean - together",
        "tests/tracking/test_process.py",
    ),
    Mutant(
        "process: rows learnt again join it twice",
        "src/opvi/tracking/_regressor_learning.py",
        "weight if before is None else jnp.where(before < 0, weight, 0)",
        "weight",
        "tests/tracking/test_process.py",
    ),
    Mutant(
        "process: new columns make it another",
        "src/opvi/tracking/_process.py",
        "settings=settings.at[0, -1].add(width)",
        "settings=settings",
        "tests/adapters/test_river.py -k widened_regressor",
    ),
    Mutant(
        "process: values missing in old rows",
        "src/opvi/tracking/_process.py",
        "jnp.where(jnp.isnan(x), scale.mean[None, :-1], x)",
        "x",
        "tests/tracking/test_process.py",
    ),
    Mutant(
        "two rows of a batch in one place: the earlier one stays",
        "src/opvi/tracking/_neighbours.py",
        "(order[:, None] < order[None])",
        "(order[:, None] > order[None])",
        "tests/tracking/test_neighbours.py",
    ),
    Mutant(
        "empty places are neighbours",
        "src/opvi/tracking/_neighbours.py",
        "(place < filled)[None]",
        "(place < len(stored))[None]",
        "tests/tracking/test_neighbours.py",
    ),
    Mutant(
        "rows in memory do not fade",
        "src/opvi/tracking/_memory.py",
        "jnp.exp2((born - memory.clock) / half_life)",
        "1.0",
        "tests/tracking/test_memory.py",
    ),
    Mutant(
        "a wild target is remembered as it is",
        "src/opvi/tracking/_memory.py",
        "jnp.clip(away, -bound, bound), away)",
        "away, away)",
        "tests/tracking/test_memory.py",
    ),
    Mutant(
        "errors of bad times count fully",
        "src/opvi/tracking/_memory.py",
        "closeness * precision / jnp.maximum(precision.max(1, keepdims=True), 1e-30)",
        "closeness",
        "tests/tracking/test_memory.py",
    ),
    Mutant(
        "garbage counts in the particles' errors",
        "src/opvi/tracking/_regressor_learning.py",
        "    weight = weight * trust\n",
        "    trust = jnp.ones_like(trust)\n",
        "tests/tracking/test_guard.py",
    ),
    Mutant(
        "a jump of the level is not followed",
        "src/opvi/tracking/_guard.py",
        "shift = jnp.where(jump & level,",
        "shift = jnp.where(jump & ~level,",
        "tests/tracking/test_guard.py",
    ),
    Mutant(
        "the regressor's products are left to the device",
        "src/opvi/tracking/_regressor_learning.py",
        "@compiled\n@exactly\ndef step(",
        "@compiled\ndef step(",
        "tests/test_precision.py",
    ),
    Mutant(
        "Gauss–Newton's half-life applied twice",
        "src/opvi/filters/_gauss_newton.py",
        "jnp.exp2(-batch.weight.sum() / at_round",
        "jnp.exp2(-2 * batch.weight.sum() / at_round",
        "tests/filters/test_forgetting.py tests/filters/test_kfac.py",
    ),
    Mutant(
        "Gauss–Newton's half-life ignored",
        "src/opvi/filters/_gauss_newton.py",
        "if sampler.half_life is None:",
        "if True:",
        "tests/filters/test_forgetting.py tests/filters/test_kfac.py",
    ),
    Mutant(
        "a linear model starts where its particles do",
        "src/opvi/filters/_gauss_newton.py",
        "w = jnp.where(state.round == 0, mean[None], blocks.gather",
        "w = jnp.where(state.round < 0, mean[None], blocks.gather",
        "tests/filters/test_draws.py tests/filters/test_gauss_newton.py",
    ),
    Mutant(
        "forgetting gives nothing back to the prior",
        "src/opvi/filters/_covariance.py",
        "(1 - gamma) * (C @ precision[None])",
        "0 * (C @ precision[None])",
        "tests/filters/test_forgetting.py tests/filters/test_draws.py",
    ),
    Mutant(
        "curved models forget nothing before they learn",
        "src/opvi/filters/_gauss_newton.py",
        "fade = covariance.fading(state.past, gamma, largest)",
        "fade = covariance.fading(state.past, gamma**0, largest)",
        "tests/filters/test_forgetting.py",
    ),
    Mutant(
        "mode weights never move",
        "src/opvi/filters/_whitening.py",
        "log_weights = reweighted(log_weights, gained, same)",
        "log_weights = reweighted(log_weights, 0 * gained, same)",
        "tests/filters/test_modes.py",
    ),
    Mutant(
        "class networks take whole steps",
        "src/opvi/filters/_looking.py",
        "return jnp.minimum(1, jnp.sqrt(LARGEST_CHANGE / (divergence + 1e-9)))",
        "return jnp.ones_like(divergence)",
        "tests/filters/test_survival.py",
    ),
    Mutant(
        "class networks are linearised once",
        "src/opvi/filters/_gauss_newton.py",
        "if seen.regression is None:\n            new, move = _again",
        "if False:\n            new, move = _again",
        "tests/filters/test_gauss_newton.py",
    ),
    Mutant(
        "class probabilities leave the covariances out",
        "src/opvi/tracking/_calibrated.py",
        "isinstance(plain.components, Classes) and isinstance(sampler.sampler, GaussNewton)",
        "False",
        "tests/tracking/test_tracker.py",
    ),
    Mutant(
        "AdaptiveNoise.share ignored",
        "src/opvi/filters/_looking.py",
        "self.share * error",
        "0.3 * error",
        "tests/filters/test_forgetting.py tests/filters/test_kfac.py",
    ),
    Mutant(
        "linear_ekf wanders 20 times as far",
        "src/opvi/filters/_linear_ekf.py",
        "* rows / ROUND *",
        "* rows *",
        "tests/filters/test_forgetting.py tests/filters/test_kfac.py",
    ),
    Mutant(
        "linear_ekf never wanders",
        "src/opvi/filters/_linear_ekf.py",
        '- jnp.einsum("nrd,nre->nde", Z, Z) + gained',
        '- jnp.einsum("nrd,nre->nde", Z, Z)',
        "tests/filters/test_forgetting.py tests/filters/test_kfac.py",
    ),
    Mutant(
        "rows far from their prediction are not weighed by their doubt",
        "src/opvi/filters/_looking.py",
        "residual, expected + doubt, robust)",
        "residual, expected, robust)",
        "tests/filters/test_robust.py",
    ),
    Mutant(
        "garbage moves noise that adapts",
        "src/opvi/filters/_looking.py",
        "batch.weight * power, clock)",
        "batch.weight, clock)",
        "tests/filters/test_robust.py",
    ),
    Mutant(
        "kfac's factors believe every row",
        "src/opvi/filters/_kfac.py",
        "root_weight, total = jnp.sqrt(seen.weight)",
        "root_weight, total = jnp.sqrt(batch.weight)",
        "tests/filters/test_robust.py",
    ),
    Mutant(
        "sizes of errors are not stretched",
        "src/opvi/tracking/_calibration.py",
        "chosen._replace(variance=wider * chosen.variance",
        "chosen._replace(variance=chosen.variance",
        "tests/tracking/test_calibration.py -k stretched",
    ),
    Mutant(
        "garbage stretches intervals",
        "src/opvi/tracking/_calibration.py",
        "((sizes - 1) * weight).sum()",
        "(sizes - 1).sum()",
        "tests/tracking/test_calibration.py -k stretched",
    ),
    Mutant(
        "a late label is scored by what is predicted now",
        "src/opvi/running/_tickets.py",
        "padded(said, room), padded(label, room)",
        "padded(self.engine.ask(x, _by_rows), room), padded(label, room)",
        "tests/running/test_tickets.py",
    ),
    Mutant(
        "withdrawn rows leave their targets behind",
        "src/opvi/filters/_withdrawing.py",
        "whole.shift - A.T",
        "whole.shift + 0 * A.T",
        "tests/filters/test_withdrawing.py",
    ),
    Mutant(
        "kfac never fades",
        "src/opvi/filters/_kfac.py",
        "ratio = 2 ** (-rows / half_life)",
        "ratio = 2 ** (-rows / 1e30)",
        "tests/filters/test_forgetting.py tests/filters/test_kfac.py",
    ),
    Mutant(
        "the regressor's half-life doubled",
        "src/opvi/tracking/_regressor.py",
        "0.5 ** (USUAL_ROWS / half_life)",
        "0.5 ** (USUAL_ROWS / half_life / 2)",
        "tests/tracking/test_regressor.py tests/tracking/test_calibration.py",
    ),
    Mutant(
        "the regressor's covariances stay in their old units",
        "src/opvi/tracking/_regressor_units.py",
        "past=state.past._replace(matrices=matrices)",
        "past=state.past",
        "tests/tracking/test_regressor.py tests/tracking/test_calibration.py",
    ),
    Mutant(
        "calibration ignores spread",
        "src/opvi/tracking/_calibration.py",
        "epistemic = spread * one.variance[None] * shape",
        "epistemic = 0 * spread * one.variance[None] * shape",
        "tests/tracking/test_regressor.py tests/tracking/test_calibration.py",
    ),
    Mutant(
        "the mixture's start is not its prior",
        "src/opvi/targets/_mixture.py",
        "return draw * self.spread(draw.dtype)",
        "return draw",
        "tests/targets tests/test_samplers.py",
    ),
    Mutant(
        "rows in turn forget the rows before them",
        "src/opvi/filters/_kalman.py",
        'AC = AC - jnp.einsum("nrs,nksd->nkrd", jnp.einsum("nkrd,nksd->nrs", A, Z), Z)',
        "AC = AC + 0 * Z.sum()",
        "tests/filters/test_kalman.py",
    ),
    Mutant(
        "rows in turn forget how far the others moved",
        "src/opvi/filters/_kalman.py",
        'slice_of(residual, p, 1) - jnp.einsum("nkrd,nkd->nr", A, move)',
        "slice_of(residual, p, 1)",
        "tests/filters/test_kalman.py",
    ),
    Mutant(
        "empty blocks of a process are factored",
        "src/opvi/tracking/_process.py",
        "jnp.minimum(filled, len(K)) + BLOCK - 1",
        "len(K) + 0 * filled",
        "tests/tracking/test_process.py -k block",
    ),
    Mutant(
        "a process leaves the last rows out",
        "src/opvi/tracking/_process.py",
        "jnp.minimum(filled, len(K)) + BLOCK - 1",
        "jnp.minimum(filled, len(K))",
        "tests/tracking/test_process.py -k block",
    ),
    Mutant(
        "rows in turn are never looked at again",
        "src/opvi/filters/_kalman.py",
        "covariance.when(renew & (moved | (p > 0)), lambda _: again(p, move), same(p, move))",
        "same(p, move)",
        "tests/filters/test_kalman.py",
    ),
    Mutant(
        "first rows are not looked at again though weights have changed",
        "src/opvi/filters/_kalman.py",
        "renew & (moved | (p > 0))",
        "renew & (p > 0)",
        "tests/filters/test_kalman.py",
    ),
    Mutant(
        "first rows are looked at again though nothing has changed",
        "src/opvi/filters/_kalman.py",
        "renew & (moved | (p > 0))",
        "renew",
        "tests/filters/test_kalman.py",
    ),
    Mutant(
        "covariances in other units lose what two biases share",
        "src/opvi/tracking/_layers.py",
        "_padded(both / 2, first, ",
        "_padded(both, first, ",
        "tests/tracking/test_scaling.py",
    ),
    Mutant(
        "covariances unit by unit lose what two biases share",
        "src/opvi/tracking/_layers.py",
        "_padded(both / 2, *room, 2)",
        "_padded(both, *room, 2)",
        "tests/tracking/test_scaling.py tests/tracking/test_seats.py",
    ),
    Mutant(
        "columns fade that help",
        "src/opvi/tracking/_gates.py",
        "jnp.exp(RATE * share * push)",
        "jnp.exp(-RATE * share * push)",
        "tests/tracking/test_gates.py",
    ),
    Mutant(
        "columns fade while errors go with them",
        "src/opvi/tracking/_gates.py",
        "jnp.where(clear, 1, ",
        "jnp.where(clear & False, 1, ",
        "tests/tracking/test_gates.py",
    ),
    Mutant(
        "of few columns those fade that chance made look bad",
        "src/opvi/tracking/_gates.py",
        "harm > FEW_CLEAR * ",
        "harm > 0 * FEW_CLEAR * ",
        "tests/tracking/test_gates.py",
    ),
    Mutant(
        "weights of a column that runs on grow with it",
        "src/opvi/tracking/_layers.py",
        "grown = jnp.minimum(ratio, ",
        "grown = jnp.maximum(ratio, ",
        "tests/tracking/test_scaling.py",
    ),
    Mutant(
        "texts behind hashed columns are lost with a checkpoint",
        "src/opvi/app/learn/_learner.py",
        'tree.get("columns", self.columns), tree.get("words", {})',
        'tree.get("columns", self.columns), {}',
        "tests/app/test_words.py",
    ),
    Mutant(
        "half a program stays on disk",
        "src/opvi/running/_programs.py",
        "            path.unlink(missing_ok=True)\n",
        "            pass\n",
        "tests/running/test_programs.py",
    ),
    Mutant(
        "programs of another processor are used",
        "src/opvi/running/_kept.py",
        "        machine(),\n",
        "",
        "tests/running/test_kept.py -k depends_on",
    ),
    Mutant(
        "programs on disk: where they lie is part of their names",
        "src/opvi/running/_kept.py",
        " if not name.startswith(IDLE)}",
        "}",
        "tests/running/test_kept.py -k depends_on",
    ),
    Mutant(
        "programs on disk: SciPy is loaded for each",
        "src/opvi/running/_kept.py",
        '        if b"lapack" in program:',
        "        if True:",
        "tests/running/test_kept.py -k scipy_is_loaded",
    ),
    Mutant(
        "programs on disk: others may write to the folder",
        "src/opvi/running/_programs.py",
        " and not about.st_mode & 0o022",
        "",
        "tests/running/test_programs.py -k others_may_write",
    ),
    Mutant(
        "programs on disk: the folder belongs to somebody else",
        "src/opvi/running/_programs.py",
        "about.st_uid == os.geteuid() and ",
        "",
        "tests/running/test_programs.py -k others_may_write",
    ),
    Mutant(
        "programs on disk: files in a folder of JAX's own are swept away",
        "src/opvi/running/_programs.py",
        "        if not given:\n            _swept",
        "        if True:\n            _swept",
        "tests/running/test_programs.py -k stays_its_own",
    ),
    Mutant(
        "programs on disk: whatever lies beside a new folder is removed",
        "src/opvi/running/_programs.py",
        "if OURS.fullmatch(folder.name):",
        "if True:",
        "tests/running/test_programs.py -k other_versions",
    ),
    Mutant(
        "a particle that leaps is kept",
        "src/opvi/filters/_gauss_newton.py",
        "good &= (jnp.abs(move) <= LARGEST_STEP * jnp.sqrt(largest)).all((1, 2))",
        "good &= True",
        "tests/filters/test_survival.py",
    ),
    Mutant(
        "plain jit instead of compiled",
        "src/opvi/_steps.py",
        "program = jax.jit(outer, static_argnums=0)",
        "program = inner",
        "tests/test_samplers.py",
    ),
    Mutant(
        "A positive target's density without its Jacobian",
        "src/opvi/app/learn/_scales.py",
        "log_density=predicted.log_density - z)",
        "log_density=predicted.log_density)",
        "tests/app/test_scales.py",
    ),
    Mutant(
        "Thousands decided without the other columns",
        "src/opvi/adapters/_tables/_first.py",
        "form = _form(column, voted, reading.semicolons)",
        "form = _form(column, None, False)",
        "tests/app/test_awkward.py",
    ),
    Mutant(
        "Classes compared as floats",
        "src/opvi/adapters/_tables/_values.py",
        "if WHOLE.fullmatch(text):",
        "if False:",
        "tests/app/test_awkward.py",
    ),
    Mutant(
        "A model that grows at once, not before a batch",
        "src/opvi/app/learn/_learner.py",
        "ready = max(0, (held + int(late[0])) // BATCH * BATCH - held)",
        "ready = 0",
        "tests/app/test_late_classes.py",
    ),
    Mutant(
        "Malformed rows without end",
        "src/opvi/adapters/_tables/_source.py",
        "if bad > MOST_BAD or text > MOST_BAD_TEXT:",
        "if False:",
        "tests/app/test_tables.py",
    ),
    Mutant(
        "Connections without end",
        "src/opvi/app/report/_server.py",
        "if self._free.acquire(blocking=False):",
        "if True:",
        "tests/app/test_report.py",
    ),
    Mutant(
        "Keys left out count as the mean",
        "src/opvi/adapters/river/_features.py",
        "if met - self.there[name] > GAPS * met:",
        "if False:",
        "tests/adapters/test_river.py -k zeros_that_an_encoder",
    ),
    Mutant(
        "Trend and season from the first row on",
        "src/opvi/adapters/_tables/_schema.py",
        "waves[~spanned, -2:] = 0.0",
        "pass",
        "tests/app/test_awkward.py",
    ),
    Mutant(
        "a fleet's file forgets the cursor",
        "src/opvi/scale/fleet/_fleet.py",
        '"cursor": place,',
        '"cursor": None,',
        "tests/scale/test_fleet.py",
    ),
    Mutant(
        "what a failed call wrote stays in the fleet's file",
        "src/opvi/scale/fleet/_store.py",
        'self._run("ROLLBACK TO learn")',
        "pass",
        "tests/scale/test_fleet.py",
    ),
    Mutant(
        "a fleet saves models that were not touched",
        "src/opvi/scale/fleet/_store.py",
        "self._dirty[slots] = False\n        self.about",
        "self.about",
        "tests/scale/test_fleet.py",
    ),
    Mutant(
        "records keep rows that were learnt",
        "src/opvi/scale/fleet/_keyed.py",
        'records[f"row{index}"][begun] = 0',
        "pass",
        "tests/scale/test_keyed.py",
    ),
    Mutant(
        "a record's fingerprint leaves the key out",
        "src/opvi/scale/fleet/_keyed.py",
        '"key": settings(jax.random.key_data(self._key)),',
        "",
        "tests/scale/test_keyed.py",
    ),
    Mutant(
        "a damaged model is taken for whole",
        "src/opvi/scale/fleet/_store.py",
        'or zlib.crc32(data[:-4]) != int.from_bytes(data[-4:], "little")',
        "",
        "tests/scale/test_fleet.py",
    ),
    Mutant(
        "a population without the models' own doubt",
        "src/opvi/scale/fleet/_pool.py",
        "covariance = (C + (mu",
        "covariance = (0 * C + (mu",
        "tests/scale/test_pool.py",
    ),
    Mutant(
        "merged posteriors count the prior twice",
        "src/opvi/filters/_merging.py",
        "rest = 1 - len(parts)",
        "rest = 0",
        "tests/filters/test_merging.py",
    ),
    Mutant(
        "Spark's rows are learnt as they come",
        "src/opvi/adapters/spark.py",
        'np.argsort(table[self.order].to_numpy(), kind="stable")',
        "np.arange(len(table))",
        "tests/adapters/test_spark.py::test_rows_are_put_in_order_and_models_are_those_of_a_fleet",
    ),
    Mutant(
        "served: a repeated key is learnt again",
        "src/opvi/app/serve/_intake.py",
        "if sent.key and (sent.key in self.log.keys or sent.key in fresh):",
        "if False:",
        "tests/app/test_serve.py -k cuts",
    ),
    Mutant(
        "served: a log's torn end stays",
        "src/opvi/app/serve/_log.py",
        "        os.truncate(path, at)",
        "        pass",
        "tests/app/test_serve.py -k torn",
    ),
    Mutant(
        "served: what could not be written stays in the log",
        "src/opvi/app/serve/_log.py",
        "                os.ftruncate(self._file, self._size)",
        "                pass",
        "tests/app/test_serve.py -k full_disk",
    ),
    Mutant(
        "served: any Host is answered",
        "src/opvi/app/serve/_guard.py",
        "if len(hosts) != 1 or (ANY not in",
        "if len(hosts) != 1 or (not hosts and ANY not in",
        "tests/app/test_serve.py -k names_origins",
    ),
    Mutant(
        "streams: NATS resumes at the message learnt last",
        "src/opvi/adapters/_streams/_nats.py",
        "following = self._position + 1",
        "following = self._position",
        "tests/app/test_streams.py -k nats_through",
    ),
    Mutant(
        "streams: Kafka resumes at the message learnt last",
        "src/opvi/adapters/_streams/_kafka.py",
        "self._offsets[place[0]] = place[1] + 1",
        "self._offsets[place[0]] = place[1]",
        "tests/app/test_streams.py -k kafka_by",
    ),
    Mutant(
        "streams: SQL begins at its first key again",
        "src/opvi/adapters/_streams/_sql.py",
        "cursor.position if cursor.row else -(2**63)",
        "-(2**63)",
        "tests/app/test_streams.py -k sqlite_by",
    ),
    Mutant(
        "told: predictions after the checkpoint stay",
        "src/opvi/app/learn/_telling.py",
        "        os.ftruncate(self._file, position)",
        "        pass",
        "tests/app/test_telling.py -k through_stops",
    ),
]


def survives(mutant: Mutant) -> str | None:
    """Return how the tests took a mutant if they passed it, or None if they failed, as they must."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "opvi"
        ignore = shutil.ignore_patterns(".git", ".venv", ".*cache", "site", "__pycache__", "dev*")
        shutil.copytree(ROOT, copy, ignore=ignore)
        path = copy / mutant.path
        text = path.read_text()
        if text.count(mutant.old) != 1:
            return f"its line is there {text.count(mutant.old)} times: write the mutant again"
        path.write_text(text.replace(mutant.old, mutant.new))
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *mutant.tests.split()]
        search = os.pathsep.join([str(copy / "src"), str(copy), *filter(None, [os.environ.get("PYTHONPATH")])])
        done = subprocess.run(
            command, cwd=copy, env={**os.environ, "PYTHONPATH": search}, capture_output=True, text=True
        )
        if done.returncode == 1 or (done.returncode == 2 and "xdist" in done.stdout):
            failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
            print(f"dead      {mutant.name}: {failed[0][7:] if failed else '?'}", flush=True)
            return None
        return f"pytest ended with {done.returncode}: {done.stdout[-300:]}"


def main() -> None:
    """Try the mutants whose name holds one of the words given, or all."""
    words = sys.argv[1:]
    chosen = [mutant for mutant in MUTANTS if not words or any(word in mutant.name for word in words)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        outcomes = list(pool.map(survives, chosen))
    for mutant, outcome in zip(chosen, outcomes, strict=True):
        if outcome is not None:
            print(f"SURVIVES  {mutant.name}: {outcome}")
    sys.exit(any(outcome is not None for outcome in outcomes))


if __name__ == "__main__":
    main()
