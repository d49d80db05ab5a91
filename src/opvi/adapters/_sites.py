r"""Running a NumPyro model under handlers, and classifying its sites."""

import math
from collections.abc import Callable, Mapping, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters.partial_eval import dce_jaxpr

from opvi.running._rows import row_count
from opvi.types import Array, Data, Key, Params

try:
    import numpyro
    from numpyro import distributions as dist
    from numpyro import handlers
    from numpyro.primitives import Messenger
except ImportError as error:
    raise ImportError('`opvi.from_numpyro` needs NumPyro: `pip install "opvi[numpyro]"`.') from error

START = 2.0  # where the prior cannot be drawn from, a start is uniform in ±START on the unconstrained scale
Site = dict[str, Any]  # NumPyro's record of one statement of the model
Model = Callable[..., Any]
Plates = Set[str]
AtSite = Callable[[Site], Array | None]  # the value at a site; None leaves it to the model
# What JAX raises where a model asks for the values of its data while it is compiled.
TRACED = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


# --- running a model ----------------------------------------------------------------------------


class _WholeBatch(Messenger):
    """Plates that would draw a subsample take the batch as it is."""

    def __init__(self, fn: Model, rows: int):
        super().__init__(fn)
        self.rows = rows
        self.ratio: dict[str, float] = {}  # plate -> by how much it scales its sites up, for no reason now

    def process_message(self, msg: Site) -> None:
        if msg["type"] != "plate":
            return
        size, drawn = msg["args"]
        if drawn is None or drawn == size:
            return
        if self.rows not in (size, drawn):
            raise ValueError(
                f"plate '{msg['name']}' draws {drawn} of {size}, but the model was given a batch of {self.rows} rows. "
                "Let the data plate be as long as the batch: `numpyro.plate(name, len(y))`; the stream subsamples."
            )
        msg["args"], msg["value"] = (size, self.rows), jnp.arange(self.rows)
        self.ratio[msg["name"]] = size / self.rows


class Drawn(Messenger):
    """Sites observed inside a data plate are drawn instead."""

    def __init__(self, fn: Model, plates: Plates):
        super().__init__(fn)
        self.plates = plates

    def process_message(self, msg: Site) -> None:
        """Handle a statement; NumPyro calls this for each one."""
        if msg["type"] == "sample" and msg["is_observed"] and within(msg, self.plates) and not is_factor(msg):
            msg["is_observed"], msg["value"] = False, None


def arguments(data: Data) -> list[Array]:
    """Return the arguments of a model: an array, or the parts of a tuple, nested tuples flattened."""
    parts = data if isinstance(data, tuple | list) else [data]
    return [one for part in parts for one in (part if isinstance(part, tuple | list) else [part])]


def run(model: Model, data: Data, key: Key, value: AtSite) -> tuple[dict[str, Site], dict[str, float]]:
    """Return the sites of one run, with `value` put in where it is not None, and the unneeded scales of plates."""
    whole = _WholeBatch(model, row_count(data))
    with handlers.trace() as sites:
        seeded = handlers.substitute(handlers.seed(whole, key), substitute_fn=value)
        seeded(**data) if isinstance(data, Mapping) else seeded(*arguments(data))
    return sites, whole.ratio


def _to_support(site: Site) -> Any:
    """Return the transform from unconstrained values to the site's support."""
    try:
        return dist.biject_to(site["fn"].support)
    except NotImplementedError:
        raise TypeError(
            f"site '{site['name']}' has the support {site['fn'].support}, to which NumPyro has no map from the real "
            "numbers. Write it as a transformation of a site that has one."
        ) from None


