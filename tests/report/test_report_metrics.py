"""The list of metrics, and dashboards and alerts that are made from it."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest
from report_examples import step_record

from adaptive_platform.report.dashboards import (
    alert_rules,
    dashboard_files,
    dashboards,
    queries,
)
from adaptive_platform.report.metrics import METRICS, metric, step_gauges

COMMITTED = Path(__file__).parents[2] / "dashboards"


def test_names_are_prometheus_names_and_unique():
    names = [each.full_name for each in METRICS]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"ray_adaptive_[a-z_]+", name) for name in names)
    assert all(each.help.endswith(".") for each in METRICS)
    assert metric("steps").full_name == "ray_adaptive_steps_total"


def test_a_step_feeds_every_gauge_that_has_a_column():
    fields = asdict(
        step_record(
            3, noise_scale=80.0, gsnr=0.5, accuracy=0.75, efficiency=0.5, data_seconds=0.02,
            reduce_seconds=0.1, statistics_seconds=0.1,
        )
    )  # fmt: skip
    found = step_gauges(fields)
    assert set(found) == {each.name for each in METRICS if each.value is not None}
    assert found["learning_rate"] == 0.1
    assert found["goodput"] == 50.0  # 100 samples a second at an efficiency of a half
    assert found["grad_norm"] == pytest.approx(math.sqrt(0.5))
    assert found["compute_seconds"] == pytest.approx(0.1)


def test_gaps_are_left_out_but_a_loss_that_is_not_finite_is_told():
    found = step_gauges(asdict(step_record(3, loss=math.nan, grad_sqnorm=math.inf)))
    assert math.isnan(found["train_loss"])
    assert not {"noise_scale", "gsnr", "train_accuracy", "grad_norm"} & set(found)


def test_committed_files_are_what_the_list_gives():
    wanted = dashboard_files()
    there = {
        str(path.relative_to(COMMITTED)): path.read_text()
        for path in COMMITTED.rglob("*")
        if path.is_file()
    }
    assert there == wanted, "run `adaptive-platform dashboards`"


def test_every_metric_is_on_some_panel_or_in_an_alert():
    shown = " ".join(query for board in dashboards().values() for query in queries(board))
    unseen = [each.name for each in METRICS if each.full_name not in shown]
    assert unseen == []


@pytest.mark.parametrize("name", sorted(dashboards()))
def test_a_dashboard_is_one_that_grafana_loads(name):
    board = dashboards()[name]
    assert json.loads(json.dumps(board)) == board
    assert board["uid"] == "adaptive-" + name.removeprefix("adaptive_platform_").split(".")[0]
    known = {each.full_name for each in METRICS}
    suffixed = {f"{full}_bucket" for full in known}
    places = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        places.add((place["x"], place["y"]))
        for target in panel["targets"]:
            names = set(re.findall(r"ray_adaptive_[a-z_]+", target["expr"]))
            assert names
            assert names <= known | suffixed
            assert "@" not in target["expr"]
    assert len(places) == len(board["panels"])
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    assert {v["name"] for v in board["templating"]["list"]} >= {"datasource"}


def test_alerts_name_known_metrics_and_say_what_to_do():
    rules = alert_rules()["groups"][0]["rules"]
    assert {rule["alert"] for rule in rules} >= {
        "AdaptiveRunNoProgress",
        "AdaptiveRunLossNotFinite",
        "AdaptiveRunEfficiencyLow",
        "AdaptiveRunRecoveryLoop",
        "AdaptiveRunSlowWorker",
    }
    known = {each.full_name for each in METRICS}
    for rule in rules:
        assert set(re.findall(r"ray_adaptive_[a-z_]+", rule["expr"])) <= known
        assert "{{ $labels.run }}" in rule["annotations"]["summary"]
        assert rule["annotations"]["description"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Debian: prometheus)")
def test_promtool_accepts_the_rules():
    rules = COMMITTED / "prometheus" / "adaptive_platform.rules.yml"
    result = subprocess.run(
        ["promtool", "check", "rules", str(rules)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "5 rules found" in result.stdout


def lost(given, kept, where: str = "") -> list[str]:
    """What of a JSON value did not come back."""
    if isinstance(given, dict) and isinstance(kept, dict):
        return [
            told
            for name, value in given.items()
            for told in (
                lost(value, kept[name], f"{where}.{name}") if name in kept else [f"{where}.{name}"]
            )
        ]
    if isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        pairs = enumerate(zip(given, kept, strict=True))
        return [told for at, pair in pairs for told in lost(*pair, f"{where}[{at}]")]
    return [] if given == kept else [f"{where} = {given}, came back as {kept}"]


def through_grafanas_models(board: dict) -> dict:
    """A dashboard read and written by the SDK that Grafana makes from its own schema."""
    plugins = pytest.importorskip(
        "grafana_foundation_sdk.cog.plugins", reason="grafana-foundation-sdk is not installed"
    )
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models.dashboard import Dashboard

    plugins.register_default_plugins()
    return json.loads(JSONEncoder().encode(Dashboard.from_json(board)))


@pytest.mark.parametrize("name", sorted(dashboards()))
def test_grafanas_own_models_know_every_field(name):
    board = dashboards()[name]
    # The text that Grafana's editor shows of a variable's query; it is in no schema.
    expected = [".templating.list[1].definition"]
    assert lost(board, through_grafanas_models(board)) == expected


def test_a_field_that_grafana_does_not_know_is_noticed():
    board = next(iter(dashboards().values()))
    panel = next(each for each in board["panels"] if each["type"] == "timeseries")
    panel["fieldConfig"]["defaults"]["custom"]["lineWdith"] = 2
    panel["gridpos"] = {}
    panel["targets"][0]["legend"] = ""
    told = " ".join(lost(board, through_grafanas_models(board)))
    assert all(name in told for name in ("lineWdith", "gridpos", "targets[0].legend"))
