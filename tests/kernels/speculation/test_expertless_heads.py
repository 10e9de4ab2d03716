"""The heads for the token after the next of ERNIE 4.5's mixtures of experts and of K-EXAONE: they draft by their
formulas and change no token."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeDecoderLayer

try:
    from transformers.models.exaone_moe.modeling_exaone_moe import ExaoneMoeDecoderLayer
except ImportError:  # before transformers 5.1
    ExaoneMoeDecoderLayer = None

from kernels.contract.errors import LoadError
from kernels.contract.speculation import SpeculativeSettings

SETTINGS = SpeculativeSettings("MTP", num_steps=3, topk=1, num_draft_tokens=4)


KINDS = {"ernie4.5-moe": Ernie4_5_MoeDecoderLayer, "exaone-moe": ExaoneMoeDecoderLayer}
NAMES = {
    "ernie4.5-moe": {
        "token": "model.mtp_emb_norm.0",
        "state": "model.mtp_hidden_norm.0",
        "both": "model.mtp_linear_proj.0",
        "layer": "model.mtp_block.0",
    },
    "exaone-moe": {
        "token": "mtp.pre_fc_norm_embedding",
        "state": "mtp.pre_fc_norm_hidden",
        "both": "mtp.fc",
        "layer": "mtp.layers.0",
        "last": "mtp.norm",
    },
}
"""Of the parts of a head. ERNIE's has no last norm."""


def with_head(model, name, path):
    """A copy of the checkpoint with a head, whose layer is the model's first one: it has no experts. -> the head's
    states [tokens, hidden] of tokens and the states before them."""
    shutil.copytree(model.path, path)
    config, hidden, inner, names = model.model.config, model.model.config.hidden_size, model.model.model, NAMES[name]
    torch.manual_seed(5)
    layer = KINDS[name](config, 0).eval()
    for parameter in layer.parameters():
        parameter.data.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.3)
    shapes = {"token": (hidden,), "state": (hidden,), "both": (hidden, 2 * hidden), "last": (hidden,)}
    parts = {part: torch.randn(shapes[part]) * 0.3 + (part != "both") for part in names if part != "layer"}
    tensors = load_file(path / "model.safetensors")
    tensors |= {f"{names[part]}.weight": value for part, value in parts.items()}
    tensors |= {f"{names['layer']}.{part}": value for part, value in layer.state_dict().items()}
    save_file({key: value.clone().contiguous() for key, value in tensors.items()}, path / "model.safetensors")
    window = config.sliding_window if name == "exaone-moe" else 10**6

    def normed(x, part):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps) * parts[part]

    def run(tokens, states):
        both = normed(inner.embed_tokens(tokens), "token"), normed(states, "state")
        x, count = (torch.cat(both, -1) @ parts["both"].t()).unsqueeze(0), len(tokens)
        places = inner.rotary_emb(x, torch.arange(count).unsqueeze(0))
        away = torch.arange(count)[:, None] - torch.arange(count)
        mask = torch.zeros(count, count).masked_fill((away < 0) | (away >= window), -torch.inf)[None, None]
        out = layer(x, attention_mask=mask, position_embeddings=places)
        out = (out[0] if isinstance(out, tuple) else out).view(count, -1)
        return normed(out, "last") if "last" in names else out

    return run


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_head_drafts_its_formula_and_changes_no_token(name, dtype, reference, drive, prompts, tmp_path):
    model, (text,) = reference(name), prompts(30, seed=3)
    run = with_head(model, name, tmp_path / "model")
    driver, alone = drive(tmp_path / "model", dtype=dtype, speculation=SETTINGS), drive(model.path, dtype=dtype)
    drafter, drafted = driver.runner._loaded.speculator.drafter, []
    draft = drafter.draft

    def spy(rows):
        result = draft(rows)
        drafted.append((int(rows.roots[0]), result.tree.tokens[0, 1:].tolist()))
        return result

    drafter.draft = spy
    for each in (driver, alone):
        each.admit(1, text)
        each.step([(1, len(text))])
    for _ in range(8):
        driver.step([(1, 1)], drafts={1: 3})
    alone.generate(1, len(driver.tokens[1]))
    assert driver.tokens[1] == alone.tokens[1]
    if dtype == "bfloat16":
        return
    assert len(drafted) == 8
    for root, found in drafted:
        known = torch.tensor(driver.tokens[1][: root + 1])
        with torch.inference_mode():
            states, read, path = model.model.model(known[None, :-1]).last_hidden_state[0], known[1:], []
            for _ in range(3):
                made = run(read, states)
                path.append(int(model.model.lm_head(made[-1]).argmax()))
                states, read = torch.cat((states, made[-1:])), torch.cat((read, torch.tensor(path[-1:])))
        assert found == path


def test_a_head_of_k_exaone_may_see_all_tokens_without_positions(reference, drive, tmp_path):
    with_head(reference("exaone-moe"), "exaone-moe", tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"mtp_layer_types": ["full_attention"]}))
    driver = drive(tmp_path / "model", speculation=SETTINGS)
    head = driver.runner._loaded.speculator.drafter._drafter._model.config
    assert head.windows == (0,)
    assert head.rope.kind == "none"


def test_heads_of_another_layout_are_no_head(reference, drive, tmp_path):
    """As MiMo-V2-Flash's, which stand in ``model.mtp.layers`` with projections of their own."""
    shutil.copytree(reference("exaone-moe").path, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    other = {f"model.mtp.layers.0.{part}.weight": torch.ones(4) for part in ("input_layernorm", "eh_proj", "enorm")}
    save_file(load_file(file) | other, file)
    with pytest.raises(LoadError, match=r"no head for tokens after the next: .*, or use another algorithm"):
        drive(tmp_path / "model", speculation=SETTINGS)
