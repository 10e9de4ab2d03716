"""Grafana boards, described in Python and written as the JSON that Grafana reads (dashboard model, schema version 39).

Every panel queries the instances of ``$instance``, which lists those that serve ``$model``: a board works for one
server and for a fleet with many models.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from telemetry.dashboards.panels import DATASOURCE, RED, Panel, Query
from telemetry.dashboards.promql import events

__all__ = ["Board", "Row", "Variable"]

_WIDTH = 24


@dataclass(frozen=True)
class Row:
    """A titled group of panels, laid out from left to right."""

    title: str
    panels: tuple[Panel, ...]
    collapsed: bool = False


@dataclass(frozen=True)
class Variable:
    """A variable at the top of a board: the values of a label, by default all."""

    name: str
    label: str
    query: str

    def json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "label": self.label,
            "type": "query",
            "datasource": DATASOURCE,
            "definition": self.query,
            "query": {"qryType": 1, "query": self.query, "refId": "PrometheusVariableQueryEditor-VariableQuery"},
            "refresh": 2,
            "sort": 1,
            "multi": True,
            "includeAll": True,
            "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
            "options": [],
        }


MODEL = Variable("model", "Model", "label_values(troupe_model_info, model)")
INSTANCE = Variable("instance", "Instance", 'label_values(troupe_model_info{model=~"$model"}, instance)')


@dataclass(frozen=True)
class Board:
    """A dashboard. ``uid`` never changes: links and bookmarks contain it."""

    uid: str
    title: str
    description: str
    rows: tuple[Row, ...]
    variables: tuple[Variable, ...] = field(default=())

    def panels(self) -> list[Panel]:
        return [panel for row in self.rows for panel in row.panels]

    def json(self) -> dict[str, Any]:
        """Grafana's model of the board, as it can be imported or provisioned."""
        return {
            "uid": self.uid,
            "title": self.title,
            "description": self.description,
            "tags": ["troupe"],
            "schemaVersion": 39,
            "version": 1,
            "editable": True,
            "graphTooltip": 1,
            "refresh": "10s",
            "time": {"from": "now-30m", "to": "now"},
            "timezone": "browser",
            "links": [
                {
                    "title": "Troupe",
                    "type": "dashboards",
                    "tags": ["troupe"],
                    "asDropdown": False,
                    "includeVars": True,
                    "keepTime": True,
                    "targetBlank": False,
                    "icon": "external link",
                    "url": "",
                    "tooltip": "",
                }
            ],
            "annotations": {"list": [self._restarts()]},
            "templating": {"list": [self._datasource(), *(v.json() for v in (MODEL, INSTANCE, *self.variables))]},
            "panels": self._panels(),
        }

    def _panels(self) -> list[dict[str, Any]]:
        placed: list[dict[str, Any]] = []
        number = y = 0
        for row in self.rows:
            number += 1
            head: dict[str, Any] = {
                "id": number,
                "type": "row",
                "title": row.title,
                "collapsed": row.collapsed,
                "gridPos": {"x": 0, "y": y, "w": _WIDTH, "h": 1},
                "panels": [],
            }
            placed.append(head)
            y += 1
            x = tallest = 0
            inside: list[dict[str, Any]] = []
            for panel in row.panels:
                if x + panel.width > _WIDTH:
                    x, y, tallest = 0, y + tallest, 0
                number += 1
                inside.append(panel.json(number, x, y))
                x += panel.width
                tallest = max(tallest, panel.height)
            y += tallest
            if row.collapsed:
                head["panels"] = inside  # Grafana stores the panels of a folded row inside of it
            else:
                placed += inside
        return placed

    @staticmethod
    def _datasource() -> dict[str, Any]:
        return {
            "name": "datasource",
            "label": "Data source",
            "type": "datasource",
            "query": "prometheus",
            "refresh": 1,
            "multi": False,
            "includeAll": False,
            "current": {},
            "options": [],
        }

    @staticmethod
    def _restarts() -> dict[str, Any]:
        restarts = f"{events('troupe_restarts_total', 'instance, actor', 'troupe_actor_up')} > 0"
        return {
            "name": "Restarts",
            "datasource": DATASOURCE,
            "enable": True,
            "hide": False,
            "iconColor": RED,
            "expr": Query(restarts).promql(),
            "step": "15s",
            "titleFormat": "{{actor}} restarted",
            "textFormat": "{{instance}}",
        }
