"""The warm-up's requests run like any other, and nothing that clients read counts them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from actors.protocol.requests import SamplingParams
from app.server.warmup import warm_up
from tests.kits.engines import small_engine

pytestmark = pytest.mark.usefixtures("warm_workers")

LATENCIES = (
    "gen_ai_server_request_duration_seconds",
    "gen_ai_server_time_to_first_token_seconds",
    "gen_ai_server_time_per_output_token_seconds",
    "troupe_request_queue_seconds",
    "troupe_request_prefill_seconds",
    "troupe_request_decode_seconds",
    "troupe_inter_token_latency_seconds",
    "troupe_step_seconds",
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "sglang:e2e_request_latency_seconds",
)


async def test_a_warm_up_is_in_no_latency_and_no_log(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="troupe")
    names = {"metrics_names": ("sglang", "vllm"), "warmups": ("generate", "long-prompt", "batch")}
    files = {"export_metrics_to_file": True, "export_metrics_to_file_dir": str(tmp_path)}
    logs = {"log_requests": True, "enable_request_time_stats_logging": True}
    async with small_engine(tiny_model, **names, **files, **logs) as engine:

        def counted() -> dict[str, float]:
            found = dict.fromkeys(LATENCIES, 0.0)
            for metric in engine.metrics.registry.collect():
                for sample in metric.samples:
                    name = sample.name.removesuffix("_count")
                    if name in found and sample.name.endswith("_count"):
                        found[name] += sample.value
            return found

        await warm_up(engine, engine.arguments)
        assert engine.metrics.steps.generated_tokens >= 40
        assert counted() == dict.fromkeys(LATENCIES, 0.0)
        assert not [record for record in caplog.records if "warm-up" in record.getMessage()]
        params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
        async for _ in engine.generate([5, 6, 7], params, request_id="mine"):
            pass
        assert all(counted().values())
    assert b'"label":"mine"' in b"".join(path.read_bytes() for path in tmp_path.iterdir()).replace(b" ", b"")
    assert b"warm-up" not in b"".join(path.read_bytes() for path in tmp_path.iterdir())
