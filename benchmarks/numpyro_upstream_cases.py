"""How NumPyro's example models are called, and rows in the shapes of their data."""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Model = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """An example's model: where it is, what it is called with besides its rows, and such rows."""

    file: str
    function: str
    rows: Callable[[], Any]
    call: Callable[[Model], Model] = lambda model: model
    series: bool = False  # whether all rows are one data set, whose parts depend on one another


def rng() -> np.random.Generator:
    """Return the same random numbers for every case."""
    return np.random.default_rng(0)


def floats(*shape: int, seed: int = 1) -> np.ndarray:
    """Return standard normal numbers."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def whole(high: int, *shape: int, low: int = 0, seed: int = 2) -> np.ndarray:
    """Return whole numbers from `low` to `high`, which is left out."""
    return np.random.default_rng(seed).integers(low, high, size=shape).astype(np.int32)


def players() -> Any:
    """Return at bats and hits."""
    tries = np.full(18, 45, np.int32)
    return tries, rng().binomial(tries, 0.27).astype(np.int32)


def labelled(rows: int, columns: int) -> Any:
    """Return inputs and labels of 0 and 1."""
    x = floats(rows, columns)
    return x, (x[:, 0] + floats(rows, seed=3) > 0).astype(np.int32)


def numbered(rows: int, columns: int) -> Any:
    """Return inputs and numbers."""
    x = floats(rows, columns)
    return x, (x[:, 0] - 0.5 * x[:, 1] + 0.3 * floats(rows, seed=3)).astype(np.float32)


def network() -> Any:
    """Return the inputs of a network and what it should say, a column."""
    x, y = numbered(100, 3)
    return x, y[:, None]


def captures() -> Any:
    """Return histories of 7 years, with a capture in each, and sexes."""
    seen = (rng().uniform(size=(294, 7)) < 0.4).astype(np.int32)
    seen[np.arange(294), whole(6, 294)] = 1
    return seen, whole(2, 294, seed=4)


def births() -> Any:
    """Return days with what is known about each and their numbers of births."""
    days = np.arange(365)
    x = ((days - days.mean()) / days.std()).astype(np.float32)
    flags = [(days % every == 0).astype(np.int32) for every in (90, 120, 170)]
    y = (np.sin(days / 50) + 0.3 * floats(365)).astype(np.float32)
    return x, (days % 7).astype(np.int32), days.astype(np.int32), *flags, y


def deaths() -> Any:
    """Return ages, places, years, populations and deaths; the places' regions are closed over."""
    age, place, year = whole(18, 400), whole(12, 400, seed=3), whole(10, 400, seed=4)
    people = np.full(400, 1000, np.int32)
    return age, place, year, people, rng().binomial(people, 0.02).astype(np.int32)


def admissions() -> Any:
    """Return departments, sexes, applications and admissions."""
    department, male = np.repeat(np.arange(6), 2).astype(np.int32), np.tile([1, 0], 6).astype(np.int32)
    sent = whole(900, 12, low=20)
    return department, male, sent, rng().binomial(sent, 0.4).astype(np.int32)


def angles() -> Any:
    """Return pairs of angles around two centres."""
    centres = np.array([[-1.0, 2.5], [-1.2, -0.7]])[whole(2, 200)]
    return (centres + 0.2 * floats(200, 2)).astype(np.float32)


def annotations() -> Any:
    """Return the labels that seven annotations gave to each item."""
    right = whole(4, 45)
    wrong = rng().uniform(size=(45, 7)) < 0.2
    return np.where(wrong, whole(4, 45, 7, seed=5), right[:, None]).astype(np.int32)


def series(rows: int, *columns: int) -> np.ndarray:
    """Return a walk that returns to 0."""
    noise, out = floats(rows, *columns), np.zeros((rows, *columns), np.float32)
    for t in range(2, rows):
        out[t] = 0.6 * out[t - 1] - 0.3 * out[t - 2] + noise[t]
    return out


