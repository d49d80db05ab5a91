"""From rows to a state and its history: streams, the loop, checkpoints."""

from opvi.running._checkpoint import CheckpointError as CheckpointError
from opvi.running._checkpoint import load as load
from opvi.running._checkpoint import save as save
from opvi.running._engine import Engine as Engine
from opvi.running._engine import Fed as Fed
from opvi.running._rows import batch as batch
from opvi.running._run import Chunk as Chunk
from opvi.running._run import Compared as Compared
from opvi.running._run import History as History
from opvi.running._run import compare as compare
from opvi.running._run import run as run
from opvi.running._saving import Checkpoints as Checkpoints
from opvi.running._saving import LockedError as LockedError
from opvi.running._settings import settings as settings
from opvi.running._stream import Stream as Stream
from opvi.running._stream import stream as stream
from opvi.running._tickets import Settled as Settled
from opvi.running._tickets import Ticket as Ticket
from opvi.running._tickets import Tickets as Tickets
