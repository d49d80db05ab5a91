"""Learning from a file or a pipe: a folder for every run, checkpoints, scores, predictions."""

from opvi.app.learn._directory import RunDirectory as RunDirectory
from opvi.app.learn._directory import RunError as RunError
from opvi.app.learn._learner import Learner as Learner
from opvi.app.learn._learner import Stopped as Stopped
from opvi.app.learn._model import Settings as Settings
from opvi.app.learn._predict import predict as predict
from opvi.app.learn._report import contents as contents
from opvi.app.learn._scores import Summary as Summary
