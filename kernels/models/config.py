"""The sizes of a decoder, checked and with every default resolved, and the reader of config.json that families use.

Keys follow the Hugging Face configuration files, both with the older ``rope_theta`` / ``rope_scaling`` /
``torch_dtype`` and with the newer ``rope_parameters`` / ``dtype`` spellings. No code of a checkpoint is ever run.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from kernels.contract.caches import Latent, State, Window
from kernels.contract.divisions import Divisible
from kernels.contract.errors import ConfigError
from kernels.contract.limits import MAX_EXPERTS, MAX_EXPERTS_OF_MODEL, MAX_LAYERS, MAX_SIZE
from kernels.contract.pooling import PoolingConfig
from kernels.models.fallback.sizes import CodeModel

__all__ = [
    "ACTIVATIONS",
    "MXFP4_BLOCK",
    "ConfigReader",
    "ExpertsConfig",
    "IndexConfig",
    "LatentConfig",
    "ModelConfig",
    "QueryGrowth",
    "Recurrence",
    "RopeConfig",
    "local_config",
]


ACTIVATIONS = {
    "silu": ("silu", "swish"),
    "gelu_tanh": ("gelu_pytorch_tanh", "gelu_new", "gelu_tanh"),
    "gelu": ("gelu",),
    "relu": ("relu",),
    "relu2": ("relu2",),
    "xielu": ("xielu",),
}
"""What config.json calls each activation."""

MXFP4_BLOCK = 32
"""Numbers that share an exponent."""
_WINDOW = 4096  # tokens, of every family with a pattern of windows


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding. ``kind``: default | linear | llama3 | yarn | longrope | factors | proportional | none.

    Dynamic NTK scaling changes nothing up to ``max_position_embeddings`` and is read as default. none: heads are not
    rotated, they have no positions (NoPE, Kazemnejad et al., arXiv 2305.19466). proportional: the frequencies of a
    whole head, of which only the highest are kept.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_length: int = 0  # tokens the model was trained on before scaling
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn, longrope: scales cos and sin; None: from factor
    mscale: float = 0.0  # yarn
    mscale_all_dim: float = 0.0  # yarn
    truncate: bool = True  # yarn: round the correction range to whole dimensions
    factors: tuple[float, ...] = ()  # factors; longrope, beyond original_length: each pair of dimensions has its own
    short_factors: tuple[float, ...] = ()  # longrope, up to original_length
    dim: int = 0  # numbers of a head that are rotated, the first ones; 0: all
    head_dim: int = 0  # of heads that are rotated so; 0: as the model's


@dataclass(frozen=True)
class ExpertsConfig:
    """Mixture-of-experts layers: a token is routed to a few of many experts (Shazeer et al., arXiv 1701.06538).

    ``layers``: which of the decoder's layers. ``chosen``: experts that a token takes. ``normalized``: whether their
    weights are made to add up to one. ``shared``: the inner dimension of an expert that all tokens take besides, 0:
    there is none; ``shared_bias``: whether its projections have biases; ``weighted``: whether it is weighted by the
    sigmoid of a logit of its own. ``result_scale``: of the sum of all experts. ``scores``, ``groups``, ``top_groups``,
    ``pair_sum``, ``scale`` and ``jitter``: as ``kernels.devices.experts.Routing``. ``corrected``: whether a correction
    is added to scores for the choice. ``alpha``, ``limit``: as ``ClampedGate`` there. ``packed``: whether they are
    stored in MXFP4. ``apart``: whether gates have matrices of their own, where checkpoints have them in others', as in
    GGUF files. ``activation``: silu | gelu_tanh, of gates. ``router_softcap``: ``cap * tanh(x / cap)`` of the
    router's logits; 0: none. ``identities``: so many more experts return what they are given. ``wide_router``: whether
    its weight is held in float32; its logits, as ``Routing.wide``.
    """

    layers: frozenset[int]
    count: int
    chosen: int
    inner: int
    normalized: bool
    shared: int = 0
    weighted: bool = True
    scores: str = "softmax"
    groups: int = 1
    top_groups: int = 1
    pair_sum: bool = False
    scale: float = 1.0
    corrected: bool = False
    jitter: float = 0.0
    shared_bias: bool = False
    result_scale: float = 1.0
    alpha: float = 1.0
    limit: float = 0.0
    packed: bool = False
    apart: bool = False
    activation: str = "silu"
    router_softcap: float = 0.0
    identities: int = 0
    wide_router: bool = False


@dataclass(frozen=True)
class QueryGrowth:
    """Queries grow with their positions, by ``1 + factor * ln(1 + (position + shift) // tokens)`` (Nakanishi,
    arXiv 2501.19399)."""

    factor: float
    tokens: int
    shift: int = 0


@dataclass(frozen=True)
class IndexConfig:
    """The indexer of sparse attention (DeepSeek-AI, arXiv 2512.02556, section 2.1): ``heads`` of ``dim`` numbers score
    all tokens before a query, which attends to the ``chosen`` best. ``own``: layers that have one; each other layer
    takes what the last of them before it chose. ``rope_interleaved``: as ``ModelConfig``, of the indexer's heads.
    ``own_queries``: its queries are made from the layer's input, normed, and scaled by ``layers.query_scale``, where
    others are made from the compressed vector of attention's queries. ``rotates_last``: the last numbers of a head have
    positions, not the first. ``norm_eps``: of the norms of keys and of the layer's input.
    """

    heads: int
    dim: int
    chosen: int
    own: frozenset[int]
    rope_interleaved: bool = False
    own_queries: bool = False
    rotates_last: bool = False
    norm_eps: float = 1e-6

    def spec(self) -> Latent:
        """The keys of a layer that caches nothing else."""
        return Latent(self.dim, 0)


@dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention (MLA, DeepSeek-AI, arXiv 2405.04434, section 2.1). ``rank``: numbers of the vector
    that keys and values of all heads are made from; ``query_rank``: of the one that queries are, 0: there is none.
    ``plain_dim``, ``rope_dim``: numbers of a query and key head without and with a position. ``value_dim``: of a value.
    ``apart``: whether weights of keys and of values are stored apart, as in newer GGUF files. ``index``: of sparse
    attention; None: all tokens are attended to. ``factor``: of the vector. ``whole``: every rank has all heads.
    ``norm_eps``: of the norms of both vectors. ``scaled``: queries are scaled by ``layers.query_scale``. ``reads``: a
    layer makes no vectors, but reads those of another (``ModelConfig.shared_caches``).
    """

    query_rank: int
    rank: int
    plain_dim: int
    rope_dim: int
    value_dim: int
    apart: bool = False
    index: IndexConfig | None = None
    factor: float = 1.0
    whole: bool = False
    norm_eps: float = 1e-6
    scaled: bool = False
    reads: bool = False

    def spec(self, indexed: bool = True) -> Latent:
        """What a layer caches. ``indexed``: whether it has an indexer, if the model has any."""
        return Latent(self.rank, self.rope_dim, self.index.dim if indexed and self.index is not None else 0)


