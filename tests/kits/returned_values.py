"""Final hidden states and chosen experts that requests return, by a runner that is driven step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.contract.config import RunnerConfig
from kernels.contract.step import SlotSampling, StepResult, TokenValues
from kernels.execution.runner import ModelRunner
from tests.kits.driver import Driver, ints
from tests.kits.tiny_model import make_tiny_model

__all__ = ["make_sparse_model", "returned"]

_PROMPTS = ([7], list(range(10, 27)), list(range(30, 54)))
_SAMPLING = SlotSampling(temperature=0.0, logprobs=0, hidden_states=True, routed_experts=True)
_STEPS, _CHUNK = 3, 16


def make_sparse_model(directory: Path) -> Path:
    """A tiny model whose layers have 8 experts, of which each token takes 2."""
    return make_tiny_model(
        directory,
        architectures=["Qwen3MoeForCausalLM"],
        model_type="qwen3_moe",
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )


def returned(
    path: Path, **options: Any
) -> tuple[list[list[int]], list[npt.NDArray[np.float32]], list[npt.NDArray[np.int32]]]:
    """Of each prompt its tokens, their states [tokens, hidden] and their experts [tokens, layers, 2]. The prompts run
    in chunks beside one another, and one more request that wants nothing."""
    config = {"dtype": "float32", "max_total_tokens": 2048, "max_slots": 9, "threads": 1, "max_step_tokens": 64}
    runner = ModelRunner(RunnerConfig(str(path), **(config | options)))  # type: ignore[arg-type]
    driver = Driver(runner, runner.load())
    driver.record_experts = "tokens"
    for slot, prompt in enumerate(_PROMPTS, 1):
        driver.admit(slot, prompt, sampling=_SAMPLING)
    driver.admit(8, [5, 6, 7])
    states: dict[int, list[bytes]] = {slot: [] for slot in range(1, len(_PROMPTS) + 1)}
    experts: dict[int, list[bytes]] = {slot: [] for slot in states}
    ends = {slot: len(prompt) + _STEPS for slot, prompt in enumerate(_PROMPTS, 1)}
    while left := [slot for slot, end in ends.items() if len(driver.tokens[slot]) < end]:
        rows = [(slot, min(driver.pending(slot), _CHUNK)) for slot in (*left, 8)]
        result = driver.step(rows)
        assert not result.failed
        _check_record(result, sum(count for _, count in rows))
        order = [slot for slot, _ in sorted(rows, key=lambda row: row[1] != 1)]
        for found, into in ((result.states, states), (result.experts, experts)):
            assert found is not None
            _add(found, order, into)
    runner.close()
    tokens = [driver.tokens[slot] for slot in states]
    both = list(zip(tokens, states.values(), experts.values(), strict=True))
    return (
        tokens,
        [np.frombuffer(b"".join(parts), np.float32).reshape(len(ids) - 1, -1) for ids, parts, _ in both],
        [np.frombuffer(b"".join(parts), np.int32).reshape(len(ids) - 1, -1, 2) for ids, _, parts in both],
    )


def _check_record(result: StepResult, tokens: int) -> None:
    """The step's record has the experts of all tokens, and says how many took each."""
    assert result.experts is not None
    assert result.record is not None
    routes = result.record.routes
    assert routes is not None
    layers = len(result.experts.values) // (4 * 2 * sum(ints(result.experts.counts)))
    taken = np.frombuffer(routes.values, np.int16).reshape(tokens, layers, 2)
    counts = np.frombuffer(result.record.counts, np.int32).reshape(layers, -1)
    assert counts.tolist() == [np.bincount(taken[:, layer].ravel(), minlength=8).tolist() for layer in range(layers)]
    assert ints(routes.rows) == list(range(len(ints(routes.counts))))
    wanted = np.repeat(np.isin(ints(routes.rows), ints(result.experts.rows)), ints(routes.counts))
    returned = np.frombuffer(result.experts.values, np.int32).reshape(-1, layers, 2)
    assert (taken[wanted] == returned).all()


def _add(found: TokenValues, order: list[int], into: dict[int, list[bytes]]) -> None:
    counts = ints(found.counts)
    size = len(found.values) // sum(counts)
    begin = 0
    for row, count in zip(ints(found.rows), counts, strict=True):
        into[order[row]].append(found.values[begin : begin + count * size])
        begin += count * size
