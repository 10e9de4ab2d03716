"""Opens the files of a model and refuses what it cannot run; nothing is on the device yet."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kernels.contract.caches import CacheGroup, Latent, Paged, follows_chains, has_states, is_plain
from kernels.contract.config import RunnerConfig
from kernels.contract.divisions import stage_layers
from kernels.contract.errors import ConfigError
from kernels.contract.expert_settings import ExchangeSettings
from kernels.contract.runner import Progress
from kernels.core.layer_context import RowAdapters
from kernels.devices.base import Device
from kernels.execution.layer_groups import check_groups
from kernels.models.config import ModelConfig, local_config
from kernels.models.config_loader import CodeChoice, read_config
from kernels.models.registry import caches, tensors
from kernels.models.stages import check_stages, stage_config
from kernels.speculation.load import captured_layers
from kernels.state.cache_dtype import CacheChoice, choose_cache
from kernels.state.cache_size import context_length
from kernels.weights.loading import CheckpointFiles, Placement, WeightLoader, open_weights
from kernels.weights.quantization.detect import detect_scheme
from kernels.weights.quantization.online import ONLINE
from kernels.weights.tensors import Shard

__all__ = ["OpenModel", "open_model"]


@dataclass(frozen=True, eq=False)
class OpenModel:
    """A model whose files are open for ``config`` and ``device``, with nothing on the device yet.

    ``whole``: sizes of the full model; ``part``: of this rank's part. ``context``: tokens that a sequence may have.
    ``captures``: layers whose results the drafter reads. ``cache``: dtype and scales of keys and values. ``groups``:
    the cache groups of the layers.
    """

    config: RunnerConfig
    device: Device
    whole: ModelConfig
    part: ModelConfig
    dtype: torch.dtype
    context: int
    captures: tuple[int, ...]
    weights: WeightLoader
    cache: CacheChoice
    groups: tuple[CacheGroup, ...]
    adapters: RowAdapters | None = None


def open_model(config: RunnerConfig, device: Device, progress: Progress) -> OpenModel:
    """Open the files and check that the model can run. Raises ConfigError, LoadError or UnsupportedError."""
    whole = _read_config(config)
    _check_options(whole, config)
    if config.context_parallel:
        whole = _with_whole_attention(whole, config)
    if config.whole_dense:
        whole = _with_whole_dense(whole)
    part = _part(whole, config)
    dtype = device.select_dtype(config.dtype, part.dtype)
    context = context_length(config, part)
    captures = captured_layers(config.speculation, whole) if config.speculation is not None else ()
    weights = _open_weights(whole, dtype, config, device, progress)
    cache = _choose_cache(whole, dtype, config, device)
    device.cache.dtype, device.cache.page_size = cache.dtype, config.page_size
    groups = _open_groups(config, part, cache, context, device)
    return OpenModel(config, device, whole, part, dtype, context, captures, weights, cache, groups)


def _read_config(config: RunnerConfig) -> ModelConfig:
    """The sizes of the full model. Raises ConfigError or UnsupportedError."""
    return read_config(
        config.model_path,
        config.config_overrides,
        quantized=True,
        is_embedding=config.is_embedding,
        code=CodeChoice(
            config.model_impl,
            config.trust_remote_code,
            config.quantization if config.quantization in ONLINE else "",
            config.load_format == "dummy",
            config.random_seed,
        ),
    )


def _part(whole: ModelConfig, config: RunnerConfig) -> ModelConfig:
    """The sizes of this rank's part of each layer, and of its stage's layers."""
    routed_alone = config.exchange is not None
    local = local_config(whole, config.attention_size, config.dp_size, config.ep_size, routed_alone=routed_alone)
    return stage_config(local, config.pp_rank, config.pp_size)


def _open_weights(
    whole: ModelConfig, dtype: torch.dtype, config: RunnerConfig, device: Device, progress: Progress
) -> WeightLoader:
    """The weights, of which each tensor is read when it is asked for. Raises ConfigError or LoadError."""
    scheme = detect_scheme(config.model_path, config.quantization, config.config_overrides)
    return open_weights(
        CheckpointFiles(config.model_path, config.load_format, config.random_seed),
        tensors(whole) if scheme is None else scheme.adapt(tensors(whole)),
        Placement(dtype, device.torch_device, _shard(config)),
        scheme,
        lambda fraction: progress("weights", 0.9 * fraction),
    )


def _shard(config: RunnerConfig) -> Shard:
    """The rank's part of the tensors."""
    parts = config.ep_size
    experts = Shard(config.tp_rank, config.tp_size, ep_size=parts) if config.dp_size > 1 else None
    return Shard(config.attention_rank, config.attention_size, experts, parts, config.exchange is not None)


