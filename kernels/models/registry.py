"""The model families, by architecture. A family is one file, imported when a model of it is opened.

To add a family: write its file and add one line to ``BUILT_IN``. A distribution adds one without a change here through
the entry point group ``troupe.models``: the entry's name is the architecture, its value the module. GGUF files are read
for it where the module has ``GGUF``, the name in ``general.architecture``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from kernels.contract.caches import Paged, keep_all
from kernels.contract.errors import ConfigError
from kernels.weights.wrapped import WRAPPER

if TYPE_CHECKING:
    from kernels.contract.caches import CacheGroup
    from kernels.models.config import ConfigReader, ModelConfig
    from kernels.models.decoder import Decoder
    from kernels.models.encoder import Encoder
    from kernels.models.layers.builder import ModelBuilder
    from kernels.weights.tensors import Tensors, TensorSpec

__all__ = [
    "BIDIRECTIONAL",
    "BUILT_IN",
    "GROUP",
    "HEADS",
    "LANGUAGE_MODELS",
    "LANGUAGE_MODEL_SIZES",
    "Entry",
    "Family",
    "Support",
    "UnknownArchitecture",
    "base_architecture",
    "build",
    "caches",
    "entries",
    "families",
    "find",
    "find_encoder",
    "find_gguf",
    "has_family",
    "is_decoder",
    "language_architecture",
    "tensors",
]

GROUP = "troupe.models"


class UnknownArchitecture(ConfigError):
    """No family has the architectures of config.json. ``named``: which these are; ``known``: those of all families."""

    def __init__(self, names: list[object], known: Iterable[str]) -> None:
        self.named = f"no supported architecture in config.json (architectures: {names})"
        self.known = f"supported are {', '.join(sorted(known))}"
        super().__init__(f"{self.named}; {self.known}")


class Family(Protocol):
    """The functions that the module of a family must have."""

    def config(self, raw: ConfigReader) -> ModelConfig:
        """The sizes in config.json. Raises ConfigError, naming the key."""
        ...

    def tensors(self, config: ModelConfig) -> Iterator[TensorSpec]:
        """Every tensor of a checkpoint of these sizes."""
        ...

    def caches(self, config: ModelConfig) -> tuple[CacheGroup, ...]:
        """The caches of the layers, on one rank of these sizes."""
        ...

    def build(self, config: ModelConfig, builder: ModelBuilder) -> Decoder | Encoder:
        """The decoder of one rank, whose sizes are ``config``, or an encoder."""
        ...


@dataclass(frozen=True)
class Entry:
    """An architecture: its family's module, and what must be known of it without torch.

    ``encoder``: whether an input runs whole and nothing is cached. ``padded_positions``: of an encoder whose first
    position stands behind that of padding. ``positions``: of an encoder, if config.json does not say. ``end``: of an
    encoder whose vectors are the ``state`` of the token that ends a text, or its ``projection``; "": of others.

    ``gguf``: its name in GGUF files; "": none. ``gguf_experts``: only of files with experts. ``gguf_shared_expert``:
    all tokens take one more expert, and the weights of chosen experts are not normalized. ``gguf_window``: whether the
    window of the key ``attention.sliding_window`` is ``used`` or ``ignored``.
    """

    architecture: str
    module: str
    encoder: bool = False
    padded_positions: bool = False
    positions: int = 512
    end: Literal["", "state", "projection"] = ""
    gguf: str = ""
    gguf_experts: bool = False
    gguf_shared_expert: bool = False
    gguf_window: Literal["used", "ignored"] = "used"


def _encoders(name: str, module: str, padded_positions: bool = False, positions: int = 512) -> tuple[Entry, ...]:
    """The forms of an encoder. The one that was trained to fill gaps embeds, too."""
    forms = ("Model", "ForMaskedLM", "ForSequenceClassification")
    return tuple(
        Entry(name + form, module, encoder=True, padded_positions=padded_positions, positions=positions)
        for form in forms
    )


BUILT_IN = (
    Entry("AfmoeForCausalLM", "kernels.models.afmoe", gguf="afmoe", gguf_experts=True),
    Entry("ApertusForCausalLM", "kernels.models.apertus", gguf="apertus"),
    Entry("ArceeForCausalLM", "kernels.models.arcee", gguf="arcee"),
    Entry("BaiChuanForCausalLM", "kernels.models.baichuan"),
    Entry("BaichuanForCausalLM", "kernels.models.baichuan", gguf="baichuan"),
    Entry("BailingHybridForCausalLM", "kernels.models.bailing_hybrid"),
    Entry("BailingMoeForCausalLM", "kernels.models.bailing_moe", gguf="bailingmoe", gguf_experts=True),
    Entry("BailingMoeV2ForCausalLM", "kernels.models.bailing_moe", gguf="bailingmoe2", gguf_experts=True),
    Entry("BailingMoeV3ForCausalLM", "kernels.models.bailing_hybrid"),
    Entry("BambaForCausalLM", "kernels.models.bamba"),
    *_encoders("Bert", "kernels.models.bert"),
    Entry("ChatGLMForConditionalGeneration", "kernels.models.chatglm"),
    Entry("ChatGLMModel", "kernels.models.chatglm"),
    Entry("CLIPModel", "kernels.models.clip", encoder=True, positions=77, end="projection"),
    Entry("CLIPTextModel", "kernels.models.clip", encoder=True, positions=77, end="state"),
    Entry("CLIPTextModelWithProjection", "kernels.models.clip", encoder=True, positions=77, end="projection"),
    Entry("Cohere2ForCausalLM", "kernels.models.cohere2", gguf="cohere2"),
    Entry("Cohere2MoeForCausalLM", "kernels.models.cohere2_moe", gguf="cohere2moe", gguf_experts=True),
    Entry("CohereForCausalLM", "kernels.models.cohere", gguf="command-r"),
    Entry("DbrxForCausalLM", "kernels.models.dbrx", gguf="dbrx", gguf_experts=True),
    Entry("DeepseekV2ForCausalLM", "kernels.models.deepseek_v2", gguf="deepseek2", gguf_experts=True),
    Entry("DeepseekV3ForCausalLM", "kernels.models.deepseek_v3", gguf="deepseek2", gguf_experts=True),
    Entry("DeepseekV32ForCausalLM", "kernels.models.deepseek_v32", gguf="deepseek32", gguf_experts=True),
    Entry("DeepseekV4ForCausalLM", "kernels.models.deepseek_v4"),
    Entry("Ernie4_5_MoeForCausalLM", "kernels.models.ernie4_5_moe", gguf="ernie4_5-moe", gguf_experts=True),
    Entry("ExaoneForCausalLM", "kernels.models.exaone", gguf="exaone"),
    Entry("Exaone4ForCausalLM", "kernels.models.exaone4", gguf="exaone4"),
    Entry("ExaoneMoEForCausalLM", "kernels.models.exaone_moe"),
    Entry("ExaoneMoeForCausalLM", "kernels.models.exaone_moe", gguf="exaone-moe", gguf_experts=True),
    Entry("FalconForCausalLM", "kernels.models.falcon"),
    Entry("FalconH1ForCausalLM", "kernels.models.falcon_h1", gguf="falcon-h1"),
    Entry("Gemma2ForCausalLM", "kernels.models.gemma2", gguf="gemma2"),
    Entry("Gemma3ForCausalLM", "kernels.models.gemma3", gguf="gemma3"),
    Entry("Gemma4ForCausalLM", "kernels.models.gemma4", gguf="gemma4"),
    Entry("GemmaForCausalLM", "kernels.models.gemma", gguf="gemma"),
    Entry("Glm4ForCausalLM", "kernels.models.glm4", gguf="glm4"),
    Entry("Glm4MoeForCausalLM", "kernels.models.glm4_moe", gguf="glm4moe", gguf_experts=True),
    Entry("Glm4MoeLiteForCausalLM", "kernels.models.glm4_moe_lite", gguf="deepseek2", gguf_experts=True),
    Entry("GlmForCausalLM", "kernels.models.glm", gguf="chatglm"),
    Entry("GlmMoeDsaForCausalLM", "kernels.models.glm_moe_dsa", gguf="glm-dsa", gguf_experts=True),
    Entry("GptOssForCausalLM", "kernels.models.gpt_oss", gguf="gpt-oss", gguf_experts=True),
    Entry("GraniteForCausalLM", "kernels.models.granite", gguf="granite"),
    Entry("GraniteMoeForCausalLM", "kernels.models.granite_moe", gguf="granitemoe", gguf_experts=True),
    Entry("GraniteMoeHybridForCausalLM", "kernels.models.granite_moe_hybrid", gguf="granitehybrid"),
    Entry("Grok1ForCausalLM", "kernels.models.grok", gguf="grok", gguf_experts=True),
    Entry("HYV4ForCausalLM", "kernels.models.hunyuan_v4"),
    Entry("HunYuanDenseV1ForCausalLM", "kernels.models.hunyuan", gguf="hunyuan-dense"),
    Entry("HunYuanMoEV1ForCausalLM", "kernels.models.hunyuan_moe", gguf="hunyuan-moe", gguf_experts=True),
    Entry("InternLM2ForCausalLM", "kernels.models.internlm2", gguf="internlm2"),
    Entry("KimiLinearForCausalLM", "kernels.models.kimi_linear", gguf="kimi-linear", gguf_experts=True),
    Entry("Lfm2ForCausalLM", "kernels.models.lfm2", gguf="lfm2"),
    Entry("Lfm2MoeForCausalLM", "kernels.models.lfm2_moe", gguf="lfm2moe", gguf_experts=True),
    Entry("Lfm3ForCausalLM", "kernels.models.lfm3"),
    Entry("Llama4ForCausalLM", "kernels.models.llama4", gguf="llama4", gguf_experts=True),
    Entry("LlamaForCausalLM", "kernels.models.llama", gguf="llama", gguf_window="ignored"),
    Entry("LongcatFlashForCausalLM", "kernels.models.longcat_flash"),
    Entry("MiMoForCausalLM", "kernels.models.mimo"),
    Entry("MiMoV2FlashForCausalLM", "kernels.models.mimo_v2_flash", gguf="mimo2", gguf_experts=True),
    Entry("MiMoV2ForCausalLM", "kernels.models.mimo_v2_flash"),
    Entry("MiniCPM3ForCausalLM", "kernels.models.minicpm3", gguf="minicpm3"),
    Entry("MiniMaxForCausalLM", "kernels.models.minimax"),
    Entry("MiniMaxM1ForCausalLM", "kernels.models.minimax"),
    Entry("MiniMaxM2ForCausalLM", "kernels.models.minimax_m2", gguf="minimax-m2", gguf_experts=True),
    Entry("MiniMaxM3SparseForCausalLM", "kernels.models.minimax_m3"),
    Entry("MiniMaxM3VLForCausalLM", "kernels.models.minimax_m3", gguf="minimax-m3", gguf_experts=True),
    Entry("MiniMaxText01ForCausalLM", "kernels.models.minimax"),
    Entry("Ministral3ForCausalLM", "kernels.models.ministral3", gguf="mistral3"),
    Entry("MinistralForCausalLM", "kernels.models.ministral"),
    Entry("Mistral4ForCausalLM", "kernels.models.mistral4", gguf="mistral4", gguf_experts=True),
    Entry("MistralForCausalLM", "kernels.models.mistral", gguf="llama", gguf_window="ignored"),
    Entry("MistralLarge4ForCausalLM", "kernels.models.mistral_large4"),
    Entry("MixtralForCausalLM", "kernels.models.mixtral", gguf="llama", gguf_experts=True, gguf_window="ignored"),
    *_encoders("ModernBert", "kernels.models.modernbert", positions=8192),
    Entry("NemotronHForCausalLM", "kernels.models.nemotron_h", gguf="nemotron_h"),
    Entry("Olmo2ForCausalLM", "kernels.models.olmo2", gguf="olmo2"),
    Entry("Olmo3ForCausalLM", "kernels.models.olmo3", gguf="olmo2"),
    Entry("OlmoForCausalLM", "kernels.models.olmo", gguf="olmo"),
    Entry("OlmoHybridForCausalLM", "kernels.models.olmo_hybrid"),
    Entry("OlmoeForCausalLM", "kernels.models.olmoe", gguf="olmoe", gguf_experts=True),
    Entry("Phi3ForCausalLM", "kernels.models.phi3", gguf="phi3"),
    Entry("Phi4MMForCausalLM", "kernels.models.phi3"),
    Entry("Phi4MultimodalForCausalLM", "kernels.models.phi3"),
    Entry("PhiMoEForCausalLM", "kernels.models.phimoe"),
    Entry("PhimoeForCausalLM", "kernels.models.phimoe", gguf="phimoe", gguf_experts=True),
    Entry("Qwen2ForCausalLM", "kernels.models.qwen2", gguf="qwen2"),
    Entry(
        "Qwen2MoeForCausalLM", "kernels.models.qwen2_moe", gguf="qwen2moe", gguf_experts=True, gguf_shared_expert=True
    ),
    Entry("Qwen3ForCausalLM", "kernels.models.qwen3", gguf="qwen3"),
    Entry("Qwen3MoeForCausalLM", "kernels.models.qwen3_moe", gguf="qwen3moe", gguf_experts=True),
    Entry("Qwen3NextForCausalLM", "kernels.models.qwen3_next", gguf="qwen3next", gguf_experts=True),
    Entry("Qwen3_5ForCausalLM", "kernels.models.qwen3_5", gguf="qwen35"),
    Entry("Qwen3_5MoeForCausalLM", "kernels.models.qwen3_5", gguf="qwen35moe", gguf_experts=True),
    Entry("Qwen4ExpForCausalLM", "kernels.models.qwen4_exp"),
    *_encoders("Roberta", "kernels.models.bert", padded_positions=True),
    Entry("SeedOssForCausalLM", "kernels.models.seed_oss", gguf="seed_oss"),
    Entry("SmolLM3ForCausalLM", "kernels.models.smollm3", gguf="smollm3"),
    Entry("StableLmForCausalLM", "kernels.models.stablelm", gguf="stablelm"),
    Entry("Starcoder2ForCausalLM", "kernels.models.starcoder2", gguf="starcoder2"),
    Entry("Step3p5ForCausalLM", "kernels.models.step3p5", gguf="step35", gguf_experts=True),
    *_encoders("XLMRoberta", "kernels.models.bert", padded_positions=True),
    Entry("XverseForCausalLM", "kernels.models.xverse", gguf="xverse"),
)
_SAME_IN_GGUF = {
    "nemotron_h_moe": "nemotron_h",
    "qwen2vl": "qwen2",
    "qwen3vl": "qwen3",
    "qwen3vlmoe": "qwen3moe",
}
"""Other names in GGUF files of what an entry reads. Text turns all parts of a head of Qwen's by the same position."""
_BY_ARCHITECTURE = {entry.architecture: entry for entry in BUILT_IN}

