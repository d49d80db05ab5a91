"""The backend of the routes in the process that holds the run: intake, tickets, figures and the report."""

import asyncio
from collections.abc import Callable

from opvi.app.learn import contents
from opvi.app.learn._predict import Learnt
from opvi.app.report import page
from opvi.app.serve._followed import Followed
from opvi.app.serve._intake import Intake, Sent
from opvi.app.serve._metrics import Figures
from opvi.app.serve._tickets import Held, Tickets
from opvi.app.serve._worker import Answer, Loop
from opvi.app.serve._writer import Published, Writer


class Behind:
    """A run that is written or followed in this process.

    Args:
        run: the source of the state.
        name: the model's name.
        backlog: the most rows that may wait to be learnt.
        loop: the event loop that waits for answers.
    """

    def __init__(self, run: Writer | Followed, name: str, backlog: int, loop: Loop):
        self._run, self._name = run, name
        self._tickets = Tickets()
        writer = run if isinstance(run, Writer) else None
        self._figures = Figures(self._tickets, lambda: run.published, writer)
        self._intake = Intake(writer, self._tickets, loop, backlog, self._figures.durable) if writer else None

    @property
    def readonly(self) -> bool:
        """Whether the server only predicts."""
        return self._intake is None

    @property
    def published(self) -> Published:
        """The state that predictions are made with."""
        return self._run.published

    @property
    def failed(self) -> str:
        """Why learning has stopped, if it has."""
        return self._run.failed

    def take(self, sent: Sent) -> Answer | None:
        """Accept a request to learn, or return why not."""
        assert self._intake is not None
        return self._intake.take(sent)

    def keep(self, ticket: str, held: Held) -> None:
        """Keep a request whose label will come later."""
        self._tickets.keep(ticket, held)

    async def figures(self) -> bytes:
        """Return the run's metrics for Prometheus."""
        return self.figures_now()

    async def page(self) -> bytes:
        """Return the report."""
        return await asyncio.to_thread(self.page_now)

    def figures_now(self) -> bytes:
        """Return the run's metrics for Prometheus."""
        return self._figures.text()

    def page_now(self) -> bytes:
        """Return the report, which takes a while."""
        known: Callable[[], Learnt] = self._run.learnt
        return page(contents(known(), self._name, ""), live=True).encode(errors="replace")

    def close(self) -> None:
        """Finish accepted requests; the writer learns the remaining durable rows when it closes."""
        if self._intake is not None:
            self._intake.close()