def _choose_cache(whole: ModelConfig, dtype: torch.dtype, config: RunnerConfig, device: Device) -> CacheChoice:
    """Dtype and scales of the cache of this stage's layers. Raises ConfigError or LoadError."""
    cache = choose_cache(config, whole, dtype, device)
    if config.pp_size == 1 or cache.scales is None:
        return cache
    layers = stage_layers(whole.layers, config.pp_rank, config.pp_size)
    return replace(cache, scales=cache.scales[layers.start : layers.stop])


def _check_options(whole: ModelConfig, config: RunnerConfig) -> None:
    """Raises ConfigError for options that the model does not run with."""
    if whole.code is not None:
        _check_code(whole, config)
    if whole.pooling is not None and config.speculation is not None:
        raise ConfigError(
            f"{whole.architecture} generates no text that could be drafted; leave --speculative-algorithm out"
        )
    if config.pp_size > 1:
        check_stages(whole, config.pp_size)
    _check_experts(whole, config)
    if config.two_batch_threshold is not None:
        _check_two_batches(whole)
    if config.exchange is not None:
        _check_exchange(whole, config.exchange, config)
    if config.dp_size > 1:
        _check_shared(whole, config)
    _check_states(whole, config)


def _check_code(whole: ModelConfig, config: RunnerConfig) -> None:
    """Raises ConfigError for options that transformers' modeling code does not support."""
    wrong = {
        "--speculative-algorithm": config.speculation is not None,
        "--quantization": config.quantization not in ("", "unquant", *ONLINE),
        "--kv-cache-dtype": bool(config.kv_cache_dtype),
        "--enable-fp32-lm-head": config.fp32_head,
        "--enable-deterministic-inference": config.invariant,
        "--enable-lora": config.adapters is not None,
    }
    given = [name for name, is_given in wrong.items() if is_given]
    if given:
        raise ConfigError(
            f"{whole.architecture} runs by transformers' modeling code, which is without {', '.join(given)}; leave "
            "it out"
        )


def _check_experts(whole: ModelConfig, config: RunnerConfig) -> None:
    """Raises ConfigError for experts that ``ep_size`` does not divide."""
    size, experts = config.ep_size, whole.experts
    if config.experts is not None and (size == 1 or config.pp_size > 1):
        raise ConfigError(
            "--ep-num-redundant-experts, --init-expert-location and --enable-eplb need --expert-parallel-size, and do "
            "not run with --pipeline-parallel-size; leave them out"
        )
    if size == 1:
        return
    if size < 1 or config.tp_size % size:
        raise ConfigError(f"--expert-parallel-size {size} must divide --tensor-parallel-size {config.tp_size}")
    option = "--expert-parallel-size" if config.exchange is None else "--moe-a2a-backend"
    if experts is None:
        raise ConfigError(f"{whole.architecture} has no experts to divide: leave {option} out")
    placed = whole.code is None and any(spec.is_placed for spec in tensors(whole).values())
    if not placed or experts.identities:
        raise ConfigError(
            f"the experts of {whole.architecture} can only be divided by their inner dimension: leave {option} out; "
            "--tensor-parallel-size divides them"
        )
    redundant = 0 if config.experts is None else config.experts.redundant
    if (experts.count + redundant) % size:
        more = f" and {redundant} copies" if redundant else ""
        how = f"by {option} {size}" if config.exchange is None else f"over {size} devices, as {option} does"
        raise ConfigError(
            f"the {experts.count} experts of {whole.architecture}{more} cannot be divided {how}; "
            "--ep-num-redundant-experts adds further copies"
        )


