"""Metrics for Prometheus."""

import math
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from opvi.app.learn import _scores as scoring
from opvi.app.serve._tickets import Tickets
from opvi.app.serve._writer import Published, Writer

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
ROUTES = {"/": "report", "/metrics": "metrics", "/v1/predict": "predict", "/v1/learn": "learn"}


class Requests:
    """Counts and times of requests."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter("opvi_requests", "Requests.", ["route", "status"], registry=self._registry)
        self._seconds = Histogram(
            "opvi_request_seconds", "Time of requests.", ["route"], registry=self._registry, buckets=SECONDS
        )
        self.unsound = Counter(
            "opvi_answers_not_finite",
            "Rows whose prediction was not finite, and was not sent.",
            registry=self._registry,
        )
        self._found: dict[tuple[str, int], tuple[Counter, Histogram]] = {}  # by labels, which take long to look up

    def observe(self, path: str, status: int, seconds: float) -> None:
        """Count a request."""
        route = ROUTES.get(path) or ("infer" if path.endswith("/infer") else "other")
        found = self._found.get((route, status))
        if found is None:
            found = self._requests.labels(route, str(status)), self._seconds.labels(route)
            self._found[route, status] = found
        found[0].inc()
        found[1].observe(seconds)

    def text(self) -> bytes:
        """Return the counts in the form that Prometheus reads."""
        return generate_latest(self._registry)


class Figures:
    """The metrics of a run.

    Args:
        tickets: predictions waiting for labels.
        published: returns the state that predictions are made with.
        writer: the learner; None for a read-only server.
    """

    def __init__(self, tickets: Tickets, published: Callable[[], Published], writer: Writer | None):
        self._tickets, self._published, self._writer = tickets, published, writer
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._durable = Histogram(
            "opvi_durable_seconds",
            "Time to bring a group of requests to the disk.",
            registry=self._registry,
            buckets=SECONDS,
        )

    def durable(self, seconds: float) -> None:
        """Count a group of requests written to disk."""
        self._durable.observe(seconds)

    def text(self) -> bytes:
        """Return everything in the form that Prometheus reads."""
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        """Return nothing: `collect` defines the names."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics of the learner and the tickets."""
        tickets, rows = self._tickets, self._published().rows
        yield CounterMetricFamily("opvi_rows_learnt", "Rows that the predictions know, of all sources.", rows)
        yield GaugeMetricFamily("opvi_tickets_waiting", "Predicted rows whose label has not come.", tickets.waiting)
        yield CounterMetricFamily("opvi_tickets_scored", "Predicted rows whose label came.", tickets.scored)
        yield CounterMetricFamily("opvi_tickets_given_up", "Rows whose label came too late.", tickets.given_up)
        yield CounterMetricFamily("opvi_tickets_with_interval", "Scored rows with an interval.", tickets.with_interval)
        for name, value in dict(tickets.sums).items():
            yield CounterMetricFamily(f"opvi_tickets_{name}", f"Sum over scored rows: {name}.", value)
        if self._writer is not None:
            yield from _learning(self._writer)


def _learning(writer: Writer) -> Iterator[Metric]:
    """Return the learner's metrics, without those that do not exist yet."""
    made = writer.learner
    told = scoring.summary(made.scores, made.schema.task)
    yield CounterMetricFamily("opvi_rows_rejected", "Rows that broke the schema.", made.rejected)
    yield CounterMetricFamily("opvi_rows_logged", "Rows in the log.", writer.log.rows)
    yield CounterMetricFamily("opvi_drift_alarms", "Drift alarms.", told.alarm_count)
    yield CounterMetricFamily("opvi_batches_refused", "Batches whose update was not finite.", told.refused)
    yield CounterMetricFamily("opvi_predictions_not_finite", "Rows learnt whose prediction was not.", told.unsound)
    gauges = {
        "opvi_queue_rows": ("Rows that are durable and not in the predictions yet.", float(writer.unseen)),
        "opvi_rows_per_second": ("Rows learnt per second, over the last ten.", writer.speed),
        "opvi_learning": ("1 while rows are learnt, 0 after an error.", float(not writer.failed)),
        "opvi_saved_timestamp_seconds": ("When the last checkpoint was written.", writer.saved_at),
        "opvi_loss": ("Mean negative log density of rows before they were learnt.", told.total.loss),
        "opvi_recent_loss": ("The same of the last tenth.", told.recent.loss),
        "opvi_error": ("RMSE, or share of wrong labels, of rows before they were learnt.", told.total.error),
        "opvi_recent_error": ("The same of the last tenth.", told.recent.error),
        "opvi_coverage_ratio": ("Share of rows inside the 90 % interval.", told.total.covered),
    }
    for name, (words, value) in gauges.items():
        if math.isfinite(value):
            yield GaugeMetricFamily(name, words, value)
