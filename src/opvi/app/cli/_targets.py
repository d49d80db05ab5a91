"""Several targets: one run for each, side by side in one folder; no target is an input of another."""

import argparse
import copy
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from opvi.app.cli._common import CommandError

if TYPE_CHECKING:
    from opvi.app.learn._predict import Columns, Rejected

LIST = "targets.json"  # the targets of a folder, and the folders of their runs
Predictions = Iterator[tuple["Columns", list["Rejected"]]]


def runs_in(folder: Path) -> dict[str, Path]:
    """Return the run folders by target; empty if this is the folder of a single run."""
    path = folder / LIST
    if not path.is_file():
        return {}
    try:
        told = json.loads(path.read_bytes())
        names = {str(target): Path(str(name)).name for target, name in told["targets"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CommandError(f"{path} is damaged. It names the targets and the folders of their runs.") from None
    return {target: folder / name for target, name in names.items() if name not in ("", "..")}


def learn_each(
    options: argparse.Namespace, folder: Path, targets: Sequence[str], learn: Callable[[argparse.Namespace], int]
) -> int:
    """Learn one target after the other; stop at the first non-zero status, where `--resume` continues."""
    if options.source == "-":
        raise CommandError("a pipe is read once, so it teaches one target. Save it to a file to learn several.")
    if len(set(targets)) < len(targets):
        raise CommandError(f"`--target` names a column twice: {', '.join(targets)}.")
    if (folder / "run.json").exists():
        raise CommandError(f"{folder} holds a run of one target. Choose another folder: `--run DIR`.")
    known = runs_in(folder)
    if known and list(known) != list(targets):
        raise CommandError(
            f"{folder} holds runs of other targets: {', '.join(known)}. Choose another folder: `--run DIR`."
        )
    if not known:
        from opvi.running._checkpoint import write_whole

        names = {target: f"{place + 1}-{_plain(target)}" for place, target in enumerate(targets)}
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / LIST, [json.dumps({"targets": names}, indent=1).encode()])
        known = runs_in(folder)
    for target, run in known.items():
        one = copy.copy(options)
        others = [name for name in targets if name != target]
        one.target, one.run, one.leave_out = [target], run, [*options.leave_out, *others]
        status = learn(one)
        if status:
            again = ["opvi", "learn", *([options.source] if options.source else []), "--run", str(folder), "--resume"]
            print(f"To resume this target and those after it:\n  {shlex.join(again)}", file=sys.stderr)
            return status
    return 0


def side_by_side(parts: dict[str, Predictions]) -> Predictions:
    """Yield the predictions of several runs for the same rows, with column names prefixed by the target."""
    for blocks in zip(*parts.values(), strict=True):
        columns = {"row": blocks[0][0]["row"]}
        for target, (said, _) in zip(parts, blocks, strict=True):
            columns |= {f"{target}: {name}": values for name, values in said.items() if name != "row"}
        rejected = {one.row: one for one in chain.from_iterable(bad for _, bad in blocks)}
        yield columns, [rejected[row] for row in sorted(rejected)]


def _plain(name: str) -> str:
    """Return a name that any file system accepts."""
    return re.sub(r"[^\w-]+", "_", name, flags=re.ASCII)[:60] or "target"
