"""What stands behind the routes in the process that has the run: intake, tickets, figures and the report."""

import asyncio
from collections.abc import Callable

from opvi.adapters._tables import Json
from opvi.adapters._tables._messages import Row
from opvi.app.learn import contents
from opvi.app.learn._predict import Learnt
from opvi.app.report import page
from opvi.app.serve._followed import Followed
from opvi.app.serve._intake import Intake, Sent
from opvi.app.serve._metrics import Figures
from opvi.app.serve._tickets import Tickets
from opvi.app.serve._worker import Answer, Loop
from opvi.app.serve._writer import Published, Writer


class Behind:
    """A run that is written or followed in this process.

    Args:
        run: who gives the state.
        name: of the model.
        backlog: rows that may wait to be learnt.
        loop: who waits for answers.
    """

    def __init__(self, run: Writer | Followed, name: str, backlog: int, loop: Loop):
        self._run, self._name = run, name
        self._tickets = Tickets()
        writer = run if isinstance(run, Writer) else None
        self._figures = Figures(self._tickets, lambda: run.published, writer)
        self._intake = Intake(writer, self._tickets, loop, backlog, self._figures.durable) if writer else None

    @property
    def readonly(self) -> bool:
        """Whether nothing is learnt."""
        return self._intake is None

    @property
    def published(self) -> Published:
        """What predictions are made with."""
        return self._run.published

    @property
    def failed(self) -> str:
        """Why nothing is learnt any more."""
        return self._run.failed

    def take(self, sent: Sent) -> Answer | None:
        """Take a request to learn, or say why not."""
        assert self._intake is not None
        return self._intake.take(sent)

    def keep(self, ticket: str, rows: list[Row], said: list[Json | None]) -> str:
        """Keep a question whose label will come; return its ticket."""
        return self._tickets.keep(ticket, rows, said)

    async def figures(self) -> bytes:
        """Return what Prometheus is told of the run."""
        return self.figures_now()

    async def page(self) -> bytes:
        """Return the report."""
        return await asyncio.to_thread(self.page_now)

    def figures_now(self) -> bytes:
        """Return what Prometheus is told of the run."""
        return self._figures.text()

    def page_now(self) -> bytes:
        """Return the report; this takes a while."""
        known: Callable[[], Learnt] = self._run.learnt
        return page(contents(known(), self._name, ""), live=True).encode(errors="replace")

    def close(self) -> None:
        """Finish what was taken; rows that are durable are learnt by the writer's own end."""
        if self._intake is not None:
            self._intake.close()
