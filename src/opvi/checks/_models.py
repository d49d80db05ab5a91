r"""Models compared on one stream: by their evidence, and by how well they predicted each row before learning it."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from opvi.running import run
from opvi.types import Array, Batch, Info, Sampler, Seed, Start, State, Tree, as_key

SURE = 2.0  # standard errors


@dataclass(frozen=True)
class ModelComparison:
    """Models on the same rows, the best prequential score first. Printed, it is a table and a sentence."""

    names: list[str]
    score: dict[str, float]  # the sum of log predictive densities, of each row before it was learnt; larger is better
    difference: dict[str, float]  # of the scores, from the best one's: at most 0
    se: dict[str, float]  # the standard error of that difference, from pairs of rows
    log_evidence: dict[str, float]  # nan where the sampler has none
    rows: int
    states: dict[str, State]  # after the last row

    @property
    def sentence(self) -> str:
        """What the numbers say of the two best models."""
        best, *others = self.names
        second = others[0]
        by, se = -self.difference[second], self.se[second]
        over = f"{by:.1f} ± {se:.1f} nats over {self.rows:,} rows"
        if by > SURE * se:
            said = f"{best} predicts better than {second}, by {over}."
        else:
            said = f"By their predictions, {best} and {second} cannot be told apart: {over}."
        known = {name: value for name, value in self.log_evidence.items() if math.isfinite(value)}
        if len(known) < 2:
            return said
        first, then = sorted(known, key=known.__getitem__, reverse=True)[:2]
        factor = known[first] - known[then]
        odds = f"{math.exp(factor):.3g}" if factor < 20 else f"e^{factor:.0f}"
        return f"{said} The evidence is for {first} over {then}, {odds} to 1 ({factor:.1f} nats)."

    def __str__(self) -> str:
        lines = [["", "log score", "difference", "se", "log evidence"]]
        for name in self.names:
            numbers = self.score[name], self.difference[name], self.se[name], self.log_evidence[name]
            lines.append([name, *(f"{value:.1f}" if math.isfinite(value) else "–" for value in numbers)])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = [
            "  ".join(
                [line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True))]
            )
            for line in lines
        ]
        return "\n".join([*table, self.sentence])


def compare_models(
    samplers: Mapping[str, Sampler], stream: Iterable[Batch], key: Seed = 0, *, particles: Start = None
) -> ModelComparison:
    r"""Run two or more models over the same rows, and compare them by prequential score and by evidence.

    $$S_m = \sum_i \log p_m(y_i \mid \text{batches before that of } i), \qquad
      \mathrm{se}(S_a - S_b) = \sqrt{n \operatorname{Var}_i (\log p_a(y_i) - \log p_b(y_i))}$$

    In batches of one row S is the log evidence. The smaller the batches, the more the prior counts, as it does in the
    evidence. Likelihoods must be normalised and of the same y in the same units. For methods under one budget, see
    `opvi.compare`.

    Args:
        samplers: name -> the sampler of a model, e.g. `opvi.tracker(target)`.
        stream: the batches that each learns, in memory while they are compared.
        key: a JAX key or an integer seed.
        particles: as in `opvi.run`.
    """
    if len(samplers) < 2:
        raise ValueError(f"`samplers` has {len(samplers)} models, but at least 2 can be compared.")
    batches, key = list(stream), as_key(key)
    if not batches:
        raise ValueError("the stream is empty: it gave no batch, but a comparison needs at least one.")
    recorded = _RowScores(max(len(batch.weight) for batch in batches))
    weight = np.concatenate([np.asarray(batch.weight, float) for batch in batches])
    here = weight > 0
    rows, scores, states, evidence = weight[here], {}, {}, {}
    for name, sampler in samplers.items():
        states[name], history = run(sampler, batches, key, particles=particles, record=recorded)
        found = [row[: len(batch.weight)] for row, batch in zip(history.record, batches, strict=True)]
        scores[name] = rows * np.concatenate(found).astype(float)[here]
        asked = getattr(sampler, "log_evidence", None)
        evidence[name] = math.nan if asked is None else float(asked(states[name]))
    total = {name: float(each.sum()) for name, each in scores.items()}
    names = sorted(samplers, key=total.__getitem__, reverse=True)
    apart = {name: scores[name] - scores[names[0]] for name in names}
    difference = {name: float(each.sum()) for name, each in apart.items()}
    se = {name: math.sqrt(len(each) * each.var()) for name, each in apart.items()}
    return ModelComparison(names, total, difference, se, evidence, int(rows.sum()), states)


@dataclass(frozen=True)
class _RowScores:
    """What `run` records: the log predictive density of each row, padded to one length."""

    size: int

    def __call__(self, state: State, info: Info, batch: Batch) -> Tree:
        if info.predicted is None:
            raise TypeError("one of the samplers predicts no rows, so that it has no score.")
        density: Array = info.predicted.log_density
        return jnp.pad(density, (0, self.size - len(density)))
