r"""Is it the posterior? What every diagnosis answers, and a callback that asks for it during a run."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from opvi.types import Sampler, Tree

FIRST_DOUBT = 32  # rounds before the first diagnosis; the next is due after twice as many


class Diagnosis(Protocol):
    """How far a sampler's draws can be trusted: numbers, whose kinds depend on the sampler, and what they mean."""

    def concerns(self) -> list[str]:
        """Return what is wrong with the draws and what to do about it; nothing if they can be trusted."""

    @property
    def right(self) -> bool:
        """Whether nothing is wrong with the draws; there may be concerns about the model."""

    def _asdict(self) -> Mapping[str, Any]:
        """Return the numbers by name; a part may have several."""


@dataclass
class Doubts:
    """Diagnoses of a run, as `doubts` asks for them."""

    diagnosis: Callable[[Tree], Diagnosis]
    due: int = field(default=FIRST_DOUBT)
    said: bool = field(default=False)

    def __call__(self, chunk: Tree) -> dict[str, float] | None:
        """Return the diagnosis if one is due, and warn of the first concerns."""
        if chunk.round < self.due:
            return None
        while self.due <= chunk.round:
            self.due *= 2
        found = self.diagnosis(chunk.state)
        concerns = found.concerns()
        if concerns and not self.said:
            self.said = True
            what = "the model may be wrong" if found.right else "this may not be the posterior"
            about = f"after round {chunk.round} {what}: {' '.join(concerns)}"
            warnings.warn(about, UserWarning, stacklevel=2)
        return dict(_numbers(found._asdict()))


def _numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a diagnosis by name, those of its parts included."""
    for name, value in values.items():
        if hasattr(value, "_asdict"):
            yield from _numbers({f"{name}.{part}": one for part, one in value._asdict().items()})
        elif value is not None:
            yield name, float(value)


def doubts(sampler: Sampler) -> Doubts:
    """Return a callback of `opvi.run` that diagnoses after 32, 64, 128, … rounds, and warns once.

    A diagnosis costs about as much as a step or a few, so that those of a run usually cost little beside its steps.
    What they said is in `history.callbacks`.

    Args:
        sampler: one with `diagnosis`, such as `opvi.tracker(target)` of up to 1,000 parameters. Give `opvi.run` the
            callback and `every=32`.
    """
    diagnosis = getattr(sampler, "diagnosis", None)  # a wrapper has it where the wrapped sampler has
    if diagnosis is None:
        raise TypeError(
            f"a {type(sampler).__name__} has no `diagnosis`; `opvi.ibis`, `opvi.sl_opvi` and `opvi.gauss_newton` have, "
            "and so has what `opvi.tracker` picks for models with up to 1,000 parameters."
        )
    return Doubts(diagnosis)