def _check_two_batches(whole: ModelConfig) -> None:
    """Raises ConfigError for a model whose layers keep something beside pages, which two passes in turns would mix."""
    reasons = {
        "transformers' modeling code runs it": whole.code is not None,
        "its layers keep recurrent states": whole.recurrence is not None,
        "its attention is sparse": whole.indexed,
        "it embeds or classifies whole prompts": whole.pooling is not None,
    }
    for reason, found in reasons.items():
        if found:
            raise ConfigError(
                f"{whole.architecture} cannot run as two batches: {reason}; leave --enable-two-batch-overlap out"
            )


def _check_shared(whole: ModelConfig, config: RunnerConfig) -> None:
    """Raises ConfigError for what data-parallel attention does not run."""
    if whole.code is not None or whole.experts is None:
        raise ConfigError(
            f"{whole.architecture} has no layers of experts that ranks could share; leave --enable-dp-attention out: "
            "--data-parallel-size alone runs replicas of the whole model"
        )
    if config.pp_size > 1:
        raise ConfigError("--enable-dp-attention does not run with --pipeline-parallel-size; leave one out")


def _check_exchange(whole: ModelConfig, exchange: ExchangeSettings, config: RunnerConfig) -> None:
    """Raises ConfigError if the model or the parallel sizes allow no all-to-all of experts."""
    if config.dp_size == 1 or config.ep_size != config.tp_size:
        raise ConfigError(
            "--moe-a2a-backend deepep needs --enable-dp-attention and --enable-expert-parallel: without the first every"
            " rank has all tokens, without the second no rank has whole experts"
        )
    if exchange.overlap and (whole.experts is None or not whole.experts.shared):
        raise ConfigError(
            f"--enable-single-batch-overlap: {whole.architecture} has no shared expert that could run beside the "
            "exchange of rows; leave it out"
        )


def _check_states(whole: ModelConfig, config: RunnerConfig) -> None:
    """Raises ConfigError for options of recurrent states where the model has none."""
    options = {
        "--max-mamba-cache-size": config.max_states,
        "--mamba-full-memory-ratio": config.state_memory_ratio,
        "--mamba-track-interval": config.snapshot_tokens,
    }
    given = [name for name, value in options.items() if value]
    if given and whole.recurrence is None:
        raise ConfigError(f"{whole.architecture} keeps no recurrent states; leave {', '.join(given)} out")


def _with_whole_attention(whole: ModelConfig, config: RunnerConfig) -> ModelConfig:
    """The config with whole attention on every rank. Raises ConfigError for models and options without it."""
    latent, option = whole.latent, "--enable-nsa-prefill-context-parallel"
    if latent is None or latent.index is None:
        raise ConfigError(f"{whole.architecture} has no sparse attention, which {option} needs; leave it out")
    others = {
        "drafts that read hidden states between layers (EAGLE3, DFLASH)": config.speculation is not None
        and bool(captured_layers(config.speculation, whole)),
        "--pipeline-parallel-size": config.pp_size > 1,
        "--enable-dp-attention": config.dp_size > 1,
    }
    for name, given in others.items():
        if given:
            raise ConfigError(f"{option} does not run with {name}; leave one out")
    return replace(whole, latent=replace(latent, whole=True))


def _with_whole_dense(whole: ModelConfig) -> ModelConfig:
    """The config with whole dense feed-forward layers on every rank. Raises ConfigError for a model without any."""
    result = replace(whole, whole_dense=True)
    if whole.code is not None or whole.experts is None or tensors(result) == tensors(whole):
        raise ConfigError(
            f"{whole.architecture} has no dense feed-forward layers beside layers of experts that could be whole on "
            "each device; leave --moe-dense-tp-size out"
        )
    return result


_WINDOW_SHARE = 0.5
"""Layers keep their windows alone if the longest sequence then takes less than this share of memory: drafts and narrow
caches know one page table."""


