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

from opvi.app.cli._common import CommandError, explained

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
        from opvi.running._checkpoint import bytes_of

        told = json.loads(bytes_of(path))
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
    told = _files(options.predictions, targets)
    ahead = [target for target in targets if target not in known or not (known[target] / "run.json").exists()]
    _check(options, folder, ahead, targets, told)
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
        one.predictions = told.get(target)
        if one.predictions:
            print(f"The predictions of {target}: {one.predictions}", file=sys.stderr)
        status = learn(one)
        if status:
            again = ["opvi", "learn", *([options.source] if options.source else []), "--run", str(folder), "--resume"]
            again += ["--predictions", options.predictions] if options.predictions else []
            print(f"To resume this target and those after it:\n  {shlex.join(again)}", file=sys.stderr)
            return status
    return 0


def _files(where: str | None, targets: Sequence[str]) -> dict[str, str]:
    """Return the file with the predictions of each target: `out-price.csv` for `out.csv`."""
    if not where:
        return {}
    if where == "-" or "://" in where:
        raise CommandError(
            f"`--predictions {where}` takes the predictions of one target, but there are {len(targets)}. Name a file, "
            "such as out.csv: each target gets its own, such as out-price.csv."
        )
    plain = [_plain(target) for target in targets]
    if len({name.casefold() for name in plain}) < len(plain):
        plain = [f"{place + 1}-{name}" for place, name in enumerate(plain)]
    path = Path(where)
    names = (str(path.with_name(f"{path.stem}-{name}{path.suffix}")) for name in plain)
    return dict(zip(targets, names, strict=True))


def _check(
    options: argparse.Namespace, folder: Path, ahead: Sequence[str], targets: Sequence[str], told: dict[str, str]
) -> None:
    """Refuse what the runs that have not begun yet would refuse, before any of them learns."""
    for where in (Path(told[target]) for target in ahead if target in told):
        if where.is_file() and where.stat().st_size:
            raise CommandError(
                f"`--predictions {options.predictions}` would write {where}, which is there already, and not of this "
                "run. Move it, or choose another name."
            )
    if ahead and options.source:
        from opvi.app.cli._learn import asked_of
        from opvi.app.learn._starting import check_targets

        with explained(folder):
            check_targets(asked_of(options), ahead, targets)


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
