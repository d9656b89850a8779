"""Grafana dashboards and Prometheus alert rules as data, made from the list of metrics.

The folders are laid out as Ray's own: `grafana/dashboards` for Grafana's file provider,
`grafana/provisioning` for a Grafana that does not run with Ray's, `prometheus` for the rules.
"""

from __future__ import annotations

import json
import re
from typing import Any

import yaml

from adaptive_platform.report.boards import ALERTS, COMPARE, ELASTICITY, RUN, SWEEP, Panel
from adaptive_platform.report.metrics import metric

__all__ = ["alert_rules", "dashboard_files", "dashboards", "queries"]

_REFRESH = "5s"
_SELECTOR = re.compile(r"\b(?P<name>[a-z_]+)(?P<part>:bucket|:sum|:count)?@")


def dashboards() -> dict[str, dict[str, Any]]:
    """Grafana's JSON of every dashboard by file name."""
    one = 'run=~"$run"'
    swept = 'sweep=~"$sweep", sweep!=""'
    made = (
        ("run", "Adaptive Platform: Run", RUN, one, _variable("run", many=False)),
        ("compare", "Adaptive Platform: Compare runs", COMPARE, one, _variable("run", many=True)),
        (
            "elasticity",
            "Adaptive Platform: Elasticity and faults",
            ELASTICITY,
            one,
            _variable("run", many=True),
        ),
        ("sweep", "Adaptive Platform: Sweep", SWEEP, swept, _variable("sweep", many=True)),
    )
    return {
        f"adaptive_platform_{name}.json": _dashboard(name, title, panels, selector, variable)
        for name, title, panels, selector, variable in made
    }


def queries(board: dict[str, Any]) -> list[str]:
    """PromQL of every panel of a dashboard."""
    return [target["expr"] for panel in board["panels"] for target in panel["targets"]]


def alert_rules() -> dict[str, Any]:
    """Content of the rules file for Prometheus."""
    rules = [
        {
            "alert": name,
            "expr": _expanded(expression, ""),
            "for": lasting,
            "labels": {"severity": severity},
            "annotations": {"summary": summary, "description": description},
        }
        for name, expression, lasting, severity, summary, description in ALERTS
    ]
    return {"groups": [{"name": "adaptive-platform", "rules": rules}]}


def dashboard_files() -> dict[str, str]:
    """Every file of `dashboards/` by its path there."""
    files = {
        f"grafana/dashboards/{name}": json.dumps(board, indent=1) + "\n"
        for name, board in dashboards().items()
    }
    provider = {
        "apiVersion": 1,
        "providers": [
            {
                "name": "Adaptive Platform",
                "folder": "Adaptive Platform",
                "type": "file",
                "options": {"path": "/etc/grafana/dashboards/adaptive-platform"},
            }
        ],
    }
    files["grafana/provisioning/dashboards/adaptive_platform.yml"] = yaml.safe_dump(
        provider, sort_keys=False
    )
    files["prometheus/adaptive_platform.rules.yml"] = yaml.safe_dump(
        alert_rules(), sort_keys=False, width=100
    )
    return files


def _expanded(query: str, selector: str) -> str:
    """The query with real names; unknown short names are a KeyError."""

    def replaced(match: re.Match[str]) -> str:
        part = (match["part"] or "").replace(":", "_")
        return metric(match["name"]).full_name + part + (f"{{{selector}}}" if selector else "")

    return _SELECTOR.sub(replaced, query)


def _variable(label: str, *, many: bool) -> dict[str, Any]:
    """A choice of runs, or sweeps, among those with live gauges."""
    source = f"label_values({metric('progress').full_name}, {label})"
    return {
        "name": label,
        "label": label.capitalize(),
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "query": {"query": source, "refId": "variable"},
        "definition": source,
        "refresh": 2,
        "sort": 2,
        "multi": many,
        "includeAll": many,
        **({"allValue": ".*"} if many else {}),
    }


def _dashboard(
    name: str,
    title: str,
    panels: tuple[Panel, ...],
    selector: str,
    variable: dict[str, Any],
) -> dict[str, Any]:
    source = {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "refresh": 1,
    }
    small = [panel for panel in panels if panel.kind != "timeseries"]
    large = [panel for panel in panels if panel.kind == "timeseries"]
    drawn: list[dict[str, Any]] = []
    top, width = 0, 24 // max(len(small), 1)
    for at, panel in enumerate(small):
        place = {"x": width * at, "y": 0, "w": width, "h": 5}
        drawn.append(_panel(len(drawn) + 1, panel, selector, place))
        top = 5
    for at, panel in enumerate(large):
        place = {"x": 12 * (at % 2), "y": top + 8 * (at // 2), "w": 12, "h": 8}
        drawn.append(_panel(len(drawn) + 1, panel, selector, place))
    return {
        "uid": f"adaptive-{name}",
        "title": title,
        "tags": ["adaptive-platform", "ray"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "timezone": "browser",
        "refresh": _REFRESH,
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [source, variable]},
        "panels": drawn,
    }


def _panel(number: int, panel: Panel, selector: str, place: dict[str, int]) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    defaults: dict[str, Any] = {"unit": panel.unit}
    if panel.kind == "gauge":
        defaults |= {"min": 0, "max": 1}
    if panel.kind == "timeseries":
        scale = {"type": "log", "log": 10} if panel.log else {"type": "linear"}
        defaults["custom"] = {"lineWidth": 2, "showPoints": "never", "scaleDistribution": scale}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.note,
        "datasource": source,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + at),
                "datasource": source,
                "expr": _expanded(query, selector),
                "legendFormat": legend,
            }
            for at, (query, legend) in enumerate(panel.queries)
        ],
    }
