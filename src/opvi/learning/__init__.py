"""Learning from a file or a pipe: a folder for every run, checkpoints, scores, predictions."""

from opvi.learning.directory import RunDirectory as RunDirectory
from opvi.learning.directory import RunError as RunError
from opvi.learning.learner import Learner as Learner
from opvi.learning.learner import Stopped as Stopped
from opvi.learning.models import Settings as Settings
from opvi.learning.predicting import predict as predict
from opvi.learning.scores import Summary as Summary
from opvi.learning.telling import contents as contents
