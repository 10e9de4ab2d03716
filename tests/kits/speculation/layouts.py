"""Seeded draft heads in every public layout, and the same in plain torch."""

from __future__ import annotations

import json

import torch
from torch.nn.functional import linear

from kernels.speculation.drafters.eagle import Eagle3Drafter, EagleDrafter
from kernels.speculation.drafters.mtp import MtpDrafter
from tests.kits.speculation.drafting import CONFIG, HIDDEN, VOCAB, Plain, causal, layer, make_target, seeded, write

DRAFT_VOCAB = 40


class PlainEagle(Plain):
    """``target``: the target's weights. ``ids``: the target's id of each of the draft's tokens."""

    def __init__(self, weights, target, ids=None):
        super().__init__(weights)
        self.target = target
        self.ids = torch.arange(VOCAB) if ids is None else ids

    def embed(self, tokens):
        return self.weights.get("embed_tokens.weight", self.target["model.embed_tokens.weight"])[tokens]

    def first(self, features):
        """The head's input states for the target's features."""
        return features

    def run(self, tokens, states):
        joined = torch.cat((self.embed(tokens), states), 1)
        x = linear(joined, self.weights["fc.weight"], self.weights.get("fc.bias"))
        for prefix in ("layers.0", "layers.1"):
            norm = f"{prefix}.input_layernorm.weight"
            if prefix == "layers.0" or norm in self.weights:
                normed = self.norm(x, norm) if norm in self.weights else x
                x = self.layer(prefix, normed, x, torch.arange(len(x)), causal(len(x)))
        return x

    def head(self, states):
        return linear(states, self.target["model.embed_tokens.weight"])[:, self.ids]

    def after(self, features, tokens, path):
        """Log-probabilities of the next token after ``tokens`` and the draft tokens of ``path``, computed from scratch.
        ``features``: of all tokens but the last.
        """
        states, read = self.first(features), tokens[1:]
        for token in [*path, None]:
            found = self.run(read, states)
            if token is None:
                return self.head(found[-1:])[0].log_softmax(-1)
            states, read = torch.cat((states, found[-1:])), torch.cat((read, torch.tensor([token])))


class PlainEagle3(PlainEagle):
    prefix = "midlayer"

    def first(self, features):
        return linear(features, self.weights["fc.weight"])

    def run(self, tokens, states):
        token = self.norm(self.embed(tokens), f"{self.prefix}.input_layernorm.weight")
        x = torch.cat((token, self.norm(states, f"{self.prefix}.hidden_norm.weight")), 1)
        return self.layer(self.prefix, x, states, torch.arange(len(x)), causal(len(x)))

    def head(self, states):
        return linear(self.norm(states, "norm.weight"), self.weights["lm_head.weight"])


class PlainEagle3Layers(PlainEagle3):
    prefix = "layers.0"


class PlainMimo(PlainEagle):
    def run(self, tokens, states, prefix="mtp_layers.0"):
        token = self.norm(self.embed(tokens), f"{prefix}.token_layernorm.weight")
        joined = torch.cat((self.norm(states, f"{prefix}.hidden_layernorm.weight"), token), 1)
        x = linear(joined, self.weights[f"{prefix}.input_proj.weight"])
        normed = self.norm(x, f"{prefix}.input_layernorm.weight")
        x = self.layer(prefix, normed, x, torch.arange(len(x)), causal(len(x)))
        return self.norm(x, f"{prefix}.final_layernorm.weight")


class PlainDeepSeek(PlainEagle):
    def run(self, tokens, states, prefix="layers.6"):
        token = self.norm(self.embed(tokens), f"{prefix}.enorm.weight")
        joined = torch.cat((token, self.norm(states, f"{prefix}.hnorm.weight")), 1)
        x = linear(joined, self.weights[f"{prefix}.eh_proj.weight"])
        normed = self.norm(x, f"{prefix}.input_layernorm.weight")
        x = self.layer(prefix, normed, x, torch.arange(len(x)), causal(len(x)))
        return self.norm(x, f"{prefix}.shared_head.norm.weight")


def eagle_shapes(**options):
    return {"fc.weight": (HIDDEN, 2 * HIDDEN), **layer("layers.0", input_norm=False, **options)}


def eagle3_shapes(prefix="midlayer", vocab=DRAFT_VOCAB):
    return {
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        **layer(prefix, 2 * HIDDEN),
        f"{prefix}.hidden_norm.weight": (HIDDEN,),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (vocab, HIDDEN),
    }


