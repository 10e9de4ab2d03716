"""Computes the number of pages of the cache."""

from __future__ import annotations

from kernels.contract.config import RunnerConfig
from kernels.contract.errors import CacheSizeError, ConfigError
from kernels.devices.memory import MemoryUsage
from kernels.models.config import ModelConfig
from kernels.state.group_sizes import GroupSizes

__all__ = ["cache_pages", "context_length"]


def context_length(config: RunnerConfig, model: ModelConfig) -> int:
    """The most tokens of a sequence. Raises ConfigError."""
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
    memory: MemoryUsage,
    *,
    default_fraction: float,
    default_tokens: int,
    draft_bytes: int = 0,
    ahead: int = 1,
    sizes: GroupSizes | None = None,
) -> int:
    """Pages of the cache, page 0 included. Raises CacheSizeError.

    ``max_total_tokens`` sets the size, if it fits. Otherwise ``mem_fraction_static`` of the device's memory, minus the
    weights, is used. Otherwise ``default_fraction`` of the free memory is used, but at most what all slots can use and
    at most ``default_tokens`` (or one full context, if that is longer). ``draft_bytes``: of a token in a draft's own
    cache. ``ahead``: additional positions that steps in flight may need. ``sizes``: group sizes of a model with bounded
    groups, which share the memory. ``token_bytes``: of a token over all layers. ``context``: most tokens of a sequence.
    ``memory``: after the weights.
    """
    draft_page = draft_bytes * config.page_size
    page_bytes = token_bytes * config.page_size + draft_page

    def pages_for(tokens: int) -> int:
        return -(-tokens // config.page_size)

    def bytes_of(pages: int) -> int:
        return sizes.bytes(pages) + pages * draft_page if sizes is not None else pages * page_bytes

    def pages_in(budget: int) -> int:
        if sizes is not None:
            return sizes.max_pages(budget, max_pages + 1, draft_page) - 1
        return budget // page_bytes - 1

    max_pages = (config.max_slots - 1) * pages_for(context + ahead)
    if config.max_total_tokens:
        pages = pages_for(config.max_total_tokens)
        if bytes_of(pages + 1) > memory.free:
            raise CacheSizeError(
                f"a cache of {config.max_total_tokens} tokens takes {_gib(bytes_of(pages))}, and "
                f"{_gib(memory.free)} are free; lower --max-total-tokens"
            )
        return pages + 1
    if config.mem_fraction_static:
        budget = int(config.mem_fraction_static * memory.total) - weight_bytes
        pages = min(max_pages, pages_in(min(budget, memory.free)))
    else:
        pages = min(max_pages, pages_in(int(default_fraction * memory.free)))
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
