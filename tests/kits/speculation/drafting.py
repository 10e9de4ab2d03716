"""A drafter without a runner, a small target, and a decoder's layers in plain torch."""

from __future__ import annotations

import json

import numpy as np
import torch
from safetensors.torch import save_file
from torch.nn.functional import linear, silu, softmax

from kernels.contract.config import RunnerConfig
from kernels.contract.speculation import SpeculativeSettings
from kernels.contract.step import Admission, SlotSampling
from kernels.distributed.group import Group
from kernels.models.config_loader import read_config
from kernels.models.layers.builder import ModelBuilder
from kernels.models.registry import build, tensors
from kernels.sampling.sampler import Noise
from kernels.speculation.drafter import DrafterContext, DraftRows, Observation
from kernels.weights.loading import CheckpointFiles, Placement, open_weights
from tests.kits.declared import shapes_of
from tests.kits.speculation.paged import Paged

VOCAB, HIDDEN, HEADS, KV_HEADS, DIM, INNER, EPS, THETA = 96, 32, 4, 2, 16, 48, 1e-6, 10000.0
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 6,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "max_position_embeddings": 256,
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


def seeded(shapes, seed):
    """Weights of significant size, norms near one."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * (0.3 if len(shape) == 1 else 0.25) + (len(shape) == 1)
        for name, shape in shapes.items()
    }


def write(directory, config, weights):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, directory / "model.safetensors")
    return directory


def make_target(directory, seed=11, **overrides):
    """-> the directory and its weights."""
    (directory / "config.json").write_text(json.dumps(CONFIG | overrides))
    weights = seeded(shapes_of(directory), seed)
    return write(directory, CONFIG | overrides, weights), weights


def layer(prefix, inputs=HIDDEN, input_norm=True, head_norms=False, bias=False):
    """The shapes of a decoder's layer."""
    queries, keys = HEADS * DIM, KV_HEADS * DIM
    shapes = {
        f"{prefix}.self_attn.q_proj.weight": (queries, inputs),
        f"{prefix}.self_attn.k_proj.weight": (keys, inputs),
        f"{prefix}.self_attn.v_proj.weight": (keys, inputs),
        f"{prefix}.self_attn.o_proj.weight": (HIDDEN, queries),
        f"{prefix}.post_attention_layernorm.weight": (HIDDEN,),
        f"{prefix}.mlp.gate_proj.weight": (INNER, HIDDEN),
        f"{prefix}.mlp.up_proj.weight": (INNER, HIDDEN),
        f"{prefix}.mlp.down_proj.weight": (HIDDEN, INNER),
    }
    if input_norm:
        shapes[f"{prefix}.input_layernorm.weight"] = (HIDDEN,)
    if head_norms:
        shapes |= {f"{prefix}.self_attn.{part}_norm.weight": (DIM,) for part in "qk"}
    if bias:
        shapes |= {f"{prefix}.self_attn.{part}_proj.bias": (queries if part == "q" else keys,) for part in "qkv"}
    return shapes


class Plain:
    """Layers in plain torch, over whole sequences."""

    def __init__(self, weights):
        self.weights = weights

    def norm(self, x, name):
        return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * self.weights[name]

    def heads(self, x, name, part, positions):
        """[tokens, heads, dim], normed and rotated if the layer does so."""
        heads = linear(x, self.weights[f"{name}.{part}_proj.weight"], self.weights.get(f"{name}.{part}_proj.bias"))
        heads = heads.view(len(x), -1, DIM)
        if part == "v":
            return heads
        if f"{name}.{part}_norm.weight" in self.weights:
            heads = self.norm(heads, f"{name}.{part}_norm.weight")
        angles = positions.float()[:, None] * THETA ** (-torch.arange(0, DIM, 2).float() / DIM)
        cos, sin = torch.cat((angles, angles), 1).cos()[:, None], torch.cat((angles, angles), 1).sin()[:, None]
        low, high = heads.chunk(2, -1)
        return heads * cos + torch.cat((-high, low), -1) * sin

    def layer(self, prefix, x, residual, positions, mask, context=None):
        """``context``: (x, positions) of tokens that are only attended to, before the others in ``mask``. -> the sum"""
        name = f"{prefix}.self_attn"
        queries = self.heads(x, name, "q", positions)
        keys, values = (self.heads(x, name, part, positions) for part in "kv")
        if context is not None:
            keys, values = (
                torch.cat((self.heads(context[0], name, part, context[1]), own))
                for part, own in zip("kv", (keys, values), strict=True)
            )
        group = HEADS // KV_HEADS
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * DIM**-0.5
        found = torch.einsum("hqk,khd->qhd", softmax(scores.masked_fill(~mask, -torch.inf), -1), values)
        residual = residual + linear(found.reshape(len(x), -1), self.weights[f"{name}.o_proj.weight"])
        x = self.norm(residual, f"{prefix}.post_attention_layernorm.weight")
        gate, up = (linear(x, self.weights[f"{prefix}.mlp.{part}_proj.weight"]) for part in ("gate", "up"))
        return residual + linear(silu(gate) * up, self.weights[f"{prefix}.mlp.down_proj.weight"])


