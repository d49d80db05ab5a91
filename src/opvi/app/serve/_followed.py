"""A run that another process writes."""

import sys
import threading

from opvi.app.learn import RunDirectory, RunError
from opvi.app.learn._predict import Learnt, learnt
from opvi.app.serve._writer import Published
from opvi.running import CheckpointError

LOOK = 1.0  # seconds between two looks for a new checkpoint


class Followed:
    """A run that another process writes: each new checkpoint replaces the state used for predictions.

    Args:
        run: its folder.
    """

    failed = ""  # nothing is learnt here, so nothing fails

    def __init__(self, run: RunDirectory):
        self._run = run
        self._seen = self._newest()
        self.known = learnt(run)
        self.published = _published(self.known)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="opvi-follower", daemon=True)
        self._thread.start()

    def _newest(self) -> str:
        return max((path.name for path in self._run.checkpoints.folder.glob("[0-9]*.opvi")), default="")

    def _follow(self) -> None:
        said = ""
        while not self._end.wait(LOOK):
            try:
                newest = self._newest()
                if newest != self._seen:
                    known = learnt(self._run)
                    self.known, self.published, self._seen = known, _published(known), newest
                said = ""
            except (RunError, CheckpointError, OSError) as error:
                if str(error) != said:
                    said = str(error)
                    print(f"opvi: {said} The last good state is served.", file=sys.stderr)

    def learnt(self) -> Learnt:
        """Return the run as it was last read, for the report."""
        return self.known

    def close(self) -> None:
        """Stop following."""
        self._end.set()
        self._thread.join()


def _published(known: Learnt) -> Published:
    return Published(known.schema, known.sampler, known.state(), known.settings.seed)
