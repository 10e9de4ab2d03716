"""Divisions of models, each with all that its requests may have: prompts in chunks beside which others decode, prefixes
that lie in the cache, draft tokens, and experts that have copies and move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.kernels.distributed.ranks import run_ranks

__all__ = ["FOUR_RANKS", "TWO_RANKS", "Division", "compare"]

DENSE, ODD_EXPERTS, EXPERTS, MLA = "parallel-qwen3", "parallel-moe", "placed-moe", "parallel-deepseek-v3"
MOVING = {"dispatch": "dynamic", "rebalance": {"iterations": 5}}
NEW = 8
"""Tokens that each prompt gets at least."""
VOCAB = 212
NGRAM = {"algorithm": "NGRAM", "num_steps": 3, "num_draft_tokens": 4}


@dataclass(frozen=True)
class Division:
    """``options``: of RunnerConfig. ``stages``: of a pipeline. ``dp_size`` 2 gives each part requests of its own."""

    model: str
    options: dict[str, Any] = field(default_factory=dict)
    stages: int = 1

    @property
    def parts(self) -> int:
        return int(self.options.get("dp_size", 1))

    @property
    def moves(self) -> bool:
        return "rebalance" in self.options.get("experts", {})


TWO_RANKS = [
    Division(DENSE),
    Division(ODD_EXPERTS),
    *(Division(model, {"ep_size": 2}) for model in (EXPERTS, MLA)),
    *(Division(model, {"ep_size": 2, "experts": MOVING | {"redundant": 2}}) for model in (EXPERTS, MLA)),
    *(Division(model, stages=2) for model in (DENSE, EXPERTS, MLA)),
    Division(ODD_EXPERTS, {"dp_size": 2}),
    *(Division(model, {"dp_size": 2, "ep_size": 2}) for model in (EXPERTS, MLA)),
    Division(EXPERTS, {"dp_size": 2, "ep_size": 2, "exchange": {"mode": "normal"}}),
]
FOUR_RANKS = [
    Division(DENSE),
    *(Division(model, {"ep_size": 2}) for model in (EXPERTS, MLA)),
    Division(ODD_EXPERTS, {"ep_size": 4, "experts": MOVING | {"redundant": 1}}),
    Division(MLA, {"ep_size": 4, "experts": MOVING | {"redundant": 4}}),
    Division(EXPERTS, {"ep_size": 2, "experts": MOVING | {"redundant": 4}}),
    Division(DENSE, stages=2),
    *(Division(model, {"ep_size": 2}, stages=2) for model in (EXPERTS, MLA)),
    Division(EXPERTS, {"dp_size": 2, "ep_size": 4, "experts": MOVING | {"redundant": 4}}),
    Division(MLA, {"dp_size": 2, "ep_size": 2}),
]


def compare(
    reference: Callable[[str], Any], divisions: Sequence[Division], size: int, prompts: list[list[int]], **options: Any
) -> None:
    """Each division of ``size`` ranks gives the greedy tokens of transformers. ``prompts``: of which the others begin
    with pages of the first. One that repeats itself joins them, so that draft tokens are accepted."""
    jobs, expected = list[dict[str, Any]](), list[list[list[int]]]()
    loops = {one.model: find_loop(reference(one.model)) for one in divisions}
    assert any(loop is not None for loop in loops.values())
    for one in divisions:
        model, texts = reference(one.model), [*prompts, [loops[one.model] or 7] * 20]
        parts = [texts[-1:], texts[:-1]]
        expected.append([model.greedy(text, len(text) + NEW) for text in texts])
        job = {"model": str(model.path), "new": NEW, "chunk": len(prompts[0]) * 2 // 3, "cached": True}
        job |= {"options": options | one.options, "stages": one.stages, "speculation": NGRAM}
        jobs.append(job | ({"parts": parts} if one.parts > 1 else {"prompts": texts}))
    ranks = run_ranks(jobs, size)
    for number, one in enumerate(divisions):
        accepted, moved = 0, {answers[number]["moved"] for answers in ranks}
        assert (len(moved), moved != {0}) == (1, one.moves), one
        for rank, answers in enumerate(ranks):
            own = expected[number]
            if one.parts > 1:
                own = own[:-1] if rank * one.parts // size else own[-1:]
            found = answers[number]["tokens"]
            assert [tokens[: len(text)] for tokens, text in zip(found, own, strict=True)] == own, (one, rank)
            accepted += sum(max(step, default=0) > 1 for step in answers[number]["accepted"])
        assert accepted > 0 or loops[one.model] is None, one


def find_loop(model: Any) -> int | None:
    """A token that the model puts behind itself."""
    with torch.inference_mode():
        says = model.model(torch.arange(VOCAB).unsqueeze(1).expand(-1, 20)).logits[:, -5:].argmax(-1)
    return next((token for token in range(VOCAB) if says[token].eq(token).all()), None)
