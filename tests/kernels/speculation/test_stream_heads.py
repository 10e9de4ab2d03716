"""DeepSeek V4's head for the token after the next, which reads all residual streams: it drafts by its formula, changes
no token, and is read from published files."""

from __future__ import annotations

import json
import shutil

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.contract.errors import ConfigError, LoadError
from kernels.contract.expert_settings import ExchangeSettings
from kernels.contract.speculation import SpeculativeSettings
from kernels.models.config_loader import read_config
from kernels.speculation.load import captured_layers
from kernels.weights.quantization.mxfp4 import Mxfp4Weight
from kernels.weights.quantization.weights import Fp8Weight
from tests.kernels.distributed.ranks import run_ranks
from tests.kits.deepseek_v4_files import write_published
from tests.kits.driver import ints
from tests.kits.planned_runner import Line
from tests.kits.speculation.drafting import drafted
from tests.kits.speculation.stream_heads import StreamHead, follow_last_tokens

THREE = SpeculativeSettings("MTP", num_steps=3, topk=1, num_draft_tokens=4)


def rewrite(path, **keys):
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


def observed(runner):
    """Drafts from now on: the known tokens of a row, and those that it drafts."""
    drafter, result = runner._loaded.speculator.drafter, []
    draft = drafter.draft

    def spy(rows):
        found = draft(rows)
        for row, (slot, root) in enumerate(zip(rows.slots, rows.roots, strict=True)):
            if found.nodes[row] > 1:
                result.append((rows.table[slot, : root + 1].tolist(), found.tree.tokens[row, 1:].tolist()))
        return found

    drafter.draft = spy
    return result


def test_the_head_drafts_its_formula_and_changes_no_token(reference, drive, prompts, tmp_path):
    """Prompts are longer than windows."""
    model, (text,) = reference("deepseek-v4"), prompts(40, seed=3)
    head = StreamHead(model, tmp_path / "model")
    driver = drive(tmp_path / "model", speculation=THREE)
    found = drafted(driver, text, THREE)
    assert driver.tokens[1] == model.greedy(text, len(driver.tokens[1]))
    assert len(found) == 5
    for root, tokens in found:
        assert tokens == head.path(driver.tokens[1][: root + 1], 3)


def test_planned_traffic_drafts_the_formula_and_changes_no_token(reference, prompts, tmp_path):
    """Prompts in chunks, behind cached prefixes and preempted; most draft tokens are rejected."""
    model, (shared, *ends) = reference("deepseek-v4"), prompts(40, 3, 25, 9, seed=5)
    head = StreamHead(model, tmp_path / "model")
    texts = [shared + ends[0], ends[1], shared + ends[2]]
    line = Line(
        tmp_path / "model", {"speculation": THREE, "max_total_tokens": 512}, max_running=2, priority_scheduling=True
    )
    found = observed(line.runner)
    for number in (1, 2):
        line.submit(number, texts[number - 1], 20)
    for _ in range(6):
        line.step()
    line.submit(3, texts[2], 20, priority=100)
    line.play()
    for number, text in enumerate(texts, start=1):
        assert len(line.outputs[number]) == 20
        assert model.continues(text, line.outputs[number])
    assert line.cached[3] >= 32
    assert line.planner.load(0.0).preemptions > 0
    of_prefix = [one for one in found if one[0][: len(texts[2])] == texts[2]]
    assert len(of_prefix) > 5
    for known, tokens in (*found[::4], *of_prefix[:3]):
        assert tokens == head.path(known, len(tokens))


def test_draft_tokens_that_the_model_says_are_accepted(reference, drive, prompts, tmp_path):
    (text,) = prompts(40, seed=3)
    StreamHead(reference("deepseek-v4"), tmp_path / "model")
    follow_last_tokens(tmp_path / "model")
    driver, alone = drive(tmp_path / "model", speculation=THREE), drive(tmp_path / "model")
    driver.admit(1, text)
    driver.step([(1, len(text))])
    accepted = [ints(driver.step([(1, 1)], drafts={1: 3}).accepted) for _ in range(6)]
    assert accepted == [[4]] * 6
    alone.admit(1, text)
    assert driver.tokens[1] == alone.generate(1, len(driver.tokens[1]))


def test_half_precision_changes_no_token(reference, drive, prompts, tmp_path):
    (text,) = prompts(40, seed=3)
    StreamHead(reference("deepseek-v4"), tmp_path / "model")
    driver, alone = (drive(tmp_path / "model", dtype="bfloat16", speculation=each) for each in (THREE, None))
    drafted(driver, text, THREE)
    alone.admit(1, text)
    alone.step([(1, len(text))])
    assert driver.tokens[1] == alone.generate(1, len(driver.tokens[1]))


@pytest.mark.parametrize("experts", ["fp4", "fp8"])
def test_published_files_have_the_head_in_blocks_too(experts, reference, drive, prompts, tmp_path):
    (text,) = prompts(30, seed=3)
    StreamHead(reference("blocks-deepseek-v4"), tmp_path / "model")
    published, floats = write_published(tmp_path / "model", tmp_path, experts)
    driver, other = (drive(path, speculation=THREE) for path in (published, floats))
    assert drafted(driver, text, THREE) == drafted(other, text, THREE)
    assert driver.tokens[1] == other.tokens[1]
    weights = driver.runner._loaded.speculator.drafter._drafter._model.weights
    for module in ("e_proj", "h_proj", "self_attn.q_b_proj", "mlp.shared_experts.up_proj"):
        assert isinstance(weights.projection([f"mtp.0.{module}"]), Fp8Weight)
    kind = Mxfp4Weight if experts == "fp4" else Fp8Weight
    assert isinstance(weights.projection(["mtp.0.mlp.experts.1.down_proj"]), kind)