LANGUAGE_MODELS: Mapping[str, str] = {
    "cohere2": "Cohere2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "glm4v_moe_text": "Glm4MoeForCausalLM",
    "glm4v_text": "Glm4ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "hy_v4_vl_text": "HYV4ForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "minimax_m3_text": "MiniMaxM3VLForCausalLM",
    "minimax_m3_vl_text": "MiniMaxM3VLForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mistral4": "Mistral4ForCausalLM",
    "mistral_large4_text": "MistralLarge4ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_5_vl": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen2_vl": "Qwen2ForCausalLM",
    "qwen2_vl_text": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_vl_moe_text": "Qwen3MoeForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
    "qwen4_exp_text": "Qwen4ExpForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "step3p5": "Step3p5ForCausalLM",
}
"""The family of the language model in a checkpoint that also reads images, by ``text_config.model_type``."""

LANGUAGE_MODEL_SIZES: Mapping[str, Mapping[str, int]] = {
    "gemma3_text": {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
    },
    "hy_v4_vl_text": {
        "vocab_size": 120832,
        "hidden_size": 6144,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 78,
        "num_attention_heads": 64,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "q_lora_rank": 2048,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "index_n_heads": 32,
        "max_position_embeddings": 262144,
    },
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    },
    "mistral": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    },
    "mistral_large4_text": {
        "vocab_size": 204800,
        "hidden_size": 6144,
        "intermediate_size": 24576,
        "moe_intermediate_size": 6144,
        "num_hidden_layers": 72,
        "num_attention_heads": 64,
        "n_shared_experts": 1,
        "n_routed_experts": 128,
        "num_experts_per_tok": 4,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 64,
        "v_head_dim": 128,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 2048,
        "max_position_embeddings": 1048576,
    },
}
"""Sizes that their ``text_config`` leaves out where they are transformers' defaults."""

