"""Posteriors to track: your own functions, networks, and ready-made models."""

from opvi.targets.base import Scored as Scored
from opvi.targets.base import Target as Target
from opvi.targets.base import as_particles as as_particles
from opvi.targets.base import cast as cast
from opvi.targets.base import check_batch as check_batch
from opvi.targets.base import draw as draw
from opvi.targets.base import score as score
from opvi.targets.base import target as target
from opvi.targets.mixture import gaussian_mixture as gaussian_mixture
from opvi.targets.mixture import sample_mixture as sample_mixture
from opvi.targets.networks import Architecture as Architecture
from opvi.targets.networks import Gamma as Gamma
from opvi.targets.networks import Head as Head
from opvi.targets.networks import Layer as Layer
from opvi.targets.networks import bernoulli as bernoulli
from opvi.targets.networks import categorical as categorical
from opvi.targets.networks import gaussian as gaussian
from opvi.targets.networks import linear_regression as linear_regression
from opvi.targets.networks import logistic_regression as logistic_regression
from opvi.targets.networks import mlp as mlp
from opvi.targets.networks import network as network
from opvi.targets.networks import softmax_regression as softmax_regression
