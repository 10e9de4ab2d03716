"""The recorder of expert distribution over HTTP, with a model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from prometheus_client import generate_latest

from actors.engine.engine import Engine
from actors.protocol.requests import SamplingParams
from app.application import create_app
from tests.kits.engines import rest, small_engine
from tests.kits.returned_values import make_sparse_model

PROMPT = list(range(30, 130))
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
ADMIN = {"Authorization": "Bearer admin"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sparse_model(tmp_path_factory.mktemp("sparse"))


async def experts_of(engine: Engine) -> npt.NDArray[np.int32]:
    """What the request itself returns, int32 [tokens, layers, chosen]."""
    await engine.flush_cache()
    packed = b""
    async for delta in engine.generate(PROMPT, msgspec.structs.replace(PARAMS, routed_experts=True)):
        packed += delta.routed_experts
    await rest(engine)
    return np.frombuffer(packed, np.int32).reshape(len(PROMPT) + 5, -1, 2)


async def run(engine: Engine) -> list[int]:
    await rest(engine)
    await engine.flush_cache()
    tokens: list[int] = []
    async for delta in engine.generate(PROMPT, PARAMS):
        tokens += delta.token_ids
    await rest(engine)
    return tokens


def counts_of(experts: npt.NDArray[np.int32]) -> list[list[int]]:
    return [np.bincount(experts[:, layer].ravel(), minlength=8).tolist() for layer in range(experts.shape[1])]


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("stat", {}),
        ("stat", {"tp_size": 2}),
        ("per_pass", {"expert_distribution_recorder_buffer_size": 4}),
        ("per_token", {"enable_deterministic_inference": True}),
    ],
    ids=str,
)
async def test_a_record_has_what_the_tokens_took(
    model: Path, tmp_path: Path, mode: str, options: Mapping[str, Any]
) -> None:
    engine = small_engine(
        model,
        **options,
        expert_distribution_recorder_mode=mode,
        expert_distribution_recorder_dir=str(tmp_path / "records"),
        enable_expert_distribution_metrics=True,
        enable_return_routed_experts=True,
        admin_api_key="admin",
        skip_server_warmup=True,
    )
    client = create_app(engine.arguments, engine).test_client()

    async def post(action: str, status: int = 200, headers: Mapping[str, str] = ADMIN) -> dict[str, Any]:
        response = await client.post(f"/{action}_expert_distribution_record", headers=dict(headers))
        answer: dict[str, Any] = await response.get_json()
        assert response.status_code == status, answer
        return answer

    async with engine:
        plain = await run(engine)
        await post("start", 401, {})
        assert (await post("dump", 409))["error"]["code"] == "not_recorded"
        await post("start")
        assert await run(engine) == plain
        await post("stop")
        assert await run(engine) == plain  # not recorded
        metrics = generate_latest(engine.registry).decode()
        found = json.loads(Path((await post("dump"))["path"]).read_bytes())
        expected = await experts_of(engine)
    assert found["mode"] == mode
    if mode == "per_pass":
        assert found["passes"] == len(found["records"]) == 4
        assert found["logical_count"] == counts_of(expected[-4:])
        assert found["records"][0]["logical_count"] == counts_of(expected[-4:-3])
        return
    assert found["logical_count"] == counts_of(expected)
    for layer, row in enumerate(counts_of(expected)):
        value = np.mean(row) / np.max(row)
        line = next(
            each for each in metrics.splitlines() if each.startswith(f'troupe_expert_balancedness{{layer="{layer}')
        )
        assert float(line.rpartition(" ")[2]) == pytest.approx(value)
    if mode == "per_token":
        assert all(len(step["requests"]) == 1 and step["requests"][0] for step in found["records"])
        assert [sum(step["tokens"]) for step in found["records"]] == [64, 36, 1, 1, 1, 1, 1]
        assert np.concatenate([step["experts"] for step in found["records"]]).tolist() == expected.tolist()


async def test_without_mode_or_experts_nothing_is_recorded(model: Path, tiny_model: Path) -> None:
    for path, options, code in (
        (model, {}, "recorder_disabled"),
        (tiny_model, {"expert_distribution_recorder_mode": "stat"}, "no_experts"),
    ):
        engine = small_engine(path, **options, admin_api_key="admin", skip_server_warmup=True)
        client = create_app(engine.arguments, engine).test_client()
        async with engine:
            response = await client.post("/start_expert_distribution_record", headers=ADMIN)
            assert response.status_code == 409
            assert (await response.get_json())["error"]["code"] == code


async def test_recording_beside_draft_tokens_changes_no_token(model: Path) -> None:
    async with small_engine(
        model, speculative_algorithm="NGRAM", expert_distribution_recorder_mode="stat_approx"
    ) as engine:
        plain = await run(engine)
        engine.expert_recorder.start()
        assert await run(engine) == plain
        engine.expert_recorder.stop()
        assert await run(engine) == plain
