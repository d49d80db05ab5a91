"""Dynamic regret: how far a sampler lags behind what it follows, why, and what the theory promises."""

from opvi.regret._bounds import corrected_bound as corrected_bound
from opvi.regret._bounds import lemma_bound as lemma_bound
from opvi.regret._bounds import order_bound as order_bound
from opvi.regret._bounds import printed_bound as printed_bound
from opvi.regret._bounds import tight_bound as tight_bound
from opvi.regret._costs import Cost as Cost
from opvi.regret._costs import pool as pool
from opvi.regret._costs import quadratic as quadratic
from opvi.regret._costs import smoothness as smoothness
from opvi.regret._design import Design as Design
from opvi.regret._design import design as design
from opvi.regret._design import design_table as design_table
from opvi.regret._design import slope as slope
from opvi.regret._euclidean import Noise as Noise
from opvi.regret._euclidean import Regret as Regret
from opvi.regret._euclidean import diameter as diameter
from opvi.regret._euclidean import watch as watch
from opvi.regret._euclidean import watch_noise as watch_noise
from opvi.regret._wasserstein import Tracking as Tracking
from opvi.regret._wasserstein import gaussian_kl as gaussian_kl
from opvi.regret._wasserstein import gaussian_w2 as gaussian_w2
from opvi.regret._wasserstein import sample_kl as sample_kl
from opvi.regret._wasserstein import watch_conjugate as watch_conjugate
from opvi.regret._wasserstein import watch_draws as watch_draws
