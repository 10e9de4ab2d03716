"""Panels of Grafana boards as the JSON that Grafana reads, and their queries.

In an expression, ``@`` inside of braces stands for the selection at the top of the board: ``troupe_ready{@}`` queries
the instances of ``$instance``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any

__all__ = [
    "BLUE",
    "DATASOURCE",
    "GREEN",
    "ORANGE",
    "PURPLE",
    "RED",
    "TEXT",
    "Heatmap",
    "Panel",
    "Query",
    "Stat",
    "Table",
    "TimeSeries",
    "bad_above",
]

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
"""The data source selected at the top of the board."""

GREEN, ORANGE, RED, BLUE, PURPLE, TEXT = "green", "orange", "red", "blue", "purple", "text"

Thresholds = tuple[tuple[float, str], ...]


def bad_above(warning: float, critical: float) -> Thresholds:
    """Green, then orange from ``warning`` on, then red from ``critical`` on."""
    return ((warning, ORANGE), (critical, RED))


@dataclass(frozen=True)
class Query:
    """One PromQL expression; ``legend`` names its series, with ``{{label}}`` for a label's value."""

    expr: str
    legend: str = ""

    def promql(self) -> str:
        return self.expr.replace("@", 'instance=~"$instance"')


@dataclass(frozen=True)
class Panel(ABC):
    """Properties of all panels. ``width`` is in 24ths of the board; ``unit`` is Grafana's identifier of a unit."""

    title: str
    description: str
    queries: tuple[Query, ...]
    unit: str = "short"
    width: int = 8
    height: int = 8
    minimum: float | None = 0
    maximum: float | None = None
    decimals: int | None = None
    thresholds: Thresholds = ()
    base: str = GREEN  # the colour below the first threshold

    def json(self, number: int, x: int, y: int) -> dict[str, Any]:
        """The panel with this id at this position of the grid."""
        return {
            "id": number,
            "type": self._type(),
            "title": self.title,
            "description": self.description,
            "gridPos": {"x": x, "y": y, "w": self.width, "h": self.height},
            "datasource": DATASOURCE,
            "targets": [
                {
                    "refId": letter,
                    "datasource": DATASOURCE,
                    "expr": query.promql(),
                    "legendFormat": query.legend or "__auto",
                }
                | self._target()
                for letter, query in zip(ascii_uppercase, self.queries, strict=False)
            ],
            "fieldConfig": {"defaults": self._defaults(), "overrides": self._overrides()},
            "options": self._options(),
        } | self._extra()

    def _defaults(self) -> dict[str, Any]:
        steps = [{"color": self.base, "value": None}, *({"color": c, "value": v} for v, c in self.thresholds)]
        limits = {"min": self.minimum, "max": self.maximum, "decimals": self.decimals}
        return {
            "unit": self.unit,
            "thresholds": {"mode": "absolute", "steps": steps},
            **{name: value for name, value in limits.items() if value is not None},
        }

    @abstractmethod
    def _type(self) -> str: ...

    def _target(self) -> dict[str, Any]:
        return {"range": True}

    def _overrides(self) -> list[dict[str, Any]]:
        return []

    def _options(self) -> dict[str, Any]:
        return {}

    def _extra(self) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class TimeSeries(Panel):
    """Lines over time. ``stack`` adds them up; ``bars`` suit numbers of events; ``colors`` fixes the colour of a
    legend; a threshold is a dashed line."""

    stack: bool = False
    bars: bool = False
    colors: tuple[tuple[str, str], ...] = ()
    shown: tuple[str, ...] = ("mean", "max")  # numbers beside each legend

    def _type(self) -> str:
        return "timeseries"

    def _defaults(self) -> dict[str, Any]:
        custom = {
            "drawStyle": "bars" if self.bars else "line",
            "lineInterpolation": "linear",
            "lineWidth": 1,
            "fillOpacity": 70 if self.bars else 30 if self.stack else 8,
            "showPoints": "never",
            "spanNulls": False,
            "stacking": {"mode": "normal" if self.stack else "none", "group": "A"},
            "thresholdsStyle": {"mode": "dashed" if self.thresholds else "off"},
        }
        return super()._defaults() | {"color": {"mode": "palette-classic"}, "custom": custom}

    def _overrides(self) -> list[dict[str, Any]]:
        return [
            {
                "matcher": {"id": "byName", "options": name},
                "properties": [{"id": "color", "value": {"mode": "fixed", "fixedColor": color}}],
            }
            for name, color in self.colors
        ]

    def _options(self) -> dict[str, Any]:
        legend = {"displayMode": "table", "placement": "bottom", "showLegend": True, "calcs": list(self.shown)}
        return {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}


