"""The boards, rules and compose file as they are shipped, without a server."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from telemetry.dashboards import BOARDS, FOLDER, board_file, copy_files, stale_boards, write_boards
from telemetry.dashboards.board import Board
from telemetry.metrics.engine import LABELLED
from telemetry.metrics.names import METRICS
from tests.kits.prometheus_server import MISSING, WHY, promtool
from tests.kits.waiting import PATIENCE

ROOT = FOLDER.parents[1]
UNITS = {"short", "s", "percentunit", "bytes", "ops", "reqps", "si:tok/s", "si:pages/s"}
each_board = pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)


def kept(board: Board) -> dict[str, Any]:
    """The board as Grafana reads it."""
    return dict(json.loads(board_file(board).read_text(encoding="utf-8")))


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    return [inner for panel in board["panels"] for inner in (panel, *panel.get("panels", []))]


def shown(board: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in panels(board) if panel["type"] != "row"]


def rules() -> list[dict[str, Any]]:
    files = [yaml.safe_load((FOLDER / "prometheus" / name).read_text()) for name in ("recording.yml", "alerts.yml")]
    return [rule for file in files for group in file["groups"] for rule in group["rules"]]


def expressions() -> Iterator[tuple[str, str]]:
    """Everything in PromQL, with the place where it stands."""
    for board in BOARDS:
        loaded = kept(board)
        for panel in shown(loaded):
            yield from ((f"{board.uid}: {panel['title']}", target["expr"]) for target in panel["targets"])
        for variable in loaded["templating"]["list"]:
            if variable["type"] == "query":
                yield f"{board.uid}: ${variable['name']}", variable["query"]["query"]
        for note in loaded["annotations"]["list"]:
            yield f"{board.uid}: {note['name']}", note["expr"]
    for rule in rules():
        yield rule.get("alert") or rule["record"], rule["expr"]


def test_the_json_is_what_the_descriptions_say() -> None:
    assert stale_boards() == [], "run: python -m telemetry.dashboards"


def test_a_changed_and_a_left_over_board_are_stale(tmp_path: Path) -> None:
    copy_files(tmp_path)
    assert stale_boards(tmp_path) == []
    changed, extra = tmp_path / "grafana/boards/cache.json", tmp_path / "grafana/boards/other.json"
    changed.write_text("{}")
    extra.write_text("{}")
    assert stale_boards(tmp_path) == [changed, extra]
    write_boards(tmp_path)
    assert stale_boards(tmp_path) == []


def test_the_command_checks_and_writes_nothing_then() -> None:
    command = [sys.executable, "-m", "telemetry.dashboards", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=PATIENCE, check=False)
    assert (done.returncode, done.stdout) == (0, b"")


def test_every_metric_requested_is_one_that_an_engine_has() -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    queried = set()
    for place, expr in expressions():
        for name in re.findall(r"[a-zA-Z_:][a-zA-Z0-9_:]*", expr):
            if (
                name in recorded
                or not re.match(r"\w*:?(troupe|gen_ai)_\w+", name)
                or name.startswith("gen_ai_request_")
            ):
                continue
            plain = re.sub(r"_(bucket|sum|count)$", "", name)
            known = name in METRICS or (plain in METRICS and METRICS[plain].kind == "histogram")
            assert known or name in {label for spec in METRICS.values() for label in spec.labels}, f"{place}: {name}"
            assert name not in METRICS or METRICS[name].kind != "histogram", f"{place}: {name} wants _bucket"
            queried.add(plain if plain in METRICS else name)
    assert len(queried) > 50


def test_labels_in_braces_are_labels_of_their_metric() -> None:
    for place, expr in expressions():
        for name, inside in re.findall(r"((?:troupe|gen_ai)_\w+)\{([^}]*)\}", expr):
            plain = name if name in METRICS else re.sub(r"_(bucket|sum|count)$", "", name)
            labels = {"instance", "le", *METRICS[plain].labels}
            if plain in LABELLED:
                labels.add("adapter")
            assert set(re.findall(r"(\w+)\s*(?:=|!)", inside)) <= labels, f"{place}: {name}{{{inside}}}"


@each_board
def test_panels_have_what_a_reader_needs(board: Board) -> None:
    loaded = kept(board)
    assert re.fullmatch(r"troupe-[a-z]+", loaded["uid"])
    numbers = [panel["id"] for panel in panels(loaded)]
    assert len(numbers) == len(set(numbers))
    titles = [panel["title"] for panel in shown(loaded)]
    assert sorted(titles) == sorted(set(titles))
    for panel in shown(loaded):
        assert panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        assert panel["targets"], panel["title"]
        assert panel["fieldConfig"]["defaults"].get("unit", "short") in UNITS, panel["title"]
        letters = [target["refId"] for target in panel["targets"]]
        assert len(letters) == len(set(letters))
        legends = [target["legendFormat"] for target in panel["targets"]]
        if panel["type"] == "timeseries":
            assert len(legends) == len(set(legends)), panel["title"]
            assert "__auto" not in legends, panel["title"]


@each_board
def test_every_query_follows_the_chosen_data_source_and_instances(board: Board) -> None:
    loaded = kept(board)
    variables = {variable["name"]: variable for variable in loaded["templating"]["list"]}
    assert {"datasource", "model", "instance"} <= variables.keys()
    assert "$model" in variables["instance"]["query"]["query"]
    for panel in shown(loaded):
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${datasource}"
            selectors = re.findall(r"\{([^}]*)\}", target["expr"])
            assert selectors
            assert all('instance=~"$instance"' in inside for inside in selectors), target["expr"]
            used = set(re.findall(r"\$\{?(\w+)", target["expr"]))
            builtin = {"__rate_interval", "__interval", "__range"}
            assert used <= builtin | variables.keys(), target["expr"]


@each_board
def test_panels_lie_side_by_side(board: Board) -> None:
    places = [panel["gridPos"] for panel in panels(kept(board))]
    for y in {place["y"] for place in places}:
        assert sum(place["w"] for place in places if place["y"] == y) == 24  # no gap at the end
    for a, b in itertools.combinations(places, 2):
        apart = (
            a["x"] + a["w"] <= b["x"]
            or b["x"] + b["w"] <= a["x"]
            or a["y"] + a["h"] <= b["y"]
            or b["y"] + b["h"] <= a["y"]
        )
        assert apart, (a, b)


@pytest.mark.skipif(bool(MISSING), reason=WHY)
def test_prometheus_takes_the_configuration_and_the_rules() -> None:
    folder = FOLDER / "prometheus"
    assert "SUCCESS" in promtool("check", "config", str(folder / "prometheus.yml"))
    promtool("check", "rules", "--lint=all", "--lint-fatal", str(folder / "recording.yml"), str(folder / "alerts.yml"))


def test_alerts_have_a_severity_and_a_remedy() -> None:
    for rule in rules():
        if "alert" in rule:
            assert rule["labels"]["severity"] in {"warning", "critical"}, rule["alert"]
            assert {"summary", "description"} == rule["annotations"].keys(), rule["alert"]
            assert "$labels.instance" in rule["annotations"]["summary"], rule["alert"]


def compose() -> dict[str, Any]:
    return dict(yaml.safe_load((FOLDER / "compose.yaml").read_text()))


def test_compose_pins_images_mounts_existing_files_and_binds_loopback() -> None:
    loaded = compose()
    assert set(loaded["services"]) == {"prometheus", "grafana", "jaeger", "collector"}
    for name, service in loaded["services"].items():
        assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+", service["image"]), name
        for mount in service.get("volumes", ()):
            source, target, *mode = mount.split(":")
            if source.startswith("."):
                assert (FOLDER / source).exists(), mount
                assert mode == ["ro"], mount
            else:
                assert source in loaded["volumes"], mount
            assert target.startswith("/")
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), port
        for other in service.get("depends_on", ()):
            assert other in loaded["services"]
    published = {port.split(":")[1] for service in loaded["services"].values() for port in service["ports"]}
    assert published == {"3000", "4317", "4318", "9090", "16686"}


def test_grafana_is_provisioned_with_the_services_of_the_compose_file() -> None:
    loaded = compose()
    mounts = dict(mount.split(":")[:2] for mount in loaded["services"]["grafana"]["volumes"])
    provisioning = FOLDER / "grafana/provisioning"
    sources = yaml.safe_load((provisioning / "datasources/troupe.yaml").read_text())["datasources"]
    urls = {source["type"]: source["url"] for source in sources}
    assert urls == {"prometheus": "http://prometheus:9090", "jaeger": "http://jaeger:16686"}
    [provider] = yaml.safe_load((provisioning / "dashboards/troupe.yaml").read_text())["providers"]
    assert provider["options"]["path"] == mounts["./grafana/boards"]
    home = loaded["services"]["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (FOLDER / "grafana/boards" / Path(home).name).exists()
    assert Path(home).parent == Path(mounts["./grafana/boards"])


def test_the_collector_takes_both_protocols_and_hands_traces_to_jaeger() -> None:
    loaded = yaml.safe_load((FOLDER / "collector.yaml").read_text())
    protocols = loaded["receivers"]["otlp"]["protocols"]
    assert {name: protocol["endpoint"] for name, protocol in protocols.items()} == {
        "grpc": "0.0.0.0:4317",
        "http": "0.0.0.0:4318",
    }
    traces = loaded["service"]["pipelines"]["traces"]
    for kind in ("receivers", "processors", "exporters"):
        assert set(traces[kind]) == loaded[kind].keys()
    assert loaded["exporters"]["otlp/jaeger"]["endpoint"] == "jaeger:4317"
    command = compose()["services"]["collector"]["command"]
    mounts = dict(mount.split(":")[:2] for mount in compose()["services"]["collector"]["volumes"])
    assert command == [f"--config={mounts['./collector.yaml']}"]


def test_files_are_copied_out_whole_and_no_changes_are_overwritten(tmp_path: Path) -> None:
    copied = copy_files(tmp_path / "new" / "place")
    names = {str(path.relative_to(tmp_path / "new" / "place")) for path in copied}
    assert {"compose.yaml", "collector.yaml", "prometheus/alerts.yml", "grafana/boards/overview.json"} <= names
    assert not any(name.endswith(".py") for name in names)
    (tmp_path / "new/place/compose.yaml").write_text("mine")
    with pytest.raises(FileExistsError, match=r"compose\.yaml exists already"):
        copy_files(tmp_path / "new" / "place")
    assert (tmp_path / "new/place/compose.yaml").read_text() == "mine"


def test_everything_is_part_of_the_package(tmp_path: Path) -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    packed = {path for pattern in settings["package-data"]["telemetry"] for path in FOLDER.parent.glob(pattern)}
    for path in copy_files(tmp_path):
        assert FOLDER / path.relative_to(tmp_path) in packed, path
