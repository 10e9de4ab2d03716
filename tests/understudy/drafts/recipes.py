"""The sizes of every draft, its first weights, and its files."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from app.understudy.drafts import DRAFTS
from tests.understudy.drafts.decoder import Decoder
from tests.understudy.drafts.dflash import DFlash
from tests.understudy.drafts.heads import Eagle, Eagle3, Mtp
from tests.understudy.drafts.students import Draft
from tests.understudy.lexicon import CONFIG

__all__ = ["CONFIGS", "create", "load_draft", "save_draft"]

_SAME = (
    "vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
    "rms_norm_eps", "rope_theta", "rope_scaling", "max_position_embeddings", "attention_bias", "attention_dropout",
    "initializer_range", "torch_dtype",
)  # fmt: skip
_SHARED = {key: CONFIG[key] for key in _SAME} | {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}

CONFIGS: dict[str, dict[str, Any]] = {
    "eagle": _SHARED
    | {
        "architectures": ["LlamaForCausalLMEagle"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "intermediate_size": 192,
        "bias": False,
        "tie_word_embeddings": False,
    },
    "eagle3": _SHARED
    | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "intermediate_size": 192,
        "tie_word_embeddings": False,
        "draft_vocab_size": 2048,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 7], "use_aux_hidden_state": True},
    },
    "mtp": _SHARED
    | {
        "architectures": ["MiMoMTP"],
        "model_type": "mimo",
        "num_hidden_layers": CONFIG["num_hidden_layers"],
        "num_nextn_predict_layers": 1,
        "intermediate_size": 192,
        "tie_word_embeddings": True,
    },
    "multi_mtp": _SHARED
    | {
        "architectures": ["MiMoMTP"],
        "model_type": "mimo",
        "num_hidden_layers": CONFIG["num_hidden_layers"],
        "num_nextn_predict_layers": 3,
        "intermediate_size": 192,
        "tie_word_embeddings": True,
    },
    "dflash": _SHARED
    | {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 3,
        "intermediate_size": 160,
        "tie_word_embeddings": True,
        "block_size": 16,
        "num_target_layers": CONFIG["num_hidden_layers"],
        "dflash_config": {"mask_token_id": 0, "target_layer_ids": [3, 7]},
    },
    "standalone": _SHARED
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
    },
}
"""The config.json of each draft, by the name of its directory."""

_CLASSES: dict[str, type[Draft]] = {
    "eagle": Eagle,
    "eagle3": Eagle3,
    "mtp": Mtp,
    "multi_mtp": Mtp,
    "dflash": DFlash,
    "standalone": Decoder,
}


def create(name: str, target: Decoder, counts: Any, seed: int) -> Draft:
    """A new draft on the processor. `counts`: how often each token is written, from which EAGLE-3 takes its own."""
    torch.manual_seed(seed)
    draft = _CLASSES[name](CONFIGS[name])
    for weight in draft.parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, std=0.5 * weight.shape[1] ** -0.5)
    norm = target.model.norm.weight.detach().float().cpu()
    with torch.no_grad():
        if isinstance(draft, Eagle3):
            most = torch.from_numpy(counts.argsort(kind="stable")[::-1].copy())[: CONFIGS[name]["draft_vocab_size"]]
            draft.choose(most.sort().values)
            draft.lm_head.weight.copy_(target.embedding.detach().float().cpu()[draft.vocabulary])
            draft.norm.weight.copy_(norm)
        elif isinstance(draft, Mtp) and len(draft.layers) > 1:  # each goes on from the one that every step runs
            trained = load_draft(DRAFTS / "mtp", "cpu")
            assert isinstance(trained, Mtp)
            for layer in draft.layers:
                layer.load_state_dict(trained.layer.state_dict())
        elif isinstance(draft, Mtp):
            draft.layer.final_layernorm.weight.copy_(norm)
        elif isinstance(draft, DFlash):
            draft.norm.weight.copy_(norm)
        elif isinstance(draft, Decoder):
            torch.nn.init.normal_(draft.embedding, std=0.02)
    return draft


def save_draft(draft: Draft, directory: Path) -> None:
    """Write config.json and model.safetensors, in bfloat16."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for name, tensor in draft.state_dict().items():
        stored = tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        tensors[f"{getattr(draft, 'prefix', '')}{name}"] = stored.cpu().contiguous()
    save_file(tensors, str(directory / "model.safetensors"), metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(draft.config, indent=2) + "\n", encoding="utf-8")


def load_draft(directory: Path, device: str) -> Draft:
    """A draft as it was saved, frozen, in float32 (on a GPU run it under autocast)."""
    draft = _CLASSES[directory.name](json.loads((directory / "config.json").read_text(encoding="utf-8")))
    prefix = getattr(draft, "prefix", "")
    tensors = load_file(str(directory / "model.safetensors"))
    draft.load_state_dict({name.removeprefix(prefix): tensor for name, tensor in tensors.items()})
    draft.float().to(device).requires_grad_(False).eval()
    return draft
