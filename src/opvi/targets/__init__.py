"""Posteriors to track: your own functions, networks, and ready-made models."""

from opvi.targets._mixture import gaussian_mixture as gaussian_mixture
from opvi.targets._mixture import sample_mixture as sample_mixture
from opvi.targets._networks import Architecture as Architecture
from opvi.targets._networks import Gamma as Gamma
from opvi.targets._networks import Head as Head
from opvi.targets._networks import Layer as Layer
from opvi.targets._networks import bernoulli as bernoulli
from opvi.targets._networks import categorical as categorical
from opvi.targets._networks import gaussian as gaussian
from opvi.targets._networks import linear_regression as linear_regression
from opvi.targets._networks import logistic_regression as logistic_regression
from opvi.targets._networks import mlp as mlp
from opvi.targets._networks import network as network
from opvi.targets._networks import softmax_regression as softmax_regression
from opvi.targets._target import Scored as Scored
from opvi.targets._target import Target as Target
from opvi.targets._target import as_particles as as_particles
from opvi.targets._target import cast as cast
from opvi.targets._target import check_batch as check_batch
from opvi.targets._target import draw as draw
from opvi.targets._target import score as score
from opvi.targets._target import target as target