class Recurrence(Protocol):
    """The sizes of layers that keep a state of each sequence, all of one kind. A frozen dataclass of the layer's."""

    def state(self) -> State:
        """What one layer keeps of a sequence, on a rank of these sizes."""
        ...

    def divided(self, size: int) -> Recurrence:
        """The sizes that one of ``size`` ranks runs. Raises ConfigError, naming the numbers."""
        ...


@dataclass(frozen=True)
class ModelConfig:
    """A decoder's sizes. ``windows[layer]`` is the layer's sliding window in tokens, 0 for full attention, a negative
    one for attention in chunks: a query sees the tokens since the last multiple.

    ``rope``: of all layers but those in ``ropes``, which have their own. ``rope_interleaved``: whether neighbors of a
    head rotate against one another, in place of its halves. ``attention_scale``: of queries times keys; 0: ``head_dim
    ** -0.5``. ``attention_softcap``, ``logit_softcap``: ``cap * tanh(x / cap)`` of these numbers; 0: none. ``sinks``:
    whether each head attends to one more token, whose value is 0. ``embedding_scale``,
    ``residual_scale`` and ``logit_scale`` multiply embeddings, what a layer adds to the residual stream, and logits.
    ``norm_offset``: what norms add to their weights. ``parallel_residual``: attention and feed-forward layer are added
    together. ``layer_norms``: norms subtract the mean. ``global_kv_heads``: the whole model's, on one of several
    ranks; else 0. ``pooling``: of a model that generates no text, which has no output to the vocabulary.
    ``reward_head``: the module of a family's own head that rewards; "": see ``layers.classification``.
    ``query_growth``: of all queries; None: they do not grow. ``late_norms``: whether heads are normed after they are
    rotated. ``qkv_clip``: queries, keys and values are clamped to it when they are projected; 0: they are not.
    ``alibi``, ``growth_length``: whether ``Attention.attend_rows`` has ``slopes``, and its ``growth_length``.
    ``qkv_apart``: whether a family with one projection of queries, keys and values has three here, as in GGUF files.
    ``head_norm``: what of the output to the vocabulary has a length of one, its rows | columns; "": nothing.
    ``norm_bias``, ``head_bias``: whether norms of the residual stream, and the output to the vocabulary (of an encoder:
    its head's first layer), have biases.
    ``latent``: of latent attention, whose rotated part of a head is then ``head_dim``.
    ``recurrence``: of layers that keep states, ``recurrent`` says which these are.
    ``position_table``, ``segments``: of an encoder, rows of its tables of positions and of the texts of a pair;
    ``first_position``: the row of an input's first token. ``shared_caches``: layers that read another's cache in place
    of one of their own, and the one whose cache each of them reads. ``code``: of a model that runs transformers'
    modeling code. ``whole_dense``: dense feed-forward layers beside those of experts are not divided over ranks.
    ``names``: as ``ConfigReader``.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    max_positions: int
    rope: RopeConfig
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied_embeddings: bool
    windows: tuple[int, ...]
    dtype: str | None  # as stored; None when config.json does not say
    experts: ExpertsConfig | None = None
    ropes: Mapping[int, RopeConfig] = field(default_factory=dict)
    rope_interleaved: bool = False
    attention_scale: float = 0.0
    attention_softcap: float = 0.0
    sinks: bool = False
    logit_softcap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    norm_offset: float = 0.0
    activation: str = "silu"
    parallel_residual: bool = False
    layer_norms: bool = False
    global_kv_heads: int = 0
    pooling: PoolingConfig | None = None
    reward_head: str = ""
    latent: LatentConfig | None = None
    query_growth: QueryGrowth | None = None
    qkv_clip: float = 0.0
    late_norms: bool = False
    alibi: bool = False
    growth_length: int = 0
    head_norm: str = ""
    qkv_apart: bool = False
    norm_bias: bool = False
    head_bias: bool = False
    recurrence: Recurrence | None = None
    recurrent: frozenset[int] = frozenset()
    position_table: int = 0
    segments: int = 0
    first_position: int = 0
    shared_caches: Mapping[int, int] = field(default_factory=dict)
    code: CodeModel | None = None
    whole_dense: bool = False
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def layers_alike(self) -> bool:
        """Whether layers read no sizes but these, so that a stage of a pipeline can number them from 0."""
        return type(self) is ModelConfig

    @property
    def attention_features(self) -> Mapping[str, str]:
        """What attention has that only some devices plan (``Attention.plans``), and how errors name it: caps | sinks |
        alibi | growth (scores that grow with positions) | chunks | sizes (heads of several sizes) | wide (heads of
        more than 256 numbers)."""
        features = {
            "caps": ("attn_logit_softcapping", self.attention_softcap > 0),
            "sinks": ("the sinks of attention", self.sinks),
            "alibi": ("ALiBi", self.alibi),
            "growth": ("attn_temperature_len", self.growth_length > 0),
            "chunks": ("attention in chunks", min(self.windows) < 0),
        }
        return {feature: name for feature, (name, there) in features.items() if there}

    @property
    def eager_attention(self) -> str:
        """``eager_with`` of a device that plans none of ``attention_features``."""
        return self.eager_with(frozenset())

    def eager_with(self, plans: Collection[str]) -> str:
        """Why attention runs outside of captured graphs: a feature that plain torch computes from rows on the host, or
        whose rows the host cuts; "": it does not. ``plans``: as those of the device's ``Attention``."""
        return next((name for feature, name in self.attention_features.items() if feature not in plans), "")

    @property
    def row_attention(self) -> bool:
        """Whether scores are more than products of queries and keys."""
        return bool({"caps", "sinks", "alibi", "growth"} & self.attention_features.keys())

    @property
    def indexed(self) -> bool:
        """Whether attention reads a step's rows on the host on every device, so that no pass is captured."""
        return self.latent is not None and self.latent.index is not None

    @property
    def stream_size(self) -> int:
        """Numbers of a token between layers: of several residual streams more than ``hidden_size``."""
        return self.hidden_size

    @property
    def row_window(self) -> Window | None:
        """The window whose rows attention reads on the host; None: it reads none so."""
        return None

    @property
    def page_unit(self) -> int:
        """Pages hold a multiple of so many tokens."""
        return 1

    @property
    def scaled_queries(self) -> bool:
        """Whether queries are multiplied after they are rotated."""
        return self.query_growth is not None or self.late_norms

    @property
    def rotary_dim(self) -> int:
        """Numbers of a head that are rotated."""
        return self.rope.dim or self.head_dim