def counts() -> Any:
    """Return four inputs with a constant, and counts with many zeros."""
    x = np.concatenate([whole(4, 250, 4).astype(np.float32) / 2, np.ones((250, 1), np.float32)], 1)
    return x, rng().poisson(1.0, 250).astype(np.int32) * whole(2, 250)


def chorales() -> Any:
    """Return sequences of chords and their lengths."""
    return whole(2, 24, 10, 5), np.full(24, 10, np.int32)


POSITIONS = np.array([0, 0, 0, 1, 2, 3, 4])
HMM = Namespace(hidden_dim=4)
HYPERS = {"expected_sparsity": 2.0, "alpha1": 3.0, "beta1": 1.0, "alpha2": 3.0, "beta2": 1.0, "alpha3": 1.0, "c": 1.0}
TOPICS = {"vocab_size": 30, "num_topics": 3, "dropout_rate": 0.2, "batch_size": None}
BIRTHS = {"w0": 1.8, "L": 2.6, "M1": 10, "M2": 10, "M3": 5}


def birthdays(model: Model) -> Model:
    """Return the model of births as a function of its rows."""

    def of_rows(x: Any, week: Any, year: Any, memorial: Any, labour: Any, thanksgiving: Any, y: Any) -> Any:
        return model(x, week, year, memorial, labour, thanksgiving, **BIRTHS, y=y)

    return of_rows


def mortality(model: Model) -> Model:
    """Return the model of deaths as a function of them: it counts ages, places and years by their values."""
    age, place, year, people, _ = deaths()
    return lambda y: model(age, place, year, np.arange(12) % 4, people, y)


def admitted(model: Model) -> Model:
    """Return the model of admissions as a function of them: it counts departments by their values."""
    department, male, sent, _ = admissions()
    return lambda y: model(department, male, sent, y)


