"""A run's folder: what the run is about, its checkpoints, and the rows it rejected."""

import json
import os
import stat
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from opvi.adapters._tables import Json, Rejected
from opvi.running import CheckpointError, Checkpoints
from opvi.running._checkpoint import bytes_of, make_folder, sync_folder, write_whole

FORMAT = 1
KEPT = 3  # checkpoints
ABOUT, CHECKPOINTS, REJECTED, METRICS = "run.json", "checkpoints", "rejected.jsonl", "metrics.json"


class RunError(Exception):
    """A problem with a run that the user can fix; the message says how."""


class RunDirectory:
    """The files of one run. Nothing outside the folder is read or written through it.

    Args:
        path: the folder.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)

    @property
    def exists(self) -> bool:
        """Whether a run was started here."""
        return (self.path / ABOUT).exists()

    @property
    def checkpoints(self) -> Checkpoints:
        """The run's last checkpoints."""
        return Checkpoints(self._inside(CHECKPOINTS), KEPT)

    def _inside(self, name: str) -> Path:
        """Return a file or folder of the run; refuse links to other places."""
        path = self.path / name
        if path.is_symlink():
            raise RunError(
                f"{path} is a link, but a run's files must lie in its own folder. Put the file itself there."
            )
        return path

    def begin(self, about: Json) -> None:
        """Write run.json: the schema, the model and the versions."""
        make_folder(self.path)
        self.write(ABOUT, {"format": FORMAT, "began": datetime.now(UTC).isoformat(timespec="seconds"), **about})

    def saved(self) -> str | None:
        """Return when the run was last saved."""
        try:
            seconds = (self.path / METRICS).stat().st_mtime
        except OSError:
            return None
        return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")

    def about(self) -> Json:
        """Return what was chosen when the run began."""
        path = self._inside(ABOUT)
        try:
            about = json.loads(bytes_of(path))
        except FileNotFoundError:
            if (self.path / "targets.json").exists():
                raise RunError(
                    f"{self.path} holds runs of several targets. Name one of its folders, such as "
                    f"{next(iter(sorted(self.path.glob('*/' + ABOUT))), path).parent}."
                ) from None
            raise RunError(
                f"{self.path} holds no run. Begin one: `opvi learn SOURCE --target COLUMN --run DIR`."
            ) from None
        except CheckpointError as error:
            raise RunError(f"{error} Put back a copy.") from None
        except (ValueError, RecursionError) as error:
            raise RunError(
                f"{path} is damaged: {error}. Without it the checkpoints cannot be understood: put back a copy, or "
                "begin again in another folder."
            ) from None
        except OSError as error:
            raise RunError(f"{path} cannot be read: {error.strerror}.") from None
        if not isinstance(about, dict) or not isinstance(about.get("format"), int):
            raise RunError(
                f"{path} is damaged: it does not say what the run is about. Put back a copy, or begin again in another "
                "folder."
            )
        if about["format"] > FORMAT:
            raise RunError(
                f"{self.path} has format {about['format']}, but this opvi reads up to {FORMAT}: a newer one wrote it. "
                "Install that: `pip install --upgrade opvi`."
            )
        return about

    def write(self, name: str, content: Json) -> None:
        """Write a file of the run, for people and scripts."""
        write_whole(self._inside(name), [json.dumps(content, indent=1, allow_nan=False).encode() + b"\n"])

    def open_rejected(self, size: int, name: str = REJECTED) -> tuple[int, int]:
        """Return the file of rejected rows, truncated to its size at the checkpoint, and its actual size if smaller."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(self._inside(name), flags, 0o644)
        about = os.fstat(file)
        if about.st_nlink > 1 or not stat.S_ISREG(about.st_mode):
            os.close(file)
            raise RunError(
                f"{self.path / name} is not a file of its own: it has another name elsewhere, or is not a regular file"
                ". Put a copy in its place."
            )
        size = min(size, about.st_size)
        os.ftruncate(file, size)
        sync_folder(self.path)  # the checkpoints that count its rows must not outlive its name
        return file, size

    @staticmethod
    def as_lines(rejected: Sequence[Rejected], source: str) -> bytes:
        """Return rejected rows as JSON lines."""
        return b"".join(
            json.dumps({"source": source, "row": r.row, "reason": r.reason, "text": r.text}).encode() + b"\n"
            for r in rejected
        )
