"""Ranks that run steps as two batches in turns."""

from __future__ import annotations

from tests.kernels.distributed.ranks import run_ranks

NAMES = ["parallel-qwen3", "placed-moe"]


def test_ranks_take_turns_alike_and_an_error_in_one_batch_ends_all(reference, prompts):
    """Tokens are transformers'. The peer of a rank that fails does not wait for it, and the next model runs."""
    models, texts = [reference(name) for name in NAMES], prompts(30, 40, 50)
    base = {"prompts": texts, "length": 55, "min_divided": 20}
    job = base | {"options": {"two_batch_threshold": 0.48}}
    jobs = [job | {"model": str(model.path)} for model in models]
    jobs[1]["options"] = {"two_batch_threshold": 0.4, "ep_size": 2}
    first, second = run_ranks([jobs[0], jobs[0] | {"broken": 1}, jobs[1]])
    assert [bool(each["lost"]) for each in first] == [False, True, False]
    assert [each["lost"] for each in second] == ["", "OSError: broken", ""]
    assert first[1]["lost"].startswith("GroupError: rank 0 of 2")
    assert "imed out" not in first[1]["lost"]
    for model, number in zip(models, (0, 2), strict=True):
        assert first[number]["tokens"] == second[number]["tokens"] == [model.greedy(text, 55) for text in texts]
        assert first[number]["divided"][:2] == [True, True]
        assert not any(first[number]["divided"][2:])
        names = first[number]["turns"]
        assert names[::2] == ["MainThread"] * 2
        assert names[1::2] == ["second-batch"] * 2