def test_a_head_is_quantized_with_its_model(reference, drive, prompts, tmp_path):
    (text,) = prompts(30, seed=3)
    StreamHead(reference("deepseek-v4"), tmp_path / "model")
    driver, alone = (drive(tmp_path / "model", quantization="int8", speculation=each) for each in (THREE, None))
    assert len(drafted(driver, text, THREE)) == 5
    alone.admit(1, text)
    assert driver.tokens[1] == alone.generate(1, len(driver.tokens[1]))


def test_two_ranks_draft_what_one_device_does(reference, prompts, tmp_path):
    """By parts of experts or of each expert; and with other requests for each rank, experts divided over all."""
    model, texts = reference("parallel-deepseek-v4"), prompts(20, 40, seed=3)
    StreamHead(model, tmp_path / "model")
    exchange = ExchangeSettings("normal")
    job = {"model": str(tmp_path / "model"), "new": 16, "speculation": msgspec.to_builtins(THREE)}
    divided = msgspec.to_builtins(msgspec.structs.replace(THREE, exchange=exchange))
    parts = {"dp_size": 2, "ep_size": 2, "exchange": msgspec.to_builtins(exchange)}
    jobs = [
        job | {"prompts": texts, "options": {"ep_size": 2}},
        job | {"prompts": texts, "options": {"ep_size": 1}},
        job | {"parts": [texts[:1], texts[1:]], "options": parts, "speculation": divided},
        job | {"parts": [texts[:1], texts[1:]], "options": parts},
    ]
    expected = [model.greedy(text, len(text) + 16) for text in texts]
    for rank, answers in enumerate(run_ranks(jobs)):
        assert answers[0]["accepted"] == answers[1]["accepted"]
        for answer, wanted in zip(answers, (expected, expected, expected[rank:], expected[rank:]), strict=True):
            for tokens, right in zip(answer["tokens"], wanted, strict=False):
                assert tokens[: len(right)] == right
        assert answers[2]["draft_bytes"] < answers[3]["draft_bytes"]


def test_the_head_rotates_the_same_part_as_its_model(reference, drive, tmp_path):
    """A cached key has another size."""
    shutil.copy(reference("deepseek-v4").path / "config.json", tmp_path)
    rewrite(tmp_path, head_dim=32, partial_rotary_factor=0.25)
    driver = drive(tmp_path, speculation=THREE, load_format="dummy")
    head = driver.runner._loaded.speculator.drafter._drafter._model
    assert (head.config.head_dim, head.rotary(torch.arange(3))[0].shape) == (16, (3, 1, 8))


def test_a_head_of_compressed_attention_is_refused(reference, drive, tmp_path):
    StreamHead(reference("deepseek-v4"), tmp_path / "model")
    rewrite(tmp_path / "model", compress_ratios=[0, 4, 128, 4, 128, 4])
    with pytest.raises(ConfigError, match=r"compress_ratios has 4 for mtp\.0, .* use --speculative-algorithm NGRAM"):
        drive(tmp_path / "model", speculation=THREE)


def test_several_heads_of_streams_are_refused(reference, drive, tmp_path):
    settings = SpeculativeSettings("MTP", num_steps=2, topk=1, num_draft_tokens=3, multi_layer=True)
    StreamHead(reference("deepseek-v4"), tmp_path / "model")
    rewrite(tmp_path / "model", num_nextn_predict_layers=2)
    with pytest.raises(ConfigError, match="latent or compressed attention are not run: leave --enable-multi-layer"):
        drive(tmp_path / "model", speculation=settings, load_format="dummy")


def test_tensors_of_the_head_are_named(reference, drive, tmp_path):
    model = reference("deepseek-v4")
    StreamHead(model, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    held = load_file(file)
    save_file(held | {"mtp.0.ffn.gate.tid2eid": torch.zeros(2)}, file)
    with pytest.raises(LoadError, match=r"mtp\.0\.ffn\.gate\.tid2eid is in the checkpoint and not in the model"):
        drive(tmp_path / "model", speculation=THREE)
    del held["mtp.0.h_proj.weight"]
    save_file(held, file)
    with pytest.raises(LoadError, match=r"mtp\.0\.h_proj\.weight is missing"):
        drive(tmp_path / "model", speculation=THREE)
    with pytest.raises(LoadError, match=r"no head for tokens after the next: no mtp\.N\.e_proj; give"):
        drive(model.path, speculation=THREE)


@pytest.mark.parametrize("name", ["deepseek-v4", "hunyuan-v4"])
def test_drafts_that_read_one_stream_are_refused(name, reference, tmp_path):
    config = read_config(reference(name).path)
    (tmp_path / "config.json").write_text(json.dumps({"dflash_config": {"target_layer_ids": [1]}}))
    for settings in (
        SpeculativeSettings("EAGLE3", capture_layers=(config.layers - 1,)),
        SpeculativeSettings("DFLASH", draft_model_path=str(tmp_path)),
    ):
        with pytest.raises(ConfigError, match=r"has \d residual streams, and drafts that read .* read one"):
            captured_layers(settings, config)
