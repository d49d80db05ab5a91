"""What a model says about y: distributions, and mixtures of them over particles."""

from opvi.predictive._counts import NegativeBinomial as NegativeBinomial
from opvi.predictive._counts import Poisson as Poisson
from opvi.predictive._distributions import Bernoulli as Bernoulli
from opvi.predictive._distributions import Categorical as Categorical
from opvi.predictive._distributions import Classes as Classes
from opvi.predictive._distributions import Distribution as Distribution
from opvi.predictive._distributions import Normal as Normal
from opvi.predictive._distributions import Numeric as Numeric
from opvi.predictive._distributions import StudentT as StudentT
from opvi.predictive._predictive import Predictive as Predictive
from opvi.predictive._predictive import Uncertainty as Uncertainty
from opvi.predictive._predictive import predict as predict
