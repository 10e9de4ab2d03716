"""A driver that plays the scheduler's part for a ModelRunner, and small checkpoints of every family."""

from __future__ import annotations

import tests.kits.simulated_npu  # noqa: F401 - where torch_npu is installed, NPUs come before torch

# isort: split
import random
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from kernels.contract.config import RunnerConfig
from kernels.execution.runner import ModelRunner
from tests.kits.causal_models import causal_model
from tests.kits.driver import (
    COMMON,
    CONVOLUTIONS,
    DEEPSEEK,
    DELTA,
    DENSE,
    EXPERTS,
    FALCON,
    FAMILIES,
    GEMMA4,
    GPT_OSS,
    GRANITE_HYBRID,
    HYBRID,
    INDEXED,
    KIMI_LINEAR,
    LATENT,
    LFM2_EXPERTS,
    LFM3,
    NEMOTRON,
    QWEN4,
    ROUTED,
    SHARED,
    SPARSE,
    VOCAB,
    Driver,
    short_warm_up,
)
from tests.kits.gguf_models import GGUF_MODELS
from tests.kits.published import PUBLISHED, save_published
from tests.kits.published_names import PUBLISHED_NAMES
from tests.kits.renamed import RENAMED, save_renamed


@pytest.fixture(scope="session", autouse=True)
def _short_warm_up() -> Iterator[None]:
    with short_warm_up():
        yield


@pytest.fixture
def drive() -> Callable[..., Driver]:
    """Load a model directory and drive it."""

    def make(model_path: Path | str, seed: int = 0, **options: Any) -> Driver:
        options = {"dtype": "float32", "max_total_tokens": 4096, "max_slots": 17, "threads": 1} | options
        runner = ModelRunner(RunnerConfig(model_path=str(model_path), **options))
        return Driver(runner, runner.load(), seed)

    return make


