"""PromQL expressions of the boards. ``@`` stands for the board's selection, see :mod:`.panels`."""

from __future__ import annotations

from telemetry.dashboards.panels import Query

__all__ = ["buckets", "events", "mean", "quantile", "quantiles", "rate"]

_WINDOW = "$__rate_interval"


def rate(counter: str, by: str = "", where: str = "") -> str:
    """Per second, summed over all labels but ``by``. ``where`` narrows the series: ``'error_type=""'``."""
    return f"{_sum(by)} (rate({counter}{_select(where)}[{_WINDOW}]))"


def quantile(q: float, histogram: str, by: str = "", where: str = "") -> str:
    """The ``q`` quantile (0 .. 1) of a histogram's observations in each window."""
    return f"histogram_quantile({q}, {rate(f'{histogram}_bucket', _join('le', by), where)})"


def quantiles(histogram: str, where: str = "") -> tuple[Query, ...]:
    """Median, 90th, 95th and 99th percentile."""
    return tuple(Query(quantile(q / 100, histogram, where=where), f"p{q}") for q in (50, 90, 95, 99))


def mean(histogram: str, by: str = "", where: str = "") -> str:
    """The mean of a histogram's observations in each window."""
    return f"{rate(f'{histogram}_sum', by, where)} / {rate(f'{histogram}_count', by, where)}"


def buckets(histogram: str, where: str = "") -> tuple[Query, ...]:
    """For a heatmap: observations in each bucket."""
    return (Query(f"sum by (le) (increase({histogram}_bucket{_select(where)}[{_WINDOW}]))", "{{le}}"),)


def events(counter: str, by: str = "instance", zero: str = "troupe_ready") -> str:
    """Rare events since the previous point, by ``by``: whole numbers, each event once.

    A counter with labels is absent until its first event, and ``increase`` does not see a new series with the value 1.
    So each series of ``zero`` is filled with zero, now and before. A restarted counter counts 0.
    """

    def total(offset: str) -> str:
        return f"(sum by ({by}) ({counter}{{@}}{offset}) or 0 * sum by ({by}) ({zero}{{@}}{offset}))"

    return f"clamp_min({total('')} - {total(' offset $__interval')}, 0)"


def _select(where: str) -> str:
    return "{" + _join("@", where) + "}"


def _sum(by: str) -> str:
    return f"sum by ({by})" if by else "sum"


def _join(*parts: str) -> str:
    return ", ".join(part for part in parts if part)
