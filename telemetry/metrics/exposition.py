"""Numbers in the form that Prometheus scrapes. Nothing here runs between two scrapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from telemetry.metrics.histogram import Histogram
from telemetry.metrics.names import MetricSpec

__all__ = ["Exposition", "Readings", "Samples"]

Samples: TypeAlias = float | Histogram | Mapping[Any, float | Histogram]
"""The value of a metric without labels, or values by tuples of label values."""

Readings: TypeAlias = Callable[[], Mapping[str, Samples]]
"""Returns the samples of metrics by name at a scrape. It may be called in another thread than the loop's."""


class Exposition(Collector):
    """The metrics of ``specs`` in their order, with the samples of ``sources``. Metrics without a source are omitted.

    ``constant``: labels with a fixed value, before each metric's own labels.
    """

    def __init__(
        self, specs: Iterable[MetricSpec], sources: Iterable[Readings], constant: Mapping[str, str] | None = None
    ) -> None:
        self._specs = tuple(specs)
        self._sources = tuple(sources)
        self._constant = dict(constant or {})

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        result: dict[str, Samples] = {}
        for source in self._sources:
            result.update(source())
        for spec in self._specs:
            if spec.name in result:
                yield self._family(spec, result[spec.name])

    def _family(self, spec: MetricSpec, samples: Samples) -> Metric:
        labels = (*self._constant, *spec.labels)
        before = tuple(self._constant.values())
        # copied at once: the loop may add a label value meanwhile
        by_labels = list(samples.items()) if isinstance(samples, Mapping) else [((), samples)]
        if spec.kind == "histogram":
            histogram = HistogramMetricFamily(spec.name, spec.help, labels=labels)
            for values, measured in by_labels:
                if isinstance(measured, Histogram):
                    histogram.add_metric((*before, *values), measured.cumulative(), measured.total)
            return histogram
        family: CounterMetricFamily | GaugeMetricFamily
        if spec.kind == "counter":
            family = CounterMetricFamily(spec.name.removesuffix("_total"), spec.help, labels=labels)
        else:
            family = GaugeMetricFamily(spec.name, spec.help, labels=labels)
        for values, value in by_labels:
            if not isinstance(value, Histogram):
                family.add_metric((*before, *values), value)
        return family