DIVISIBLE: dict[str, tuple[str, dict[str, Any]]] = {  # by two; the first has one key head for both halves
    "parallel-llama": (
        "Llama",
        {"vocab_size": 212, "num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
    ),
    "parallel-qwen2": ("Qwen2", {"vocab_size": 212, "tie_word_embeddings": True}),
    "parallel-qwen3": ("Qwen3", {"vocab_size": 212, "head_dim": 16}),
    "parallel-moe": (  # native operators take its sizes
        "Qwen3Moe",
        EXPERTS | {"vocab_size": 212, "hidden_size": 64, "head_dim": 32, "norm_topk_prob": True},
    ),
    "parallel-shared": (
        "Qwen2Moe",
        SHARED | {"vocab_size": 212, "hidden_size": 64, "head_dim": 32, "num_attention_heads": 2},
    ),
}

DIVISIBLE |= {  # whose experts four ranks divide
    "placed-moe": ("Qwen3Moe", DIVISIBLE["parallel-moe"][1] | {"num_experts": 8, "num_key_value_heads": 2}),
    "placed-shared": ("Qwen2Moe", DIVISIBLE["parallel-shared"][1] | {"num_experts": 8}),
}

DIVISIBLE |= {
    "parallel-cohere": ("Cohere", {"vocab_size": 212, "use_qk_norm": True, "pad_token_id": 0}),
    "parallel-stablelm": ("StableLm", {"vocab_size": 212, "partial_rotary_factor": 0.5, "qk_layernorm": True}),
    "parallel-starcoder2": ("Starcoder2", {"vocab_size": 212, "sliding_window": 21}),
}

DIVISIBLE |= {
    "parallel-deepseek-v3": ("DeepseekV3", DEEPSEEK | {"vocab_size": 212}),
    "parallel-deepseek-v3.2": ("DeepseekV32", INDEXED | {"vocab_size": 212}),
    "parallel-gpt-oss": ("GptOss", GPT_OSS | {"vocab_size": 212}),
    "parallel-minicpm3": ("MiniCPM3", DEEPSEEK | {"vocab_size": 212, "pad_token_id": 0}),
}

DIVISIBLE |= {
    "parallel-qwen3-next": ("Qwen3Next", SHARED | DELTA | {"vocab_size": 212}),
    "parallel-qwen3.5": ("Qwen3_5Text", DELTA | {"vocab_size": 212}),
    "parallel-kimi-linear": ("KimiLinear", KIMI_LINEAR | {"vocab_size": 212}),
    "parallel-olmo-hybrid": ("OlmoHybrid", {"num_hidden_layers": 4, "pad_token_id": 0, "vocab_size": 212}),
}

DIVISIBLE |= {
    f"parallel-{name}": (family, options | {"vocab_size": 212})
    for name, (family, options) in (FAMILIES | SPARSE | DENSE | LATENT | ROUTED | HYBRID).items()
    if f"parallel-{name}" not in DIVISIBLE
}

DIVISIBLE |= {
    "parallel-falcon-h1": ("FalconH1", FALCON | {"vocab_size": 212, "mamba_rms_norm": True}),
    "parallel-granite-4": ("GraniteMoeHybrid", GRANITE_HYBRID | {"vocab_size": 212, "num_local_experts": 4}),
    "parallel-lfm2-moe": ("Lfm2Moe", CONVOLUTIONS | LFM2_EXPERTS | {"vocab_size": 212, "conv_bias": True}),
    "parallel-nemotron-3": ("NemotronH", NEMOTRON | {"vocab_size": 212, "moe_latent_size": 20}),
}

DIVISIBLE |= {
    "qwen4-plain": (  # without n-grams, with heads that are rotated as a whole
        "Qwen4ExpText",
        {key: value for key, value in QWEN4.items() if key not in ("ple_layer_ids", "rope_parameters")}
        | {"layer_types": [*2 * ["linear_attention", "full_attention"]], "indexer_head_dim": 20, "hc_count": 3}
        | {"output_gate_type": "sigmoid", "tie_word_embeddings": True, "norm_topk_prob": False},
    ),
    "mimo-v2-two-parts": ("MiMoV2Flash", ROUTED["mimo-v2-flash"][1] | {"num_key_value_heads": 2, "vocab_size": 212}),
    "lfm3-one-tap": ("Lfm3", LFM3 | {"conv_L_cache": 1}),
    "qwen4-one-index-head": (
        "Qwen4ExpText",
        {key: value for key, value in QWEN4.items() if key != "ple_layer_ids"} | {"indexer_n_heads": 1},
    ),
}

WIDE_LATENT = DEEPSEEK | {  # sizes that operators for latent attention take
    "num_hidden_layers": 2,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
DIVISIBLE |= {
    "wide-deepseek-v3": ("DeepseekV3", WIDE_LATENT),
    "gemma4-wide": (
        "Gemma4Text",
        GEMMA4
        | {"num_hidden_layers": 2, "num_kv_shared_layers": 0, "use_double_wide_mlp": False, "global_head_dim": 512}
        | {"layer_types": ["sliding_attention", "full_attention"]},
    ),
    "wide-kimi": ("DeepseekV3", WIDE_LATENT | {"rope_interleave": False, "n_group": 1, "topk_group": 1}),
    "wide-deepseek-v3.2": (
        "DeepseekV32",
        WIDE_LATENT | {"index_n_heads": 8, "index_head_dim": 128, "index_topk": 48, "norm_topk_prob": True},
    ),
    "wide-mistral-large4": (  # a layer with positions and one without
        "MistralLarge4Text",
        {key: size for key, size in WIDE_LATENT.items() if key != "q_lora_rank"}
        | {"index_n_heads": 8, "index_head_dim": 128, "index_topk": 48, "no_rope_layers": [1, 0]},
    ),
}
DIVISIBLE |= {
    f"parallel-{name}": (DIVISIBLE[name][0], DIVISIBLE[name][1] | {"vocab_size": 212})
    for name in ("wide-deepseek-v3", "wide-deepseek-v3.2")
}

WIDE_HEADS = {"vocab_size": 212, "hidden_size": 256, "head_dim": 128, "num_hidden_layers": 2}
DIVISIBLE |= {  # heads as large as those of published models
    "parallel-wide-qwen3": ("Qwen3", WIDE_HEADS | {"intermediate_size": 256}),
    "placed-wide-moe": ("Qwen3Moe", EXPERTS | WIDE_HEADS | {"num_experts": 8, "norm_topk_prob": True}),
}

SIXTEENS = {
    "hidden_size": 64,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "index_head_dim": 32,
}
DIVISIBLE |= {  # sizes that are multiples of 16, for weights in groups and blocks
    f"sixteens-{name}": (family, options | {key: size for key, size in SIXTEENS.items() if key in COMMON | options})
    for name, (family, options) in (LATENT | ROUTED | SPARSE).items()
}

DIVISIBLE |= {  # sizes for blocks of 16 and, in experts of two ranks, groups of 32
    "blocks-deepseek-v4": (
        "DeepseekV4",
        LATENT["deepseek-v4"][1]
        | {"hidden_size": 64, "q_lora_rank": 32, "o_lora_rank": 16, "vocab_size": 212}
        | {"moe_intermediate_size": 64, "intermediate_size": 64},
    ),
}

NATIVE: dict[str, tuple[str, dict[str, Any]]] = {  # whose sizes the CPU's native operators take
    "native-qwen3": (
        "Qwen3",
        {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "tie_word_embeddings": True},
    ),
    "native-mistral": ("Mistral", {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "sliding_window": 21}),
    "native-moe": DIVISIBLE["parallel-moe"],
    "native-latent": (
        "DeepseekV3",
        LATENT["deepseek-v3"][1]
        | {"hidden_size": 64, "intermediate_size": 96, "attention_bias": False}
        | {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32},
    ),
}


class Reference:
    """A transformers model and the directory it is saved in."""

    model: Any
    path: Path

    @cached_property
    def known(self) -> dict[tuple[int, ...], list[int]]:
        """Greedy tokens by their prompt."""
        return {}

    def __init__(self, name: str, directory: Path, **save: Any) -> None:
        import torch
        import transformers
        from safetensors.torch import save_file

        family, options = (FAMILIES | DENSE | HYBRID | LATENT | ROUTED | SPARSE | DIVISIBLE | NATIVE | GGUF_MODELS)[
            name
        ]
        if not hasattr(transformers, f"{family}Config"):
            pytest.skip(f"transformers {transformers.__version__} has no {family}")
        torch.manual_seed(sum(name.encode()))
        config = getattr(transformers, f"{family}Config")(**deepcopy(COMMON | options))  # which it may change
        if "rotary_dim" in options and "partial_rotary_factor" not in config.rope_parameters:
            pytest.skip(f"transformers {transformers.__version__} rotates whole heads of {family}")
        model = causal_model(family)(config).eval()
        if options.get("attention_chunk_size", 1) is None:
            try:
                model(torch.tensor([[0]]))
            except (TypeError, ValueError):  # which versions before it was optional raise
                pytest.skip(f"transformers {transformers.__version__} has no {family} without chunks")
        for part, parameter in model.named_parameters():  # far from uniform predictions, biases and norms that count
            parameter.data.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.3)
            if part.endswith("A_log"):  # states that remember some tens of tokens
                parameter.data.sub_(4.0)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.normal_(0.0, 0.3)
            elif name.endswith("tid2eid"):
                experts = model.config.n_routed_experts
                buffer.copy_(torch.rand(len(buffer), experts).argsort(1)[:, : buffer.shape[1]])
            elif name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
        model.save_pretrained(directory, **save)
        if family in PUBLISHED_NAMES:
            tensors = PUBLISHED_NAMES[family](model.config, model.state_dict())
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
        self.model, self.path = model, directory

    def logprobs(self, tokens: Sequence[int]) -> Any:
        """float32 [tokens, vocab]"""
        import torch

        with torch.inference_mode():
            return self.model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)

    def greedy(self, prompt: Sequence[int], length: int) -> list[int]:
        """``length`` token ids: the prompt, then the tokens of greedy decoding. They are kept for the next call."""
        known = self.known.setdefault(tuple(prompt), list(prompt))
        while len(known) < length:
            likely = self.guess(known, length)
            found = self.logprobs([*known, *likely])[len(known) - 1 :].argmax(-1).tolist()
            agreed = next((place for place, token in enumerate(likely) if token != found[place]), len(likely))
            known += found[: agreed + 1]
        return known[:length]

    def guess(self, known: list[int], length: int) -> list[int]:
        """The tokens that follow, up to ``length`` without the last, by transformers' cache of what came before: faster
        than a forward pass over all of them for each, and wrong in some families."""
        import torch

        name = "cache" if "cache" in signature(self.model.forward).parameters else "past_key_values"
        cache, fresh, tokens = None, known, list[int]()
        with torch.inference_mode():
            while len(known) + len(tokens) < length - 1:
                found = self.model(torch.tensor([fresh]), use_cache=True, **{name: cache})
                cache, fresh = getattr(found, name), [int(found.logits[0, -1].argmax())]
                tokens += fresh
        return tokens

    def continues(self, prompt: Sequence[int], tokens: Sequence[int]) -> bool:
        """Whether greedy decoding of the prompt gives ``tokens``, by one forward pass over both. They are kept for
        ``greedy`` if so."""
        text = [*prompt, *tokens]
        right = list(tokens) == self.logprobs(text[:-1])[len(prompt) - 1 :].argmax(-1).tolist()
        if right and len(text) > len(self.known.get(tuple(prompt), ())):
            self.known[tuple(prompt)] = text
        return right


