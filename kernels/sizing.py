"""How many pages the cache gets."""

from __future__ import annotations

from kernels.models.config import ConfigError, ModelConfig
from kernels.platforms.base import Memory
from kernels.step import RunnerConfig

__all__ = ["CacheSizeError", "cache_pages", "context_length"]


class CacheSizeError(ValueError):
    """The memory that was asked for does not hold a cache."""


def context_length(config: RunnerConfig, model: ModelConfig) -> int:
    """Tokens that a sequence may have. Raises ConfigError."""
    if config.context_length > model.max_positions:
        raise ConfigError(
            f"a context of {config.context_length} tokens is longer than the model's {model.max_positions}; lower "
            "--context-length, or, if the model is known to work there, raise max_position_embeddings by "
            "--json-model-override-args"
        )
    return config.context_length or model.max_positions


def cache_pages(
    config: RunnerConfig,
    token_bytes: int,
    context: int,
    weight_bytes: int,
    memory: Memory,
    default_fraction: float,
    default_tokens: int,
    draft_bytes: int = 0,
    ahead: int = 1,
) -> int:
    """Pages of the cache, page 0 included. Raises CacheSizeError.

    ``max_total_tokens`` is taken as it is, if it fits. Else ``mem_fraction_static`` of the device's memory, less the
    weights, is filled. Else ``default_fraction`` of what is free, but no more than all slots could use and no more
    than ``default_tokens`` (or one full context, if that is longer).
    ``draft_bytes``: of a token in a draft's own cache. ``ahead``: positions that steps under way may need more.
    ``token_bytes``: of a token over all layers. ``context``: tokens a sequence may have. ``memory``: after the weights.
    """
    page_bytes = (token_bytes + draft_bytes) * config.page_size

    def pages_for(tokens: int) -> int:
        return -(-tokens // config.page_size)

    most = (config.max_slots - 1) * pages_for(context + ahead)
    if config.max_total_tokens:
        pages = pages_for(config.max_total_tokens)
        if (pages + 1) * page_bytes > memory.free:
            raise CacheSizeError(
                f"a cache of {config.max_total_tokens} tokens takes {_gib(pages * page_bytes)}, and "
                f"{_gib(memory.free)} are free; lower --max-total-tokens"
            )
        return pages + 1
    if config.mem_fraction_static:
        budget = int(config.mem_fraction_static * memory.total) - weight_bytes
        pages = min(most, min(budget, memory.free) // page_bytes - 1)
    else:
        pages = min(most, int(default_fraction * memory.free) // page_bytes - 1)
        if default_tokens:
            pages = min(pages, max(pages_for(default_tokens), pages_for(context + 1)))
    if pages < 1:
        raise CacheSizeError(
            f"no memory is left for a cache: {_gib(memory.free)} are free after {_gib(weight_bytes)} of weights; "
            "raise --mem-fraction-static, or use a smaller model or dtype"
        )
    return pages + 1


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