def from_unconstrained(params: Params, given: Mapping[str, Array] | None = None) -> AtSite:
    """Return a handler that puts parameters at their sites and adds the transforms' log determinants as factors.

    What is `given` is put in as it is: values of discrete sites.
    """

    def value(site: Site) -> Array | None:
        if site["type"] == "sample" and given and site["name"] in given:
            return given[site["name"]]
        if site["type"] != "sample" or site["name"] not in params:
            return None
        u, transform = params[site["name"]], _to_support(site)
        moment = site["infer"].get("_scan_current_index")  # in a scan, values of all its steps are given
        if moment is not None and jnp.ndim(u) > len(transform.inverse_shape(site["fn"].shape())):
            u = u[moment]
        theta = transform(u)
        log_det = transform.log_abs_det_jacobian(u, theta)
        keep = jnp.ndim(theta) - len(site["fn"].event_shape)  # NumPyro sums over what belongs to one event
        log_det = jnp.sum(log_det, axis=tuple(range(max(keep, 0), jnp.ndim(log_det))))
        numpyro.factor(f"_{site['name']}_log_det", log_det)
        return theta

    return value


def start(site: Site) -> Array | None:
    """Return a value for a site whose prior cannot be drawn from."""
    if site["type"] != "sample" or site["is_observed"] or not isinstance(base(site["fn"]), dist.ImproperUniform):
        return None
    transform = _to_support(site)
    shape = transform.inverse_shape(site["fn"].shape())
    return transform(jax.random.uniform(site["kwargs"]["rng_key"], shape, minval=-START, maxval=START))


def draw(model: Model, data: Data, key: Key) -> tuple[dict[str, Array], dict[str, Site]]:
    """Return unconstrained values of the latent sites, drawn from the prior, and all sites."""
    sites, _ = run(model, data, key, start)
    out = {}
    for index, (name, site) in enumerate(sites.items()):
        if is_latent(site) and not is_discrete(site):
            _refuse_unfit(site)
            u = _to_support(site).inv(site["value"])
            # A draw at the very edge of its support, where small numbers have run out, lies at infinity.
            other = jax.random.uniform(jax.random.fold_in(key, index), jnp.shape(u), minval=-START, maxval=START)
            out[name] = jnp.where(jnp.isfinite(u), u, other.astype(u.dtype))
    return out, sites


# --- what a site is -----------------------------------------------------------------------------


def base(fn: dist.Distribution) -> dist.Distribution:
    """Return a distribution without the wrappers of plates and masks."""
    while isinstance(fn, dist.ExpandedDistribution | dist.MaskedDistribution | dist.Independent):
        fn = fn.base_dist
    return fn


def is_latent(site: Site) -> bool:
    """Return whether a site is to be inferred."""
    return site["type"] == "sample" and not site["is_observed"]


def is_discrete(site: Site) -> bool:
    """Return whether a site has separate values, such as the number of a group."""
    support = site["fn"].support
    return support is not None and support.is_discrete


def is_factor(site: Site) -> bool:
    """Return whether a site is a `numpyro.factor`."""
    return isinstance(base(site["fn"]), dist.Unit)


def within(site: Site, plates: Plates) -> bool:
    """Return whether a site lies in one of the plates, or has one value per row without a plate."""
    return _bare(site["name"]) in plates or any(frame.name in plates for frame in site["cond_indep_stack"])


def _bare(name: str) -> str:
    """Return the stand-in plate of an observed site that needs none."""
    return f"rows of {name}"


def _in_rows(few: "_Layout", more: "_Layout") -> bool:
    """Return whether a site has one log density for each row of its first axis, with no plate to say so."""
    first = [_densities(layout.site, layout.shape)[:1] for layout in (few, more)]
    same_events = few.site["fn"].event_shape == more.site["fn"].event_shape
    return first == [(FEW,), (MORE,)] and same_events and [few.shape[:1], more.shape[:1]] == first