def _open_groups(
    config: RunnerConfig, part: ModelConfig, cache: CacheChoice, context: int, device: Device
) -> tuple[CacheGroup, ...]:
    """The cache groups of a rank's layers. Raises ConfigError for options that their kinds do not support."""
    eager = part.eager_with(device.attention.plans)
    plain_only = config.speculation is not None or cache.dtype is not None or config.two_batch_threshold is not None
    kept = sum(min(context, abs(window) or context) for window in part.windows)
    share = 1.0 if eager else _WINDOW_SHARE  # of which nothing is captured anyway
    saves = kept < share * context * part.layers
    windows = config.window_pages and saves and not plain_only and config.pp_size == 1  # stages share page tables
    groups = caches(part, windows=windows)
    check_groups(groups, part.layers)
    _check_page_size(config, part)
    _check_scale_offsets(part, cache, device, eager=bool(eager))
    if config.invariant:
        _check_invariant(part, device)
    if not is_plain(groups):
        _check_kinds(config, part, cache, groups)
    return groups


def _check_page_size(config: RunnerConfig, part: ModelConfig) -> None:
    """Raises ConfigError for tokens that ``page_size`` does not divide, or that do not divide it."""
    if config.snapshot_tokens % config.page_size:
        raise ConfigError(
            f"mamba_track_interval {config.snapshot_tokens} is not a multiple of --page-size {config.page_size}; "
            "change one of them"
        )
    chunk = -min(part.windows)
    if chunk > 0 and chunk % config.page_size:
        raise ConfigError(
            f"attention_chunk_size {chunk} of {part.architecture} is not a multiple of --page-size {config.page_size}"
        )
    if config.page_size % part.page_unit:
        raise ConfigError(
            f"--page-size {config.page_size} is not a multiple of {part.page_unit} tokens, over which "
            f"{part.architecture} divides its cache's entries; change it"
        )


def _check_scale_offsets(part: ModelConfig, cache: CacheChoice, device: Device, *, eager: bool) -> None:
    """Raises ConfigError for static scales with offsets, which the device's kernel for such attention does not read."""
    shifted = not eager and "offsets" not in device.attention.plans
    if part.row_attention and shifted and any(layer.offsets is not None for layer in cache.scales or ()):
        raise ConfigError(
            f"{part.architecture} has {part.eager_attention}, which does not read a cache whose static scales have "
            "offsets: leave --kv-cache-dtype out, or scale tokens dynamically"
        )


def _check_invariant(part: ModelConfig, device: Device) -> None:
    """Raises ConfigError for layers whose results depend on the chunks of prompts."""
    if part.eager_attention:
        raise ConfigError(
            f"{part.architecture} has {part.eager_attention}, for which no attention gives results independent "
            "of the chunks of prompts; leave --enable-deterministic-inference out"
        )
    latent = part.latent
    if latent is not None and (latent.index is not None or not device.attention.invariant_latent):
        raise ConfigError(
            f"latent attention of {part.architecture} has no form whose results are independent of the chunks of "
            "prompts; leave --enable-deterministic-inference out"
        )
    if part.recurrence is not None:
        raise ConfigError(
            f"states of {part.architecture} have no form whose results are independent of the chunks of prompts; leave "
            "--enable-deterministic-inference out"
        )


def _check_kinds(config: RunnerConfig, part: ModelConfig, cache: CacheChoice, groups: tuple[CacheGroup, ...]) -> None:
    """Raises ConfigError for trees of draft tokens and narrow caches, where layers keep more than plain pages."""
    if config.speculation is not None and config.speculation.topk > 1 and follows_chains(groups):
        what = "states" if has_states(groups) else "windows"
        raise ConfigError(
            f"layers of {part.architecture} keep {what}, which follow a single chain of draft tokens: use "
            "--speculative-eagle-topk 1"
        )
    if cache.dtype is not None and not all(isinstance(group.spec, Paged | Latent) for group in groups):
        kinds = ", ".join(sorted({type(group.spec).__name__.lower() for group in groups}))
        raise ConfigError(
            f"--kv-cache-dtype is for keys and values of all tokens in every layer, and the layers of "
            f"{part.architecture} keep: {kinds}; leave it out"
        )