class PublishedReference(Reference):
    """A model of a family that transformers lacks, by a description in plain torch."""

    def __init__(self, name: str, directory: Path) -> None:
        vocab, own = (212 if name.startswith("parallel-") else 0), name.removeprefix("parallel-")
        self.path, self.forward = directory, save_published(own, directory, vocab)

    def logprobs(self, tokens: Sequence[int]) -> Any:
        """float32 [tokens, vocab]"""
        import torch

        with torch.inference_mode():
            return self.forward(torch.tensor(tokens)).log_softmax(-1)

    def guess(self, known: list[int], length: int) -> list[int]:
        return []


class RenamedReference(Reference):
    """A model of a family that is another one's decoder under the vendor's names."""

    def __init__(self, name: str, directory: Path) -> None:
        self.path, self.model = directory, save_renamed(RENAMED[name], directory, VOCAB)


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    """A family's model by name, made once."""
    made: dict[str, Reference] = {}

    def get(name: str) -> Reference:
        if name not in made:
            kind = PublishedReference if name.removeprefix("parallel-") in PUBLISHED else Reference
            made[name] = (RenamedReference if name in RENAMED else kind)(name, tmp_path_factory.mktemp(name))
        return made[name]

    return get


@pytest.fixture
def prompts() -> Callable[..., list[list[int]]]:
    """Seeded prompts of the given lengths."""

    def make(*lengths: int, seed: int = 1) -> list[list[int]]:
        generator = random.Random(seed)
        return [[generator.randrange(VOCAB) for _ in range(length)] for length in lengths]

    return make