def local_config(
    config: ModelConfig, size: int, parts: int = 1, ep_size: int = 1, *, routed_alone: bool = False
) -> ModelConfig:
    """The sizes that one of ``size`` ranks runs, with ``parts`` times as many for layers of experts; the vocabulary
    stays whole. Raises ConfigError, naming the numbers.

    Attention is divided by heads, feed-forward layers and experts by their inner dimension, embedding and output by the
    vocabulary (Shoeybi et al., Megatron-LM, arXiv 1909.08053, section 3). With fewer key heads than ranks, ranks share
    one. A model of transformers' code is divided by its own plan. With ``ep_size`` the experts are divided into so many
    parts first, and the inner dimension of each over the ranks of a part. ``routed_alone``: the expert that all tokens
    take is divided as attention is.
    """
    if config.code is not None:
        from kernels.models.fallback.model import divided

        return divided(config, size)
    wide: dict[str, int] = {}
    own = 1 if config.latent is not None and config.latent.whole else size  # of which each has some of the heads
    narrow = {
        "num_attention_heads": config.heads * size // own,
        "intermediate_size": config.intermediate_size * (size if config.whole_dense else 1),
        "vocab_size": config.vocab_size,
    }
    experts = config.experts
    if experts is not None:
        each = size * parts // ep_size
        if ep_size == 1:
            wide["moe_intermediate_size"] = experts.inner
        elif experts.inner % each:
            raise ConfigError(
                f"moe_intermediate_size {experts.inner} of {config.architecture} cannot be divided over the {each} "
                f"ranks of each part of the experts: raise --expert-parallel-size {ep_size}"
            )
        (narrow if routed_alone else wide)["shared_expert_intermediate_size"] = experts.shared
        if experts.packed:
            wide["the number of mxfp4's blocks in intermediate_size,"] = experts.inner // MXFP4_BLOCK
    divisible = _divisible(config)
    for numbers, ranks in ((narrow, size), (wide, size * parts)):
        for name, number in numbers.items():
            divisible.check(name, number, ranks)
    divisible.check_kv_heads(size)
    if experts is not None:
        shared = experts.shared // (size if routed_alone else size * parts)
        experts = dataclasses.replace(experts, inner=experts.inner * ep_size // (size * parts), shared=shared)
    return dataclasses.replace(
        config,
        heads=config.heads // own,
        kv_heads=max(1, config.kv_heads // size),
        global_kv_heads=config.kv_heads if size > 1 else 0,
        intermediate_size=config.intermediate_size // (1 if config.whole_dense else size),
        experts=experts,
        recurrence=None if config.recurrence is None else config.recurrence.divided(size),
    )


def _divisible(config: ModelConfig) -> Divisible:
    sizes = config.experts
    experts = () if sizes is None else (sizes.inner // (MXFP4_BLOCK if sizes.packed else 1), sizes.shared)
    dense = () if config.whole_dense else (config.intermediate_size,)
    others = (*dense, *experts, config.vocab_size)
    return Divisible(config.architecture, config.heads, config.kv_heads, others, config.names)


class ConfigReader:
    """A config.json object. Every method checks what it reads and raises ConfigError, naming the key. ``names``: what
    the file calls some of the keys of ``raw``."""

    def __init__(self, raw: Mapping[str, Any], architecture: str, names: Mapping[str, str] | None = None) -> None:
        self.raw = raw
        self.architecture = architecture
        self.names = names or {}

    def size(self, key: str, default: int | None = None, maximum: int = MAX_SIZE) -> int:
        """A whole number from 1 to ``maximum``."""
        return _size(self.raw, key, default, maximum, self.names)

    def number(self, key: str, default: float) -> float:
        """A number above 0."""
        return _number(self.raw, key, default)

    def flag(self, key: str, default: bool = False) -> bool:
        return bool(self.raw.get(key, default))

    @property
    def layers(self) -> int:
        return self.size("num_hidden_layers", maximum=MAX_LAYERS)

    def decoder(
        self,
        *,
        qkv_bias: bool = False,
        output_bias: bool = False,
        qk_norm: bool = False,
        windows: tuple[int, ...] = (),
        experts: ExpertsConfig | None = None,
        activation: str = "silu",
        norm_eps: str = "rms_norm_eps",
        eps: float = 1e-6,
        head_dim: int = 0,
        rotary: float = 1.0,
        theta: float = 10000.0,
        tied: bool = False,
    ) -> ModelConfig:
        """The sizes that nearly all decoders share. ``windows``: of each layer; empty: full attention in all.

        ``activation``: of ``ACTIVATIONS``, the only one that the family has. ``norm_eps``: the key of the norms'
        epsilon. ``eps``, ``head_dim``, ``rotary``, ``theta``, ``tied``: if config.json says nothing of this epsilon, of
        a head's size (0: ``hidden_size`` over heads), of the part of a head that is rotated, of the base of its
        frequencies, of one table for embeddings and output.
        """
        raw, layers = self.raw, self.layers
        given = raw.get("hidden_activation") or raw.get("hidden_act") or activation
        if given not in ACTIVATIONS[activation]:
            raise ConfigError(f"hidden_act {given!r} is not supported; {self.architecture} is run with {activation}")
        hidden, heads = self.size("hidden_size"), self.size("num_attention_heads")
        kv_heads = self.size("num_key_value_heads", heads)
        head_dim = self.size("head_dim", head_dim or hidden // heads)
        if heads % kv_heads:
            name = self.names.get("num_key_value_heads", "num_key_value_heads")
            raise ConfigError(f"num_attention_heads {heads} is not a multiple of {name} {kv_heads}")
        if head_dim % 2:
            name = self.names.get("head_dim", "head_dim")
            raise ConfigError(f"{name} {head_dim} is odd; rotary embeddings need an even one")
        max_positions = self.size("max_position_embeddings")
        rope = _rope(raw, max_positions, head_dim, rotary, theta)
        if rope.kind == "yarn":
            max_positions = max(max_positions, int(rope.original_length * rope.factor))
        dtype = raw.get("dtype") or raw.get("torch_dtype")
        return ModelConfig(
            architecture=self.architecture,
            vocab_size=self.size("vocab_size"),
            hidden_size=hidden,
            intermediate_size=self.size("intermediate_size"),
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            norm_eps=self.number(norm_eps, eps),
            max_positions=max_positions,
            rope=rope,
            qkv_bias=qkv_bias,
            output_bias=output_bias,
            mlp_bias=self.flag("mlp_bias"),
            qk_norm=qk_norm,
            tied_embeddings=self.flag("tie_word_embeddings", tied),
            windows=windows or (0,) * layers,
            dtype=str(dtype).removeprefix("torch.") if dtype else None,
            experts=experts,
            activation=activation,
            layer_norms=norm_eps != "rms_norm_eps",
            names=self.names,
        )

    def latent_decoder(
        self, *, experts: ExpertsConfig | None = None, eps: float = 1e-6, rope_interleaved: bool = True
    ) -> ModelConfig:
        """The sizes of a decoder with latent attention. ``eps``: as ``decoder``. ``rope_interleaved``: as
        ``ModelConfig``, if ``rope_interleave`` does not say it."""
        raw, rank = self.raw, "q_lora_rank"
        latent = LatentConfig(
            0 if raw.get(rank) is None else self.size(rank),
            self.size("kv_lora_rank"),
            self.size("qk_nope_head_dim"),
            self.size("qk_rope_head_dim"),
            self.size("v_head_dim"),
            self.flag("kv_b_apart"),
        )
        heads, bias = self.size("num_attention_heads"), self.flag("attention_bias")
        # Files give a head's size with or without its part that is not rotated, and the rotated share of it.
        own: dict[str, Any] = {"head_dim": latent.rope_dim, "num_key_value_heads": heads, "partial_rotary_factor": None}
        for key in ("rope_scaling", "rope_parameters"):
            if isinstance(part := raw.get(key), dict):
                own[key] = {name: value for name, value in part.items() if name != "partial_rotary_factor"}
        plain = ConfigReader({**raw, **own}, self.architecture).decoder(
            qkv_bias=bias, output_bias=bias, experts=experts, eps=eps
        )
        rope, scale = plain.rope, (latent.plain_dim + latent.rope_dim) ** -0.5
        if rope.mscale_all_dim and rope.factor > 1.0:  # of queries times keys, beside what cos and sin are scaled by
            scale *= (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2
        interleave = raw.get("rope_interleave")
        return dataclasses.replace(
            plain,
            latent=latent,
            attention_scale=scale,
            rope_interleaved=rope_interleaved if interleave is None else bool(interleave),
        )

    def indexed_decoder(
        self,
        *,
        experts: ExpertsConfig,
        eps: float = 1e-6,
        index_interleaved: bool = False,
        own_queries: bool = False,
    ) -> ModelConfig:
        """``latent_decoder`` with an indexer. ``index_interleaved``: ``IndexConfig.rope_interleaved``, if
        ``indexer_rope_interleave`` does not say it. ``own_queries``: as ``IndexConfig``."""
        plain = self.latent_decoder(experts=experts, eps=eps)
        latent, interleave = plain.latent, self.raw.get("indexer_rope_interleave")
        assert latent is not None, "of every latent decoder"
        index = IndexConfig(
            self.size("index_n_heads"),
            self.size("index_head_dim"),
            self.size("index_topk"),
            self._indexed_layers(),
            index_interleaved if interleave is None else bool(interleave),
            own_queries,
        )
        if not latent.query_rank and not own_queries:
            raise ConfigError(f"config.json: {self.architecture} needs q_lora_rank, which its indexer reads")
        if index.dim < latent.rope_dim:
            raise ConfigError(
                f"config.json: index_head_dim {index.dim} is less than qk_rope_head_dim {latent.rope_dim}, the part of "
                "it that is rotated"
            )
        return dataclasses.replace(plain, latent=dataclasses.replace(latent, index=index))

    def _indexed_layers(self) -> frozenset[int]:
        """The layers with an indexer of their own: those of ``indexer_types`` or ``index_topk_pattern``, or every
        ``index_topk_freq``-th from ``index_skip_topk_offset`` on."""
        layers = self.layers
        kinds = self.raw.get("indexer_types") or self.raw.get("index_topk_pattern")
        if kinds is None:
            every, offset = self.size("index_topk_freq", 1), self.size("index_skip_topk_offset", 2)
            return frozenset(layer for layer in range(layers) if max(layer - offset + 1, 0) % every == 0)
        known = {"full": True, "F": True, "shared": False, "S": False}
        if not isinstance(kinds, list | str) or len(kinds) != layers or not all(kind in known for kind in kinds):
            raise ConfigError("config.json: indexer_types must say full or shared for each layer")
        if not known[kinds[0]]:
            raise ConfigError("config.json: indexer_types must begin with full: no layer is before it")
        return frozenset(layer for layer, kind in enumerate(kinds) if known[kind])

    def local_rope(self, head_dim: int, theta: float) -> RopeConfig:
        """The rotation of layers with a window: ``rope_parameters.sliding_attention``, or ``rope_local_base_freq``."""
        parameters = self.raw.get("rope_parameters")
        part = parameters.get("sliding_attention") if isinstance(parameters, dict) else None
        local = part if isinstance(part, dict) else {"rope_theta": self.number("rope_local_base_freq", theta)}
        return _rope({"rope_parameters": local}, self.size("max_position_embeddings"), head_dim, 1.0, theta)

    def proportional_rope(self, head_dim: int, part: float) -> RopeConfig:
        """The rotation of layers with full attention, ``rope_parameters.full_attention``: default or proportional.
        ``part``: of a head that is rotated, if config.json says nothing of it."""
        ropes = self.raw.get("rope_parameters") or {}
        given = ropes.get("full_attention") if isinstance(ropes, dict) else None
        usual = {"rope_type": "proportional", "partial_rotary_factor": part}
        reader = ConfigReader(given if isinstance(given, dict) else usual, self.architecture)
        kind, part = reader.raw.get("rope_type", "default"), reader.number("partial_rotary_factor", 1.0)
        if kind not in ("default", "proportional"):
            raise ConfigError(f"rope_type {kind!r} of full attention is not supported; use proportional or default")
        rotated = 2 * int(part * head_dim // 2) if kind == "proportional" else head_dim
        if not 0 < rotated <= head_dim:
            raise ConfigError(f"partial_rotary_factor rotates {rotated} of a head's {head_dim} numbers")
        theta, factor = reader.number("rope_theta", 1000000.0), 1.0
        if kind == "proportional":
            factor = reader.number("factor", 1.0)
        return RopeConfig(theta, "proportional", factor=factor, dim=rotated, head_dim=head_dim)

    def patterned_windows(self, every: int) -> tuple[int, ...]:
        """``sliding_window`` of all layers but every n-th, where config.json has no ``layer_types``. ``every``: n, if
        ``sliding_window_pattern`` does not say it, as a number or as LLLG. Null: no window; nothing: 4096 tokens."""
        layers, given = self.layers, self.raw.get("sliding_window_pattern")
        if self.raw.get("sliding_window", _WINDOW) is None:
            return (0,) * layers
        if isinstance(given, str):
            every = len(given)
            if not given or given != "L" * (every - 1) + "G":
                raise ConfigError(
                    f"config.json: sliding_window_pattern must be a number, or some L and then one G, and is {given!r}"
                )
        else:
            every = self.size("sliding_window_pattern", every)
        window = self.size("sliding_window", _WINDOW)
        return self._typed_windows() or tuple(window if (layer + 1) % every else 0 for layer in range(layers))

    def windows(self) -> tuple[int, ...]:
        """``sliding_window`` of every layer, or of those that ``layer_types`` names."""
        if self.raw.get("sliding_window") is None:
            return (0,) * self.layers
        return self._typed_windows() or (self.size("sliding_window"),) * self.layers

    def switched_windows(self, even: bool = False) -> tuple[int, ...]:
        """Qwen's windows: only with ``use_sliding_window``, from layer ``max_window_layers`` on.

        ``even``: for the even ones of the layers before that one instead.
        """
        layers = self.layers
        if not self.flag("use_sliding_window") or self.raw.get("sliding_window") is None:
            return (0,) * layers
        typed, window = self._typed_windows(), self.size("sliding_window")
        if typed:
            return typed
        first = self.raw.get("max_window_layers", 28)
        if type(first) is not int or first < 0:
            raise ConfigError(f"config.json: max_window_layers must be a whole number, and is {first!r}")
        if even:
            return tuple(window if layer % 2 == 0 and layer < first else 0 for layer in range(layers))
        return tuple(window if layer >= first else 0 for layer in range(layers))

    def expert_counts(self) -> tuple[int, int]:
        """Experts of a layer, and how many of them a token takes."""
        names = ("num_experts", "n_routed_experts", "num_local_experts")  # tools write any
        key = next((name for name in names if name in self.raw), "num_local_experts")
        count = self.size(key, maximum=min(MAX_EXPERTS, MAX_EXPERTS_OF_MODEL // self.layers))
        chosen = self.size("num_experts_per_tok")
        if chosen > count:
            raise ConfigError(f"config.json: num_experts_per_tok {chosen} is more than {key} {count}")
        return count, chosen

    def sparse_layers(self) -> frozenset[int]:
        """Qwen's layers of experts: every ``decoder_sparse_step``-th, but for ``mlp_only_layers``."""
        plain, step = self.raw.get("mlp_only_layers") or [], self.size("decoder_sparse_step", 1)
        if not isinstance(plain, list) or not all(type(layer) is int for layer in plain):
            raise ConfigError(f"config.json: mlp_only_layers must be a list of layers, and is {plain!r}")
        return frozenset(layer for layer in range(self.layers) if layer not in plain and (layer + 1) % step == 0)

    def deepseek_experts(self, layers: frozenset[int], scores: str, pair_sum: bool) -> ExpertsConfig:
        """DeepSeek's experts in ``layers``. ``scores``, ``pair_sum``: as ``ExpertsConfig``."""
        count, chosen = self.expert_counts()
        groups = self.size("n_group", 1)
        top_groups, inner = self.size("topk_group", 1), self.size("moe_intermediate_size")
        if count % groups or top_groups > groups:
            raise ConfigError(
                f"config.json: {count} experts cannot be divided into n_group {groups}, of which topk_group "
                f"{top_groups} are taken"
            )
        if chosen > top_groups * (count // groups):
            raise ConfigError(
                f"config.json: num_experts_per_tok {chosen} is more than the experts of topk_group {top_groups} groups"
            )
        return ExpertsConfig(
            layers,
            count,
            chosen,
            inner,
            self.flag("norm_topk_prob"),
            inner * self.size("n_shared_experts") if self.raw.get("n_shared_experts") else 0,
            weighted=False,
            scores=scores,
            groups=groups,
            top_groups=top_groups,
            pair_sum=pair_sum,
            scale=self.number("routed_scaling_factor", 1.0),
            corrected=scores == "sigmoid",
        )

    def later_layers(self, first: int = 0) -> frozenset[int]:
        """The layers from ``first_k_dense_replace`` on, or the sparse ones of ``mlp_layer_types``: every
        ``moe_layer_freq``-th. ``first``: if config.json says nothing."""
        kinds, layers = self.raw.get("mlp_layer_types"), self.layers
        if kinds is not None:
            if not isinstance(kinds, list) or len(kinds) != layers or not set(kinds) <= {"dense", "sparse"}:
                raise ConfigError("config.json: mlp_layer_types must say dense or sparse for each layer")
            return frozenset(layer for layer, kind in enumerate(kinds) if kind == "sparse")
        given, every = self.raw.get("first_k_dense_replace", first), self.size("moe_layer_freq", 1)
        if type(given) is not int or given < 0:
            raise ConfigError(f"config.json: first_k_dense_replace must be a whole number, and is {given!r}")
        return frozenset(layer for layer in range(given, layers) if layer % every == 0)

    def layer_types(self, *known: str, key: str = "layer_types") -> tuple[str, ...]:
        """The kind of each layer, one of ``known``; empty where config.json does not say."""
        kinds = self.raw.get(key)
        if kinds is None:
            return ()
        if not isinstance(kinds, list) or len(kinds) != self.layers or any(kind not in known for kind in kinds):
            raise ConfigError(f"config.json: {key} must say {' or '.join(known)} for each layer")
        return tuple(kinds)

    def _typed_windows(self) -> tuple[int, ...]:
        """By ``layer_types``; empty where config.json has none."""
        window, kinds = self.size("sliding_window", _WINDOW), self.layer_types("full_attention", "sliding_attention")
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def _size(
    raw: Mapping[str, Any],
    key: str,
    default: int | None = None,
    maximum: int = MAX_SIZE,
    names: Mapping[str, str] | None = None,
) -> int:
    value, name = raw.get(key), (names or {}).get(key, key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"config.json: {name} must be a whole number of at least 1, and is {value!r}")
    if value > maximum:
        raise ConfigError(f"config.json: {name} must be at most {maximum}, and is {value}; is the file damaged?")
    return value


def _number(raw: Mapping[str, Any], key: str, default: float) -> float:
    value = raw.get(key)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise ConfigError(f"config.json: {key} must be a number above 0, and is {value!r}")
    return float(value)


def _factors(value: object, name: str, count: int) -> tuple[float, ...]:
    """A factor for each pair of dimensions."""
    if not isinstance(value, list) or len(value) != count:
        raise ConfigError(f"{name} needs {count} factors")
    if not all(isinstance(one, int | float) and math.isfinite(one) and one > 0 for one in value):
        raise ConfigError(f"{name} needs numbers above 0")
    return tuple(map(float, value))


def _rope(
    raw: Mapping[str, Any], max_positions: int, head_dim: int, rotary: float = 1.0, default_theta: float = 10000.0
) -> RopeConfig:
    """``rotary``, ``default_theta``: as ``ConfigReader.decoder``. Of parameters by kind of layer, full attention's."""
    given: dict[str, Any] = {"rope_theta": raw.get("rope_theta")}
    given["partial_rotary_factor"] = raw.get("partial_rotary_factor")
    given["original_max_position_embeddings"] = raw.get("original_max_position_embeddings")
    for key in ("rope_scaling", "rope_parameters"):
        part = raw.get(key) or {}
        if not isinstance(part, dict):
            raise ConfigError(f"config.json: {key} must be an object, and is {part!r}")
        if isinstance(full := part.get("full_attention"), dict):
            part = full
        given.update({name: value for name, value in part.items() if value is not None})
    theta = _number(given, "rope_theta", default_theta)
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind == "su" or (kind == "yarn" and "short_factor" in given):  # its first names
        kind = "longrope"
    dim = int(head_dim * _number(given, "partial_rotary_factor", rotary))
    if dim % 2 or not 0 < dim <= head_dim:
        raise ConfigError(
            f"partial_rotary_factor rotates {dim} of a head's {head_dim} numbers; it must be an even number of them"
        )
    head_dim, dim = dim, dim if dim < head_dim else 0
    if kind in ("default", "dynamic"):
        return RopeConfig(theta=theta, dim=dim)
    if kind == "factors":
        return RopeConfig(
            theta=theta, kind=kind, factors=_factors(given.get("factors"), "rope_type factors", head_dim // 2), dim=dim
        )
    if kind not in ("linear", "llama3", "yarn", "longrope"):
        raise ConfigError(
            f"rope_type {kind!r} is not supported; supported are default, linear, llama3, yarn, longrope, dynamic"
        )
    original = given["original_max_position_embeddings"]
    if kind == "llama3" and original is None:
        raise ConfigError("rope_type llama3 needs original_max_position_embeddings")
    original_length = _size(given, "original_max_position_embeddings", max_positions)
    attention_factor = given.get("attention_factor")
    long: tuple[float, ...] = ()
    short: tuple[float, ...] = ()
    if kind == "longrope":
        long = _factors(given.get("long_factor"), "rope_type longrope: long_factor", head_dim // 2)
        short = _factors(given.get("short_factor"), "rope_type longrope: short_factor", head_dim // 2)
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=_number(given, "factor", max_positions / original_length),
        original_length=original_length,
        low_freq_factor=_number(given, "low_freq_factor", 1.0),
        high_freq_factor=_number(given, "high_freq_factor", 4.0),
        beta_fast=_number(given, "beta_fast", 32.0),
        beta_slow=_number(given, "beta_slow", 1.0),
        attention_factor=None if attention_factor is None else _number(given, "attention_factor", 1.0),
        mscale=_number(given, "mscale", 0.0) if given.get("mscale") else 0.0,
        mscale_all_dim=_number(given, "mscale_all_dim", 0.0) if given.get("mscale_all_dim") else 0.0,
        truncate=bool(given.get("truncate", True)),
        factors=long,
        short_factors=short,
        dim=dim,
    )
