"""Dynamic regret: how far a sampler is behind what it follows, why, and what the theory promises."""

from opvi.regret.bounds import corrected_bound as corrected_bound
from opvi.regret.bounds import lemma_bound as lemma_bound
from opvi.regret.bounds import order_bound as order_bound
from opvi.regret.bounds import printed_bound as printed_bound
from opvi.regret.bounds import tight_bound as tight_bound
from opvi.regret.costs import Cost as Cost
from opvi.regret.costs import pool as pool
from opvi.regret.costs import quadratic as quadratic
from opvi.regret.costs import smoothness as smoothness
from opvi.regret.design import Design as Design
from opvi.regret.design import design as design
from opvi.regret.design import design_table as design_table
from opvi.regret.design import draw_designs as draw_designs
from opvi.regret.design import slope as slope
from opvi.regret.euclidean import Noise as Noise
from opvi.regret.euclidean import Regret as Regret
from opvi.regret.euclidean import diameter as diameter
from opvi.regret.euclidean import watch as watch
from opvi.regret.euclidean import watch_noise as watch_noise
from opvi.regret.wasserstein import Tracking as Tracking
from opvi.regret.wasserstein import gaussian_kl as gaussian_kl
from opvi.regret.wasserstein import gaussian_w2 as gaussian_w2
from opvi.regret.wasserstein import sample_kl as sample_kl
from opvi.regret.wasserstein import watch_conjugate as watch_conjugate
from opvi.regret.wasserstein import watch_draws as watch_draws