def mimo_shapes(prefix="mtp_layers.0", **options):
    norms = ("token_layernorm", "hidden_layernorm", "final_layernorm")
    return {
        **layer(prefix, **options),
        **{f"{prefix}.{norm}.weight": (HIDDEN,) for norm in norms},
        f"{prefix}.input_proj.weight": (HIDDEN, 2 * HIDDEN),
    }


def deepseek_shapes(prefix="layers.6", **options):
    return {
        **layer(prefix, **options),
        **{f"{prefix}.{norm}.weight": (HIDDEN,) for norm in ("enorm", "hnorm", "shared_head.norm")},
        f"{prefix}.eh_proj.weight": (HIDDEN, 2 * HIDDEN),
    }


def draft_map():
    """d2t, t2d, and the target's ids."""
    ids = torch.arange(DRAFT_VOCAB) * 2 + 1
    return {
        "d2t": ids - torch.arange(DRAFT_VOCAB),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, ids, True),
    }, ids


DRAFT = CONFIG | {"num_hidden_layers": 1, "architectures": ["LlamaForCausalLM"]}
EAGLE3 = DRAFT | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": DRAFT_VOCAB,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 5]},
}


def renamed(weights):
    plain = ("lm_head.weight", "d2t", "t2d")
    return {name if name in plain else f"model.{name}": part for name, part in weights.items()}


def make_layout(name, folder):
    """-> drafter class, algorithm, the target's directory, the draft's (None: the target's own), features' width, and
    the same in plain torch."""
    (folder / "target").mkdir()
    target, own = make_target(folder / "target", num_nextn_predict_layers=1)
    draft = folder / "draft"
    match name:
        case "eagle" | "eagle-token-map":
            weights = seeded(eagle_shapes(), 21)
            write(draft, DRAFT, weights)
            return EagleDrafter, "EAGLE", target, draft, HIDDEN, PlainEagle(weights, own)
        case "eagle-two-layers":  # with biases, embeddings of its own, and model. before names
            shapes = eagle_shapes() | layer("layers.1") | {"fc.bias": (HIDDEN,), "embed_tokens.weight": (VOCAB, HIDDEN)}
            weights = seeded(shapes | {"layers.0.input_layernorm.weight": (HIDDEN,)}, 22)
            write(draft, DRAFT | {"num_hidden_layers": 2}, renamed(weights))
            return EagleDrafter, "EAGLE", target, draft, HIDDEN, PlainEagle(weights, own)
        case "eagle3":
            maps, ids = draft_map()
            weights = seeded(eagle3_shapes(), 23)
            write(draft, EAGLE3, weights | maps)
            return Eagle3Drafter, "EAGLE3", target, draft, 3 * HIDDEN, PlainEagle3(weights, own, ids)
        case "eagle3-layers":  # the whole vocabulary, embeddings of its own, the other name
            weights = seeded(eagle3_shapes("layers.0", VOCAB) | {"embed_tokens.weight": (VOCAB, HIDDEN)}, 24)
            write(draft, EAGLE3 | {"draft_vocab_size": VOCAB}, renamed(weights))
            return Eagle3Drafter, "EAGLE3", target, draft, 3 * HIDDEN, PlainEagle3Layers(weights, own)
        case "mimo":
            weights = seeded(mimo_shapes(bias=True), 25)
            write(draft, DRAFT | {"num_nextn_predict_layers": 1}, renamed(weights))
            return MtpDrafter, "MTP", target, draft, HIDDEN, PlainMimo(weights, own)
        case "mimo-inside":  # in the target's checkpoint
            target, own = make_target(folder / "target", architectures=["MiMoForCausalLM"], num_nextn_predict_layers=1)
            weights = seeded(mimo_shapes(bias=True), 28)
            write(target, json.loads((target / "config.json").read_text()), own | renamed(weights))
            return MtpDrafter, "MTP", target, None, HIDDEN, PlainMimo(weights, own)
        case "deepseek":  # in the target's checkpoint
            weights = seeded(deepseek_shapes(head_norms=True), 26)
            copies = {"embed_tokens.weight": (VOCAB, HIDDEN), "shared_head.head.weight": (VOCAB, HIDDEN)}
            copied = seeded({f"layers.6.{name}": shape for name, shape in copies.items()}, 27)
            write(target, CONFIG | {"num_nextn_predict_layers": 1}, own | renamed(weights | copied))
            return MtpDrafter, "MTP", target, None, HIDDEN, PlainDeepSeek(weights, own)
    raise ValueError(name)