CASES: dict[str, Case] = {
    **{
        f"annotation: {name}": Case("examples/annotation.py", name, annotations, call)
        for name, call in {
            "multinomial": lambda model: model,
            "dawid_skene": lambda model: lambda y: model(POSITIONS, y),
            "mace": lambda model: lambda y: model(POSITIONS, y),
            "hierarchical_dawid_skene": lambda model: lambda y: model(POSITIONS, y),
            "item_difficulty": lambda model: model,
            "logistic_random_effects": lambda model: lambda y: model(POSITIONS, y),
        }.items()
    },
    "ar2: ar2_scan": Case("examples/ar2.py", "ar2_scan", lambda: series(142), series=True),
    # A loop over 142 rows compiles for minutes.
    "ar2: ar2_for_loop": Case("examples/ar2.py", "ar2_for_loop", lambda: series(30), series=True),
    **{
        f"baseball: {name}": Case("examples/baseball.py", name, players)
        for name in ("fully_pooled", "not_pooled", "partially_pooled", "partially_pooled_with_logit")
    },
    "bnn": Case("examples/bnn.py", "model", network, lambda model: lambda x, y: model(x, y, 5)),
    **{
        f"capture_recapture: model_{i}": Case("examples/capture_recapture.py", f"model_{i}", captures)
        for i in range(1, 6)
    },
    "covtype": Case("examples/covtype.py", "model", lambda: labelled(400, 55)),
    "cvae": Case("examples/cvae-flax/models.py", "cvae_model", lambda: (floats(20, 14, 14), whole(2, 20, 28, 28))),
    "dais_demo": Case(
        "examples/dais_demo.py",
        "model",
        lambda: whole(2, 16),
        lambda model: lambda y: model(np.linspace(-1, 1, 16, dtype=np.float32), y),
        series=True,
    ),
    "funnel": Case("examples/funnel.py", "model", lambda: floats(1), lambda model: lambda y: model()),
    "gaussian_shells": Case(
        "examples/gaussian_shells.py",
        "model",
        lambda: floats(1),
        lambda model: lambda y: model(np.array([-3.5, 0.0]), np.array([3.5, 0.0]), 2.0, 0.1, enum=True),
    ),
    "gp": Case("examples/gp.py", "model", lambda: (floats(25), floats(25, seed=3)), series=True),
    "hmcecs": Case(
        "examples/hmcecs.py", "model", lambda: labelled(400, 28), lambda model: lambda x, y: model(x, y, None)
    ),
    "hmm": Case(
        "examples/hmm.py",
        "semi_supervised_hmm",
        lambda: (whole(3, 100), whole(10, 100), whole(10, 100, seed=3)),
        lambda model: lambda c, w, u: model(np.ones(3), np.full(10, 0.1), c, w, u),
        series=True,
    ),
    **{
        f"hmm_enum: model_{i}": Case(
            "examples/hmm_enum.py", f"model_{i}", chorales, lambda model: lambda y, n: model(y, n, HMM)
        )
        for i in (1, 2, 3, 4, 6)
    },
    "holt_winters": Case(
        "examples/holt_winters.py",
        "holt_winters",
        lambda: series(60),
        lambda model: lambda y: model(y, 10),
        series=True,
    ),
    "horseshoe_regression: normal": Case(
        "examples/horseshoe_regression.py", "model_normal_likelihood", lambda: numbered(100, 32)
    ),
    "horseshoe_regression: bernoulli": Case(
        "examples/horseshoe_regression.py", "model_bernoulli_likelihood", lambda: labelled(400, 32)
    ),
    "hsgp": Case("examples/hsgp.py", "birthdays_model", births, birthdays),
    "minipyro": Case("examples/minipyro.py", "model", lambda: floats(100) + 3),
    "mortality": Case("examples/mortality.py", "model", lambda: deaths()[-1], mortality, series=True),
    "neutra": Case("examples/neutra.py", "dual_moon_model", lambda: floats(1), lambda model: lambda y: model()),
    "ode": Case(
        "examples/ode.py",
        "model",
        lambda: np.exp(series(21, 2)) * 10,
        lambda model: lambda y: model(len(y), y),
        series=True,
    ),
    "prodlda": Case(
        "examples/prodlda.py", "model", lambda: whole(3, 40, 30), lambda model: lambda docs: model(docs, TOPICS)
    ),
    "proportion_test": Case("examples/proportion_test.py", "model", lambda: labelled(400, 3)),
    "sparse_regression": Case(
        "examples/sparse_regression.py",
        "model",
        lambda: numbered(100, 20),
        lambda model: lambda x, y: model(x, y, HYPERS),
        series=True,
    ),
    "ssbvm_mixture": Case("examples/ssbvm_mixture.py", "ss_model", angles, lambda model: lambda y: model(y, len(y), 9)),
    "stein_bnn": Case("examples/stein_bnn.py", "model", lambda: numbered(455, 13)),
    "stein_dmm": Case(
        "examples/stein_dmm.py",
        "model",
        lambda: (whole(2, 8, 10, 88), whole(2, 8, 10, 88), np.full(8, 10, np.int32)),
        lambda model: lambda y, back, n: model(y, back, n, subsample_size=len(y)),
    ),
    "stochastic_volatility": Case(
        "examples/stochastic_volatility.py", "model", lambda: 0.01 * floats(200), series=True
    ),
    "thompson_sampling": Case(
        "examples/thompson_sampling.py", "model", lambda: (floats(20), floats(20, seed=3)), series=True
    ),
    "toy_mixture": Case(
        "examples/toy_mixture_model_discrete_enumeration.py",
        "model",
        lambda: (whole(2, 200), whole(2, 200, seed=3)),
        lambda model: lambda a, c: model(None, {"A": a, "C": c}, len(a)),
    ),
    "ucbadmit": Case("examples/ucbadmit.py", "glmm", lambda: admissions()[-1], admitted, series=True),
    "vae": Case("examples/vae.py", "model", lambda: whole(2, 20, 28, 28)),
    "var2": Case("examples/var2.py", "var2_scan", lambda: series(100, 2), series=True),
    "zero_inflated_poisson": Case("examples/zero_inflated_poisson.py", "model", counts),
}