BIDIRECTIONAL = ("Gemma3ForCausalLM", "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Decoders that also embed with attention in both directions (``kernels.models.bidirectional``)."""

HEADS = ("ForSequenceClassification", "ForRewardModel")
"""Endings of architectures that classify or reward."""


def entries() -> dict[str, Entry]:
    """All families by architecture: those built in, then those that installed distributions add."""
    added = {point.name: Entry(point.name, point.value) for point in entry_points(group=GROUP)}
    return _BY_ARCHITECTURE | {name: entry for name, entry in added.items() if name not in _BY_ARCHITECTURE}


def find(architectures: Iterable[object]) -> tuple[str, Family]:
    """The first of ``architectures`` that is supported, and its family. Raises UnknownArchitecture, naming all others.

    A decoder that generates text is also found under the names of its forms that embed, classify or reward
    (``base_architecture``).
    """
    names = list(architectures)
    entry = _first(names, _BY_ARCHITECTURE)
    if entry is None and (entry := _first(names, known := entries())) is None:
        for name in names:
            entry = known.get(base_architecture(name)) if isinstance(name, str) else None
            if isinstance(name, str) and entry is not None:
                return name, _load(entry)
        raise UnknownArchitecture(names, known)
    return entry.architecture, _load(entry)


def has_family(architectures: Iterable[object]) -> bool:
    """Whether ``find`` finds one of ``architectures``. Loads no family."""
    known, names = entries(), [name for name in architectures if isinstance(name, str)]
    return any(name in known or base_architecture(name) in known for name in names)


def language_architecture(raw: Mapping[str, Any]) -> str | None:
    """The architecture of the language model in a checkpoint that also reads images; None for other checkpoints, and
    for one whose language model has no family."""
    if not str(raw.get(WRAPPER, "")).endswith("ForConditionalGeneration"):
        return None
    return LANGUAGE_MODELS.get(str(raw.get("model_type")))


def _first(names: Iterable[object], known: Mapping[str, Entry]) -> Entry | None:
    return next((known[name] for name in names if isinstance(name, str) and name in known), None)


def _load(entry: Entry) -> Family:
    try:
        module = import_module(entry.module)
    except ImportError as error:
        raise ConfigError(
            f"the family of {entry.architecture} cannot be imported ({error}); reinstall the distribution that adds "
            f"{entry.module}"
        ) from error
    missing = [name for name in ("config", "tensors", "caches", "build") if not callable(getattr(module, name, None))]
    if missing:
        raise ConfigError(f"the family {entry.module} of {entry.architecture} has no {' and no '.join(missing)}")
    return cast(Family, module)


def base_architecture(name: str) -> str:
    """The generating form of an architecture that has a head of its own or none: ``Qwen3ForCausalLM`` of
    ``Qwen3Model``, ``Qwen3ForSequenceClassification`` and ``Qwen3ForRewardModel``."""
    if name == "Gemma3TextModel":
        return "Gemma3ForCausalLM"
    for suffix in (*HEADS, "Model"):
        if name.endswith(suffix):
            return f"{name.removesuffix(suffix)}ForCausalLM"
    return name


def find_encoder(architecture: str) -> Entry | None:
    """The entry of an encoder; None for other architectures."""
    entry = _BY_ARCHITECTURE.get(architecture)
    return entry if entry is not None and entry.encoder else None


def is_decoder(architecture: str) -> bool:
    """Whether a decoder that generates text is built in under this very name."""
    entry = _BY_ARCHITECTURE.get(architecture)
    return entry is not None and not entry.encoder


def find_gguf(name: str, experts: bool) -> Entry | None:
    """The entry of a GGUF file's ``general.architecture``; None for one that is not read."""
    name = _SAME_IN_GGUF.get(name, name)
    fitting = [entry for entry in BUILT_IN if entry.gguf == name]
    chosen = next((entry for entry in fitting if entry.gguf_experts == experts), None)
    if chosen is not None or fitting:
        return chosen or fitting[0]
    added = (entry for entry in entries().values() if entry not in BUILT_IN)
    return next((entry for entry in added if getattr(_load(entry), "GGUF", "") == name), None)


def tensors(config: ModelConfig) -> Tensors:
    """The declared tensors of a whole model, by name."""
    from kernels.weights.tensors import table_of

    if config.code is not None:  # transformers reads them
        return {}
    declared = find([config.architecture])[1].tensors(config)
    if config.pooling is not None and find_encoder(config.architecture) is None:
        declared = _pooled(config, declared)
    return table_of(declared)


def _pooled(config: ModelConfig, declared: Iterable[TensorSpec]) -> Iterator[TensorSpec]:
    """The tensors of a decoder that generates no text: no output to the vocabulary, but maybe a head. Models that
    embed may be stored without the prefix of the decoder."""
    from kernels.models.layers import classification
    from kernels.weights.tensors import Role

    for spec in declared:
        if spec.role is not Role.OUTPUT:
            yield dataclasses.replace(spec, aliases=(*spec.aliases, spec.name.removeprefix("model.")))
    if config.pooling is not None and config.pooling.task == "classify":
        yield from classification.tensors(config)


def caches(config: ModelConfig, windows: bool = False) -> tuple[CacheGroup, ...]:
    """The caches of one rank's layers. ``windows``: whether layers with a sliding window keep only it."""
    if config.code is not None:
        from kernels.models.fallback import model as fallback

        result = fallback.caches(config)
    else:
        result = find([config.architecture])[1].caches(config)
    return result if windows or not any(config.windows) else keep_all(result)


def build(config: ModelConfig, builder: ModelBuilder) -> Decoder | Encoder:
    """The model of one rank, whose sizes are ``config``. Raises ConfigError for layers to capture that it lacks."""
    captures, layers = builder.captures, builder.whole_layers or config.layers
    wrong = [layer for layer in captures if not 0 <= layer < layers]
    if wrong or len(set(captures)) != len(captures):
        raise ConfigError(
            f"the layers to capture, {list(captures)}, must be different ones of this model's 0 to {layers - 1}"
        )
    if config.code is not None:
        from kernels.models.fallback import model as fallback

        return fallback.build(config, builder)
    if config.pooling is not None and config.pooling.encoder and find_encoder(config.architecture) is None:
        from kernels.models import bidirectional

        return bidirectional.build(config, builder)
    return find([config.architecture])[1].build(config, builder)


@dataclass(frozen=True)
class Support:
    """What a family supports. ``gguf``: its name in GGUF files; "": none. ``experts``: layers of experts. ``windows``:
    layers with a sliding window. ``tied``: embeddings that are also the output. ``quantizable``: quantized weights.
    ``attention``: ``ModelConfig.attention_features`` of it. ``latent``: keys and values are latent vectors.
    ``indexed``: an indexer chooses the tokens that are attended to. ``states``: layers keep states of sequences.
    ``paged``: some layers keep keys and values of all tokens. ``plain``: the layers have operators alone that native
    code has.
    """

    architecture: str
    gguf: str
    experts: bool
    windows: bool
    tied: bool
    quantizable: bool
    attention: frozenset[str] = frozenset()
    latent: bool = False
    indexed: bool = False
    states: bool = False
    paged: bool = True
    plain: bool = True


_EXAMPLE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "sliding_window": 16,
    "use_sliding_window": True,
    "embedding_multiplier": 2.0,
    "max_window_layers": 1,
    "tie_word_embeddings": True,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 16,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "attn_temperature_len": 32,
    "zero_expert_num": 1,
    "o_groups": 1,
    "n_group": 1,
    "topk_group": 1,
    "layer_group_size": 2,
    "sparse_attention_config": {
        "sparse_attention_freq": [0, 1],
        "sparse_num_index_heads": 2,
        "sparse_index_dim": 128,
    },
}
"""A small model with everything that a family may have."""


