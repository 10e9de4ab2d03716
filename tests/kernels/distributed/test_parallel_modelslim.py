"""ModelSlim checkpoints on two ranks say what one rank says."""

from __future__ import annotations

import pytest

from tests.kernels.distributed.ranks import run_ranks
from tests.kits.modelslim import calibrate, write


@pytest.mark.long
def test_two_ranks_hold_their_parts_of_every_kind(reference, drive, prompts, tmp_path):
    """The static layers' offsets and biases are added once; norms and biases of outputs are whole."""
    model = reference("parallel-llama")
    texts = prompts(7, 20)
    mixed = {"q_proj": "W8A8", "k_proj": "W8A8_DYNAMIC", "v_proj": "FLOAT", "down_proj": "W4A16", "o_proj": "W8A8"}
    ranges = calibrate(model.model, texts[1])
    kinds = {
        "static": lambda module: "W8A8",
        "mixed": lambda module: mixed.get(module.rpartition(".")[2], "W8A16"),
    }
    checkpoints = [write(model.path, tmp_path / name, kind, ranges)[0] for name, kind in kinds.items()]
    alone = [drive(checkpoint) for checkpoint in checkpoints]
    jobs = [{"model": str(checkpoint), "prompts": texts, "length": 26} for checkpoint in checkpoints]
    first, second = run_ranks(jobs)
    for driver, reported, also in zip(alone, first, second, strict=True):
        assert also["tokens"] == reported["tokens"]
        assert reported["parameters"] == driver.info.parameters
        assert reported["weight_bytes"] < 0.75 * driver.info.weight_bytes
        for slot, text in enumerate(texts, start=1):
            driver.admit(slot, text)
            driver.generate(slot, 26)
        assert reported["tokens"] == [driver.tokens[slot] for slot in sorted(driver.tokens)]
