"""A progress bar drawn on the host between chunks: rich's where it is installed, a plain line otherwise."""

import sys
import time
from types import TracebackType
from typing import Any, Self


class Progress:
    """Rounds, rows, rows per second and, where the end is known, the time left."""

    def __init__(self, label: str, first_round: int, rounds: int | None, shown: bool):
        self.label, self.first, self.rounds, self.shown = label, first_round, rounds, shown
        self.start = time.perf_counter()
        self.bar: Any = None
        self.line = ""

    def __enter__(self) -> Self:
        if self.shown and sys.stderr.isatty():
            self.bar = _rich_bar()
        if self.bar:
            self.bar.start()
            self.task = self.bar.add_task(self.label, total=self.rounds, completed=self.first, rows="")
        return self

    def update(self, done: int, rows: int, new_rows: int) -> None:
        """Show `done` rounds and `rows` rows in total, `new_rows` of them since this run began."""
        seconds = max(time.perf_counter() - self.start, 1e-9)
        figures = f"{rows:,} rows, {new_rows / seconds:,.0f} rows/s"
        if self.bar:
            self.bar.update(self.task, completed=done, rows=figures)
        total = f"/{self.rounds:,}" if self.rounds else ""
        self.line = f"{self.label}: round {done:,}{total}, {figures}"
        if self.rounds and done < self.rounds:
            left = seconds / max(done - self.first, 1) * (self.rounds - done)
            self.line += f", {left:.0f} s left"
        if self.shown and not self.bar and sys.stderr.isatty():
            print("\r" + self.line.ljust(79), end="", file=sys.stderr, flush=True)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.bar:
            self.bar.stop()
        elif self.shown and self.line:  # a log file gets one line a run, not one a chunk
            start = "\r" if sys.stderr.isatty() else ""
            print(start + self.line.ljust(79 if start else 0), file=sys.stderr, flush=True)


def _rich_bar() -> Any:
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar
    except ImportError:
        return None
    return Bar(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("rounds  {task.fields[rows]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