def _densities(site: Site, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a site's log densities; one distribution may apply to many values."""
    given = shape[: len(shape) - len(site["fn"].event_shape)]
    return np.broadcast_shapes(tuple(site["fn"].batch_shape), given)


def _refuse_unfit(site: Site) -> None:
    """Refuse latent sites that have no density."""
    name, fn = site["name"], site["fn"]
    if isinstance(base(fn), dist.Delta):
        raise TypeError(f"site '{name}' has a delta distribution: use `numpyro.deterministic('{name}', value)`.")


def refuse_discrete(site: Site) -> None:
    """Refuse discrete latent sites that all rows share."""
    if is_latent(site) and is_discrete(site):
        raise TypeError(
            f"site '{site['name']}' is latent and discrete ({type(base(site['fn'])).__name__}), but particles move "
            "along gradients. Sum it out: `dist.MixtureSameFamily`, or `jax.nn.logsumexp` over its values in a "
            "`numpyro.factor`; in a data plate, with a value for each row, it is summed out for you."
        )


FEW, MORE = 5, 7  # rows on which a model is looked at, to see what follows them


class _Layout(NamedTuple):
    """What can be inferred about a site from shapes alone."""

    site: Site
    shape: tuple[int, ...]
    plates: dict[str, int]


def layouts(model: Model, example: Data, rows: int) -> dict[str, _Layout]:
    """Return the sites of the model on `rows` rows, from shapes alone."""
    out: dict[str, _Layout] = {}

    def look(data: Data) -> None:
        _, sites = draw(model, data, jax.random.key(0))
        for name, site in sites.items():
            if site["type"] in ("param", "mutable") and jax.tree.leaves(site["value"]):
                raise TypeError(
                    f"site '{name}' is a `numpyro.{site['type']}`, but everything that is learnt needs a prior: use "
                    "`numpyro.sample`, and close over what is fixed. (`LocScaleReparam` needs a fixed `centered`.)"
                )
            if site["type"] in ("sample", "deterministic"):
                plates = {frame.name: frame.size for frame in site["cond_indep_stack"]}
                out[name] = _Layout(site, jnp.shape(site["value"]), plates)

    spec = jax.tree.map(lambda a: jax.ShapeDtypeStruct((rows, *a.shape[1:]), a.dtype), example)
    try:
        jax.eval_shape(look, spec)
    except TRACED as error:
        raise TypeError(
            "the model branches on the values of its data, which are not known when it is compiled. "
            "Sizes and choices must not depend on them: close over such numbers, e.g. how many groups there are. "
            f"({str(error).splitlines()[0]})"
        ) from error
    return out


def data_plates(few: dict[str, _Layout], more: dict[str, _Layout]) -> set[str]:
    """Return the plates whose size follows the rows, found by runs with fewer and more rows; refuse unfit models."""
    both = few.keys() & more.keys()
    follows = {name for name in few | more if name not in both or few[name][1:] != more[name][1:]}
    plates = {
        plate for name in both for plate, size in few[name].plates.items() if more[name].plates.get(plate, size) != size
    }
    sites = {name: layout.site for name, layout in (more | few).items()}
    for name, site in sites.items():
        if "_control_flow_done" in site and name in follows and not within(site, plates):
            raise ValueError(
                f"site '{name}' lies in a scan over the rows, so that what it says of a row depends on the rows before "
                "it in the batch, and the first row has none. Give what a row needs of earlier ones as columns of its "
                "own, e.g. `model(lags, y)`; or let a row be a whole series: `from_numpyro(…, series=True)`."
            )
        if is_latent(site) and name in follows and (name.endswith("_unobserved") or not within(site, plates)):
            remedy = "Put it into the data plate, where it is summed out, or give it one value for all rows."
            if name.endswith("_unobserved"):  # made by `obs_mask`
                remedy = (
                    "Instead of `obs_mask=m`, leave such rows out: "
                    f"`with numpyro.handlers.mask(mask=m): numpyro.sample('{name.removesuffix('_unobserved')}', …)`."
                )
            raise ValueError(
                f"site '{name}' is latent and follows the rows, but only latents that are the same for all rows can be "
                f"learnt from a stream. {remedy}"
            )
        if not within(site, plates):
            refuse_discrete(site)
    for name, site in sites.items():
        if site["type"] != "sample" or not site["is_observed"]:
            continue
        count = len([frame for frame in site["cond_indep_stack"] if frame.name in plates])
        if count > 1:
            raise ValueError(f"site '{name}' lies in {count} plates that follow the rows, but must lie in one.")
        if count == 0 and name in both and name in follows and _in_rows(few[name], more[name]):
            plates.add(_bare(name))
        elif count == 0 and name in follows:
            raise ValueError(
                f"site '{name}' follows the rows, but lies in no plate that does, so its log density cannot be "
                f"split by rows. Put it into a data plate: `with numpyro.plate('rows', len(y)):`. If rows depend on "
                "one another, as in a Gaussian process, let a row be a whole data set: `series=True`."
            )
    if not any(site["type"] == "sample" and site["is_observed"] and within(site, plates) for site in sites.values()):
        raise ValueError(
            "the model has no observed site inside a plate that follows the rows, so there is nothing to learn "
            f"from (its sites: {', '.join(sites) or 'none'}). Observe the batch in a data plate: "
            "`with numpyro.plate('rows', len(y)): numpyro.sample('y', …, obs=y)`."
        )
    return plates


def sources(function: Callable[[Data], dict[str, Array]], data: Data) -> dict[str, list[bool]]:
    """Return, for each named number that the function returns, which leaves of the data it is computed from."""
    names = sorted(jax.eval_shape(function, data))
    jaxpr = jax.make_jaxpr(function)(data).jaxpr
    return {name: dce_jaxpr(jaxpr, [other == name for other in names])[1] for name in names}


def named_axes(layout: _Layout) -> tuple[str, ...]:
    """Return a name for every axis of a site's value: its plate's, or the site's own with a number."""
    site, shape = layout.site, layout.shape
    names = [f"{site['name']}_dim_{i}" for i in range(len(shape))]
    batch = len(shape) - (len(site["fn"].event_shape) if site["type"] == "sample" else 0)
    for frame in site["cond_indep_stack"]:
        axis = batch + frame.dim
        if 0 <= axis < batch and shape[axis] == frame.size:
            names[axis] = frame.name
    return tuple(names)


# --- log densities ------------------------------------------------------------------------------


def log_density(site: Site, ratio: dict[str, float]) -> Array:
    """Return the log density of the site's value, one number for each member of its plates."""
    fn, value = site["fn"], site["value"]
    out = fn.log_prob(value, site["intermediates"]) if site["intermediates"] else fn.log_prob(value)
    if jnp.shape(out) != fn.batch_shape and jnp.shape(out) != jnp.shape(value)[: jnp.ndim(value) - len(fn.event_shape)]:
        raise ValueError(
            f"site '{site['name']}' has values of shape {jnp.shape(value)}, but its distribution and plates make "
            f"{tuple(fn.batch_shape)} with events of shape {tuple(fn.event_shape)}. Give both the same shape."
        )
    scale = own_scale(site, ratio)
    return out if scale is None else out * scale


def own_scale(site: Site, ratio: dict[str, float]) -> Array | float | None:
    """Return the factor of the log density without the unneeded scale of a subsampling plate; None for 1."""
    if site["scale"] is None:
        return None
    own = site["scale"] / math.prod(ratio.get(frame.name, 1.0) for frame in site["cond_indep_stack"])
    return None if isinstance(own, float) and math.isclose(own, 1.0) else own


def by_row(site: Site, values: Array, plates: Plates) -> Array:
    """Return the values summed over all but the data plate's axis."""
    axis = next((frame.dim + values.ndim for frame in site["cond_indep_stack"] if frame.name in plates), 0)
    return values.sum(tuple(i for i in range(values.ndim) if i != axis))


def total(terms: dict[str, Array]) -> Array:
    """Return the sum over sites."""
    first, *others = terms.values()
    return sum(others, start=first)