class Drafting:
    """A drafter's part of a runner: tokens and features by row, observed and drafted from. Row r has slot r + 1."""

    def __init__(self, make, target, width, rows=3, **settings):
        load_format = settings.pop("target_format", "auto")
        self.settings = SpeculativeSettings(**settings)
        self.config = RunnerConfig(model_path=str(target), max_slots=rows + 1, page_size=16, load_format=load_format)
        self.paged = Paged(rows=rows, pages=6)
        whole = read_config(target)
        platform, dtype = self.paged.platform, torch.float32
        files, placement = CheckpointFiles(str(target), load_format), Placement(dtype, platform.torch_device)
        source = open_weights(files, tensors(whole), placement)
        decoder = build(whole, ModelBuilder(source, platform, Group(), dtype))
        self.drafter = make(
            DrafterContext(self.config, self.settings, platform, Group(), decoder, whole, whole, dtype, 256)
        )
        self.drafter.make_caches(self.paged.num_pages)
        generator = torch.Generator().manual_seed(5)
        self.tokens = torch.randint(VOCAB, (rows, 90), generator=generator)
        self.features = torch.randn(rows, 90, width, generator=generator)
        self.seen = [0] * rows

    @property
    def table(self):
        """Tokens by slot; those after the known ones are garbage."""
        known = torch.full((len(self.tokens) + 1, 90), 7, dtype=torch.int32)
        for row, seen in enumerate(self.seen):
            known[row + 1, : seen + 1] = self.tokens[row, : seen + 1]
        return known

    def admit(self, row, computed=0):
        """Admit another request to the row. ``computed``: tokens in cached pages."""
        slot = Admission(row + 1, 1, b"", 1, computed, b"", SlotSampling())
        self.drafter.admit(slot, np.empty(0, dtype=np.int32))
        self.seen[row] = computed

    def observe(self, *chunks):
        """``chunks``: (row, count) each."""
        spans = [(row, self.seen[row], count) for row, count in chunks]
        for row, count in chunks:
            self.seen[row] += count
        rows, starts, counts = (np.array(part, dtype=np.int64) for part in zip(*spans, strict=True))
        batch = self.paged.batch(spans, self.join(self.tokens, spans, 0))
        self.drafter.observe(
            Observation(
                slots=rows + 1,
                starts=starts,
                counts=counts,
                pages=self.paged.pages[rows],
                capacity=np.full(len(rows), 96),
                reached=np.ones(len(rows), dtype=np.bool_),
                token_ids=batch.token_ids,
                next_tokens=self.join(self.tokens, spans, 1),
                positions=batch.positions,
                cache_index=batch.cache_index,
                features=self.join(self.features, spans, 0),
                last=torch.from_numpy(np.cumsum(counts) - 1),
                device_slots=torch.from_numpy(rows + 1),
                table=self.table,
            )
        )

    def join(self, what, spans, ahead):
        return torch.cat([what[row, start + ahead : start + count + ahead] for row, start, count in spans])

    def draft(self, *rows, limits=None, steps=None, noise=None, capacity=96):
        """-> the tokens and parents of the nodes to verify of each row's tree."""
        rows = np.array(rows)
        roots = np.array([self.seen[row] for row in rows])
        drafts = self.drafter.draft(
            DraftRows(
                slots=rows + 1,
                roots=roots,
                pages=self.paged.pages[rows],
                capacity=np.full(len(rows), capacity),
                limits=np.array(limits or [63] * len(rows)),
                root_tokens=torch.stack([self.tokens[row, root] for row, root in zip(rows, roots, strict=True)]),
                root_positions=torch.from_numpy(roots),
                device_slots=torch.from_numpy(rows + 1),
                table=self.table,
                noise=None if noise is None else Noise(*noise),
                steps=steps or self.settings.num_steps,
            )
        )
        tree = drafts.tree
        return [
            (tree.tokens[row, :count].tolist(), tree.parents[row, :count].tolist())
            for row, count in enumerate(drafts.nodes.tolist())
        ]


def causal(count):
    return torch.ones(count, count).tril().bool()


def drafted(driver, text, settings, steps=5):
    """Drive ``text`` on. -> the drafts: roots and their tokens."""
    drafter, result = driver.runner._loaded.speculator.drafter, []
    draft = drafter.draft

    def spy(rows):
        found = draft(rows)
        result.append((int(rows.roots[0]), found.tree.tokens[0, 1:].tolist()))
        return found

    drafter.draft = spy
    driver.admit(1, text)
    driver.step([(1, len(text))])
    for _ in range(steps):
        driver.step([(1, 1)], drafts={1: settings.num_steps})
    return result