_ATTENTION_GATES = ("self_attn.gate_proj.weight", "self_attn.g_proj.weight")
"""Weights of gates on attention's results, which native code lacks."""


def families() -> tuple[Support, ...]:
    """What each family of decoders supports, found by opening a small model of it that asks for everything."""
    from kernels.models.config import ConfigReader
    from kernels.weights.tensors import Role

    result = []
    for entry in entries().values():
        if entry.encoder:
            continue
        family = _load(entry)
        config = family.config(ConfigReader(_EXAMPLE, entry.architecture))
        specs = list(family.tensors(config))
        result.append(
            Support(
                entry.architecture,
                entry.gguf or getattr(family, "GGUF", ""),
                experts=any(spec.stacked is not None for spec in specs),
                windows=any(config.windows),
                tied=not any(spec.role is Role.OUTPUT for spec in specs),
                quantizable=any(spec.quantizable for spec in specs),
                attention=frozenset(config.attention_features),
                latent=config.latent is not None,
                indexed=config.indexed,
                states=config.recurrence is not None,
                paged=any(isinstance(group.spec, Paged) for group in family.caches(config)),
                plain=_is_plain(config) and not any(spec.name.endswith(_ATTENTION_GATES) for spec in specs),
            )
        )
    return tuple(result)


def _is_plain(config: ModelConfig) -> bool:
    scales = {config.embedding_scale, config.residual_scale, config.logit_scale}
    capped = config.logit_softcap > 0 or bool(config.eager_with({"sinks"}))
    identities = config.experts is not None and config.experts.identities > 0
    plain = not config.indexed and not identities and not capped and not config.scaled_queries
    return config.activation == "silu" and scales == {1.0} and not config.layer_norms and plain
