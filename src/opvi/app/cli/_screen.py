"""What `opvi learn` shows while it works: a live table on a terminal, an occasional line in a log.

A closed screen or an unwritable log never stops learning; nothing is shown from then on.
"""

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

if TYPE_CHECKING:
    from opvi.app.learn import Learner

LOG_EVERY = 10.0  # seconds
LOG_FIRST = 1.0  # and the first line of a log sooner
DRAWN_EVERY = 0.25
RATE_OVER = 10.0  # seconds behind the rows per second shown


class Terminal(Console):
    """A console that notes when its reader has gone, instead of ending the program."""

    def on_broken_pipe(self) -> None:
        """Note that the reader has gone."""
        raise BrokenPipeError


class Screen:
    """`with Screen(learner, messages) as screen: learner.learn(…, screen.show)`."""

    def __init__(self, learner: "Learner", messages: list[str]):
        self.learner, self.messages = learner, messages
        self.console = Terminal(stderr=True, highlight=False)
        self.began = self.drawn = time.perf_counter()
        self.marks = [(self.began, learner.rows)]
        self.live: Live | None = None
        self.closed = False  # nobody looks any more

    def __enter__(self) -> Self:
        self._unless_closed(self._begin)
        return self

    def _unless_closed(self, draw: Callable[[], None]) -> None:
        """Draw unless the screen was closed."""
        try:
            if not self.closed:
                draw()
        except (OSError, ValueError):  # a broken pipe, a full disk, a file that was closed
            self.closed = True

    def _begin(self) -> None:
        for message in self.messages:
            self.console.print(message, markup=False, soft_wrap=True)
        if self.console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TaskProgressColumn(),
                TimeElapsedColumn(),
                TextColumn("gone,"),
                TimeRemainingColumn(),
                TextColumn("left"),
            )
            self.bar = Progress(*columns, console=self.console)
            self.task = self.bar.add_task("learning", total=None)
            self.live = Live(self._picture(), console=self.console, refresh_per_second=4, transient=True)
            self.live.start()

    def _picture(self) -> Group:
        return Group(table(self.learner, self._rate()), self.bar)

    def show(self, learner: "Learner", share: float | None) -> None:
        """Redraw, if it is time."""
        now = time.perf_counter()
        pause = DRAWN_EVERY if self.live else LOG_FIRST if self.drawn == self.began else LOG_EVERY
        if now - self.drawn < pause:
            return
        self.drawn = now
        self.marks = [mark for mark in self.marks if now - mark[0] < RATE_OVER or mark is self.marks[-1]]
        self.marks.append((now, learner.rows))
        self._unless_closed(lambda: self._draw(learner, share))

    def _draw(self, learner: "Learner", share: float | None) -> None:
        if self.live:
            self.bar.update(self.task, total=1.0 if share is not None else None, completed=share or 0.0)
            self.live.update(self._picture())
        else:
            done = f" ({share:.0%})" if share is not None else ""
            figures = ", ".join(f"{name} {value}" for name, value in figures_of(learner, self._rate()))
            print(f"learning{done}: {figures}", file=sys.stderr, flush=True)

    def _rate(self) -> float | None:
        (first, before), (last, rows) = self.marks[0], self.marks[-1]
        return (rows - before) / (last - first) if last > first else None

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.live:
            self._unless_closed(self.live.stop)


def figures_of(learner: "Learner", rate: float | None) -> list[tuple[str, str]]:
    """Return names and formatted values."""
    told, regression = learner.summary(), learner.schema.task == "regression"
    name = "RMSE" if regression else "accuracy"

    def error(value: float) -> str:
        if value != value:
            return "–"
        return f"{value:.4g}" if regression else f"{1 - value:.2%}"

    figures = [("rows", f"{learner.rows:,}")]
    if rate is not None:
        figures.append(("rows/s", f"{rate:,.0f}"))
    figures += [
        ("log loss", f"{told.total.loss:.4f}" if told.total.count else "–"),
        (name, error(told.total.error)),
        (f"recent {name}", error(told.recent.error)),
        ("baseline", error(told.baseline)),
    ]
    more = learner.figures.told(learner.schema.task, learner.schema.classes)
    for key, label in (("mae", "MAE"), ("r2", "R²"), ("auc", "AUC")):
        if more.get(key) is not None:
            figures.append((label, f"{more[key]:.4g}"))
    if regression:
        covered = f"{told.total.covered:.1%}" if told.total.count else "–"
        figures.append(("in the 90 % interval", covered))
    else:
        figures.append(("calibration error", f"{told.calibration_error:.4f}" if told.total.count else "–"))
    figures += [("drift alarms", f"{told.alarm_count:,}"), ("rejected", f"{learner.rejected:,}")]
    if learner.filled:
        figures.append(("gaps filled", f"{learner.filled:,}"))
    if late := len(learner.schema.classes) - len(learner.begun.classes):
        figures.append(("classes met later", f"{late:,}"))
    if told.refused:
        figures.append(("batches refused", f"{told.refused:,}"))
    if told.unsound:
        figures.append(("predictions not finite, in no other figure", f"{told.unsound:,}"))
    return figures


def table(learner: "Learner", rate: float | None) -> Table:
    """The figures as a table."""
    out = Table(title=f"{learner.schema.task}: {_plain(learner.schema.target)}", title_justify="left")
    out.add_column("each row predicted before it was learnt")
    out.add_column("", justify="right")
    for name, value in figures_of(learner, rate):
        out.add_row(name, value)
    return out


def _plain(name: str) -> str:
    """Return a column's name without control characters and rich markup."""
    from rich.markup import escape

    return escape("".join(c if c.isprintable() else "?" for c in name)[:60])
