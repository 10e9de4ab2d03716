"""Each alert on made-up series, by promtool: it fires when it should, and keeps still on a healthy server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from telemetry.dashboards import FOLDER
from tests.kits.prometheus_server import MISSING, WHY, promtool

pytestmark = pytest.mark.skipif(bool(MISSING), reason=WHY)

_RULES = FOLDER / "prometheus"
_STEPS = 160  # of 15 s: 40 minutes


def steady(value: float) -> str:
    return f"{value}+0x{_STEPS}"


def growing(by: float) -> str:
    """A counter that grows by this much in every 15 s."""
    return f"0+{by}x{_STEPS}"


def born(at: int, value: float = 1) -> str:
    """A series that does not exist before step ``at`` and stays at ``value`` from then on."""
    return f"_x{at} {value}+0x{_STEPS - at}"


def histogram(name: str, labels: str, fast: float, slow: float, limit: float) -> dict[str, str]:
    """Observations in every 15 s: ``fast`` ones below the limit and ``slow`` ones in the bucket above it."""
    return {
        f'{name}_bucket{{{labels}, le="{limit}"}}': growing(fast),
        f'{name}_bucket{{{labels}, le="{limit * 4}"}}': growing(fast + slow),
        f'{name}_bucket{{{labels}, le="+Inf"}}': growing(fast + slow),
    }


_A = 'instance="a:8000"'
_TTFT = "gen_ai_server_time_to_first_token_seconds"
_WORKER = f'{_A}, actor="worker-0"'

HEALTHY: dict[str, str] = {
    f'up{{{_A}, job="troupe"}}': steady(1),
    f"troupe_ready{{{_A}}}": steady(1),
    f"troupe_step_age_seconds{{{_A}}}": steady(0.02),
    f"troupe_actor_up{{{_WORKER}}}": steady(1),
    f"troupe_heartbeat_age_seconds{{{_WORKER}}}": steady(0.5),
    f"troupe_requests_waiting{{{_A}}}": steady(3),
    f"troupe_preemptions_total{{{_A}}}": steady(4),
    f"troupe_requests_quarantined_total{{{_A}}}": steady(1),
    f'troupe_requests_total{{{_A}, finish_reason="stop"}}': growing(100),
    f'troupe_requests_total{{{_A}, finish_reason="rejected"}}': growing(10),
    f'troupe_requests_total{{{_A}, finish_reason="error"}}': growing(1),
    f'troupe_dead_letters_total{{{_A}, actor="scheduler", message="StepDone", reason="dead"}}': born(100, 3),
    f'troupe_trace_spans_total{{{_A}, outcome="exported"}}': growing(300),
    f'troupe_trace_spans_total{{{_A}, outcome="dropped"}}': steady(2),
    **histogram(_TTFT, f'{_A}, gen_ai_request_model="m"', 100, 1, 10),
    **histogram("troupe_inter_token_latency_seconds", _A, 1000, 3, 0.5),
    **histogram("troupe_request_queue_seconds", _A, 100, 1, 5),
    **histogram("troupe_loop_lag_seconds", _A, 300, 0, 0.25),
    **histogram("troupe_mailbox_wait_seconds", f'{_WORKER}, message="Step"', 300, 0, 1),
}
"""Busy, with a fault here and there."""


@dataclass(frozen=True)
class Case:
    """An alert, what differs from the healthy server, a minute at which it fires, and one at which not yet."""

    alert: str
    series: dict[str, str]
    fires_at: int = 30
    still_at: int | None = None


CASES = (
    Case("TroupeDown", {f'up{{{_A}, job="troupe"}}': steady(0)}, fires_at=2, still_at=0),
    Case("TroupeNotReady", {f"troupe_ready{{{_A}}}": steady(0)}, fires_at=11, still_at=9),
    Case("TroupeStepStalled", {f"troupe_step_age_seconds{{{_A}}}": growing(15)}, fires_at=3, still_at=1),
    Case("TroupeActorDown", {f"troupe_actor_up{{{_WORKER}}}": steady(0)}, fires_at=3, still_at=1),
    Case("TroupeActorStalled", {f"troupe_heartbeat_age_seconds{{{_WORKER}}}": growing(15)}, fires_at=3, still_at=2),
    Case(
        "TroupeActorRestarted",
        {f'troupe_restarts_total{{{_WORKER}, cause="ActorDied"}}': born(100)},
        fires_at=26,
        still_at=24,
    ),
    Case(
        "TroupeRestartLoop",
        {f'troupe_restarts_total{{{_WORKER}, cause="ActorDied"}}': "_x100 1 1 1 1 2 2 2 2 3 3 3 3 4+0x40"},
        fires_at=29,
        still_at=26,
    ),
    Case("TroupeRequestQuarantined", {f"troupe_requests_quarantined_total{{{_A}}}": "1+0x100 2+0x60"}, 27, 24),
    Case("TroupeRequestsFailing", {f'troupe_requests_total{{{_A}, finish_reason="error"}}': growing(20)}, 7, 3),
    Case("TroupeStreamsBreak", {f'troupe_stream_errors_total{{{_A}, error_type="ActorDied"}}': born(100)}, 28, 24),
    Case(
        "TroupeAsksTimeOut",
        {f'troupe_ask_timeouts_total{{{_A}, actor="cache", message="OpenSequence"}}': born(100)},
        fires_at=32,
        still_at=26,
    ),
    Case(
        "TroupeDeadLetters",
        {f'troupe_dead_letters_total{{{_A}, actor="scheduler", message="StepDone", reason="dead"}}': growing(1)},
        fires_at=30,
        still_at=1,
    ),
    Case("TroupeSpansDropped", {f'troupe_trace_spans_total{{{_A}, outcome="dropped"}}': growing(3)}, 13, 8),
    Case("TroupeFirstTokenSlow", histogram(_TTFT, f'{_A}, gen_ai_request_model="m"', 10, 90, 10), 12, 8),
    Case("TroupeTokensSlow", histogram("troupe_inter_token_latency_seconds", _A, 10, 90, 0.5), 12, 8),
    Case("TroupeQueueLong", histogram("troupe_request_queue_seconds", _A, 10, 90, 5), 12, 8),
    Case("TroupeLoopLagging", histogram("troupe_loop_lag_seconds", _A, 10, 90, 0.25), 12, 8),
    Case(
        "TroupeMailboxSlow",
        histogram("troupe_mailbox_wait_seconds", f'{_WORKER}, message="Step"', 10, 90, 1),
        fires_at=12,
        still_at=8,
    ),
    Case(
        "TroupeRefusingRequests",
        {f'troupe_admission_rejections_total{{{_A}, reason="sequences"}}': growing(1)},
        fires_at=8,
        still_at=3,
    ),
    Case("TroupeCacheShort", {f"troupe_preemptions_total{{{_A}}}": growing(5)}, fires_at=12, still_at=8),
)


def firing(alert: str, minute: int, samples: int) -> dict[str, Any]:
    expected = [{"labels": "{}", "value": samples}] if samples else []
    expr = f'count(ALERTS{{alertname="{alert}", alertstate="firing"}})'
    return {"expr": expr, "eval_time": f"{minute}m", "exp_samples": expected}


def run(folder: Path, tests: list[dict[str, Any]]) -> None:
    file = folder / "test.yml"
    rules = [str(_RULES / name) for name in ("recording.yml", "alerts.yml")]
    file.write_text(yaml.safe_dump({"rule_files": rules, "evaluation_interval": "15s", "tests": tests}))
    promtool("test", "rules", str(file))


def given(name: str, series: dict[str, str], checks: list[dict[str, Any]]) -> dict[str, Any]:
    rows = [{"series": name, "values": values} for name, values in series.items()]
    return {"name": name, "interval": "15s", "input_series": rows, "promql_expr_test": checks}


def test_every_alert_has_a_case() -> None:
    groups = yaml.safe_load((_RULES / "alerts.yml").read_text())["groups"]
    assert {rule["alert"] for group in groups for rule in group["rules"]} == {case.alert for case in CASES}


def test_alerts_fire_when_they_should_and_not_before(tmp_path: Path) -> None:
    tests = []
    for case in CASES:
        checks = [firing(case.alert, case.fires_at, 1)]
        if case.still_at is not None:
            checks.append(firing(case.alert, case.still_at, 0))
        tests.append(given(case.alert, HEALTHY | case.series, checks))
    run(tmp_path, tests)


def test_nothing_fires_on_a_healthy_server(tmp_path: Path) -> None:
    checks = [
        {"expr": 'ALERTS{alertstate="firing"}', "eval_time": f"{minute}m", "exp_samples": []}
        for minute in (1, 12, 26, 39)
    ]
    run(tmp_path, [given("healthy", HEALTHY, checks)])


def test_recorded_series_have_the_numbers_that_their_names_say(tmp_path: Path) -> None:
    def gives(expr: str, labels: str, value: float) -> dict[str, Any]:
        return {"expr": expr, "eval_time": "20m", "exp_samples": [{"labels": labels, "value": value}]}

    b = 'instance="b:8000"'
    two = HEALTHY | {
        f"troupe_generated_tokens_total{{{_A}}}": growing(30),
        f"troupe_generated_tokens_total{{{b}}}": growing(60),
        f'troupe_model_info{{{_A}, model="m", device="cpu"}}': steady(1),
        f'troupe_model_info{{{b}, model="m", device="npu"}}': steady(1),
        f"troupe_cache_pages{{{_A}}}": steady(200),
        f"troupe_cache_pages_used{{{_A}}}": steady(50),
        f"troupe_cache_hit_tokens_total{{{_A}}}": growing(1),
        f"troupe_cache_queried_tokens_total{{{_A}}}": growing(4),
    }
    failed = "instance:troupe_requests_failed:ratio_rate5m"
    checks = [
        gives("model:troupe_generated_tokens:rate5m", 'model:troupe_generated_tokens:rate5m{model="m"}', 6),
        gives("instance:troupe_cache_used:ratio", f"instance:troupe_cache_used:ratio{{{_A}}}", 0.25),
        gives("instance:troupe_cache_hits:ratio_rate5m", f"instance:troupe_cache_hits:ratio_rate5m{{{_A}}}", 0.25),
        gives(f"round({failed}, 0.0001)", f"{{{_A}}}", 0.009),
        gives(
            "sum by (instance) (instance_actor:troupe_restarts:sum)",
            f"{{{_A}}}",
            0,
        ),
    ]
    run(tmp_path, [given("recorded", two, checks)])
