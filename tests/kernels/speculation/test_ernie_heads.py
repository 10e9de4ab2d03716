"""The head for the token after the next of ERNIE 4.5's mixtures of experts: it drafts by its formula and changes no
token."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeDecoderLayer

from kernels.contract.speculation import SpeculativeSettings

SETTINGS = SpeculativeSettings("MTP", num_steps=3, topk=1, num_draft_tokens=4)


def with_head(model, path):
    """A copy of the checkpoint with a head, whose layer is the model's first one: it has no experts. -> the head's
    states [tokens, hidden] of tokens and the states before them."""
    shutil.copytree(model.path, path)
    config, hidden, inner = model.model.config, model.model.config.hidden_size, model.model.model
    torch.manual_seed(5)
    layer = Ernie4_5_MoeDecoderLayer(config, 0).eval()
    for parameter in layer.parameters():
        parameter.data.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.3)
    own = {"emb_norm": (hidden,), "hidden_norm": (hidden,), "linear_proj": (hidden, 2 * hidden)}
    parts = {part: torch.randn(shape) * 0.3 + (len(shape) == 1) for part, shape in own.items()}
    tensors = load_file(path / "model.safetensors")
    tensors |= {f"model.mtp_{part}.0.weight": value for part, value in parts.items()}
    tensors |= {f"model.mtp_block.0.{part}": value for part, value in layer.state_dict().items()}
    save_file({name: value.clone().contiguous() for name, value in tensors.items()}, path / "model.safetensors")

    def normed(x, part):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps) * parts[part]

    def run(tokens, states):
        both = normed(inner.embed_tokens(tokens), "emb_norm"), normed(states, "hidden_norm")
        x, count = (torch.cat(both, -1) @ parts["linear_proj"].t()).unsqueeze(0), len(tokens)
        places = inner.rotary_emb(x, torch.arange(count).unsqueeze(0))
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        out = layer(x, attention_mask=mask, position_embeddings=places)
        return (out[0] if isinstance(out, tuple) else out).view(count, -1)

    return run


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_head_drafts_its_formula_and_changes_no_token(dtype, reference, drive, prompts, tmp_path):
    model, (text,) = reference("ernie4.5-moe"), prompts(30, seed=3)
    run = with_head(model, tmp_path / "model")
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