@dataclass(frozen=True)
class Stat(Panel):
    """The current number, coloured by its thresholds. ``course`` draws its history behind it; without it the query runs
    once, for queries over the whole selected time."""

    width: int = 3
    height: int = 4
    course: bool = True

    def _type(self) -> str:
        return "stat"

    def _defaults(self) -> dict[str, Any]:
        return super()._defaults() | {"color": {"mode": "thresholds"}}

    def _target(self) -> dict[str, Any]:
        return {"instant": not self.course, "range": self.course}

    def _options(self) -> dict[str, Any]:
        return {
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "colorMode": "value",
            "graphMode": "area" if self.course else "none",
            "justifyMode": "auto",
            "textMode": "auto",
        }


@dataclass(frozen=True)
class Heatmap(Panel):
    """The buckets of a histogram over time; the query gives one series per ``le``."""

    def _type(self) -> str:
        return "heatmap"

    def _target(self) -> dict[str, Any]:
        return {"range": True, "format": "heatmap"}

    def _defaults(self) -> dict[str, Any]:
        return {"custom": {"scaleDistribution": {"type": "linear"}}}

    def _options(self) -> dict[str, Any]:
        return {
            "calculate": False,
            "cellGap": 1,
            "color": {"mode": "scheme", "scheme": "Oranges", "exponent": 0.5, "steps": 64, "reverse": False},
            "filterValues": {"le": 1e-9},
            "legend": {"show": True},
            "rowsFrame": {"layout": "auto"},
            "tooltip": {"mode": "single", "yHistogram": True},
            "yAxis": {"axisPlacement": "left", "unit": self.unit, "reverse": False},
        }


@dataclass(frozen=True)
class Table(Panel):
    """A table of current values, one line per series. Each column is one query; lines with equal labels are joined.

    ``columns`` names the value of each query and gives its unit; ``hidden`` columns are not shown. ``empty`` is the
    text without lines.
    """

    columns: tuple[tuple[str, str], ...] = ()
    hidden: tuple[str, ...] = ()
    sort_by: str = ""
    empty: str = ""
    width: int = 24

    def _type(self) -> str:
        return "table"

    def _target(self) -> dict[str, Any]:
        return {"instant": True, "range": False, "format": "table"}

    def _value(self, letter: str) -> str:
        return f"Value #{letter}" if len(self.queries) > 1 else "Value"

    def _overrides(self) -> list[dict[str, Any]]:
        return [
            {"matcher": {"id": "byName", "options": name}, "properties": [{"id": "unit", "value": unit}]}
            for name, unit in self.columns
        ]

    def _defaults(self) -> dict[str, Any]:
        empty = {"noValue": self.empty} if self.empty else {}
        return super()._defaults() | {"custom": {"align": "auto", "filterable": True}} | empty

    def _options(self) -> dict[str, Any]:
        sort = [{"displayName": self.sort_by, "desc": True}] if self.sort_by else []
        return {"showHeader": True, "cellHeight": "sm", "sortBy": sort}

    def _extra(self) -> dict[str, Any]:
        names = {self._value(letter): name for letter, (name, _) in zip(ascii_uppercase, self.columns, strict=False)}
        hide = {"Time": True} | {field: True for field, name in names.items() if name in self.hidden}
        return {
            "transformations": [
                {"id": "merge", "options": {}},
                {"id": "organize", "options": {"renameByName": names, "excludeByName": hide}},
            ]
        }
