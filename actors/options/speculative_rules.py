"""Checks of the arguments of speculative decoding against each other, without the files of the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from actors.options.table import SPECULATIVE_ARGUMENTS

if TYPE_CHECKING:
    from actors.options.values import Arguments

__all__ = ["speculative_problems", "tree_size"]

_MAX_PLACES = 64
"""The attention mask of a draft tree has one 64-bit integer a node."""

_DRAFTING = ("EAGLE", "EAGLE3", "MTP", "STANDALONE")
"""Algorithms with an autoregressive draft model."""

_ONLY: dict[str, tuple[str, ...]] = {
    "speculative_draft_model_path": (*_DRAFTING, "DFLASH"),
    "speculative_draft_load_format": (*_DRAFTING, "DFLASH"),
    "speculative_draft_attention_backend": (*_DRAFTING, "DFLASH"),
    "speculative_draft_model_quantization": (*_DRAFTING, "DFLASH"),
    "speculative_enforce_eager": (*_DRAFTING, "DFLASH"),
    "speculative_num_steps": _DRAFTING,
    "speculative_eagle_topk": _DRAFTING,
    "speculative_token_map": ("EAGLE", "MTP", "STANDALONE"),
    "speculative_moe_a2a_backend": ("EAGLE", "MTP", "STANDALONE"),
    "eagle3_layers_to_capture": ("EAGLE3",),
    "enable_multi_layer_eagle": ("EAGLE", "MTP"),
    "speculative_dflash_block_size": ("DFLASH",),
    "speculative_dflash_draft_window_size": ("DFLASH",),
    **{argument.field: ("NGRAM",) for argument in SPECULATIVE_ARGUMENTS if "ngram" in argument.name},
}


def tree_size(steps: int, topk: int) -> int:
    """Number of nodes that a draft generates in ``steps`` levels, including the root.

    The first level is ``topk`` wide, and each of the ``topk`` best nodes of a level has ``topk`` followers.
    """
    return 1 + topk + (steps - 1) * topk * topk


def speculative_problems(arguments: Arguments) -> Iterator[str]:
    """A sentence for each broken rule."""
    given = [
        argument.field
        for argument in SPECULATIVE_ARGUMENTS
        if argument.name != "speculative-algorithm" and getattr(arguments, argument.field) != argument.default
    ]
    if arguments.speculative_draft_model_quantization is not None:
        given.append("speculative_draft_model_quantization")
    algorithm = arguments.speculative_algorithm
    if algorithm is None:
        if given:
            yield f"{', '.join(given)} without speculative_algorithm has no effect; give one, such as EAGLE3, or NGRAM"
        return
    for field in given:
        if field in _ONLY and algorithm not in _ONLY[field]:
            yield f"{field} has no effect with speculative_algorithm {algorithm}, only with {_listed(_ONLY[field])}"
    if arguments.speculative_draft_model_revision is not None and arguments.speculative_draft_model_path is None:
        yield "speculative_draft_model_revision needs speculative_draft_model_path"
    if arguments.speculative_moe_a2a_backend != "none":
        if arguments.exchange_mode is None:
            yield "speculative_moe_a2a_backend needs moe_a2a_backend deepep, by which the model's tokens travel"
        if arguments.enable_multi_layer_eagle:
            yield (
                "speculative_moe_a2a_backend contradicts enable_multi_layer_eagle: a pass of several heads runs only "
                "one of them, and all devices must run the same layers; leave one out"
            )
    if arguments.speculative_adaptive_config is not None and not arguments.speculative_adaptive:
        yield "speculative_adaptive_config needs speculative_adaptive"
    layers = arguments.eagle3_layers_to_capture
    if layers is not None and (not layers or len(set(layers)) != len(layers)):
        yield "eagle3_layers_to_capture: name each layer once, such as 2 16 29"
    if algorithm in _DRAFTING:
        yield from _tree(arguments)
    elif algorithm == "DFLASH":
        yield from _block(arguments)
    else:
        yield from _ngram(arguments)


def _tree(arguments: Arguments) -> Iterator[str]:
    steps, topk = arguments.speculative_num_steps, arguments.speculative_eagle_topk
    tokens = arguments.speculative_num_draft_tokens
    names = "speculative_num_steps, speculative_eagle_topk and speculative_num_draft_tokens"
    if steps is None:
        if topk is not None or tokens is not None:
            yield f"{names} belong together: give all three or none; speculative_num_steps is missing"
        return
    if topk is None:
        if tokens is not None and tokens != steps + 1:
            yield (
                f"{names} belong together: speculative_eagle_topk is missing, and without it {steps} steps verify "
                f"{steps + 1} tokens, not {tokens}"
            )
        return
    if topk == 1:
        if tokens is not None and tokens != steps + 1:
            yield (
                f"speculative_eagle_topk 1 drafts a chain, which has speculative_num_steps + 1 tokens: "
                f"speculative_num_draft_tokens must be {steps + 1} or left out, not {tokens}"
            )
        return
    if tokens is None:
        yield f"{names} belong together: give all three or none; speculative_num_draft_tokens is missing"
    elif tokens > tree_size(steps, topk):
        yield (
            f"speculative_num_draft_tokens {tokens} is more than the {tree_size(steps, topk)} nodes that a tree of "
            f"{steps} steps with {topk} followers has; lower it, or raise the steps or the followers"
        )
    elif tokens <= steps:
        yield (
            f"speculative_num_draft_tokens {tokens} cannot hold a path of {steps} steps and the token before it; give "
            f"at least {steps + 1}"
        )
    if steps * topk > _MAX_PLACES:
        yield (
            f"{steps} steps of {topk} nodes are more than the {_MAX_PLACES} that a draft may expand; lower "
            "speculative_num_steps or speculative_eagle_topk"
        )


def _block(arguments: Arguments) -> Iterator[str]:
    tokens, block = arguments.speculative_num_draft_tokens, arguments.speculative_dflash_block_size
    window = arguments.speculative_dflash_draft_window_size
    if tokens is not None and block is not None and tokens != block:
        yield (
            f"speculative_dflash_block_size {block} and speculative_num_draft_tokens {tokens} are the same setting; "
            "give one"
        )
    minimum = block or tokens
    if window is not None and minimum is not None and window < minimum:
        yield f"speculative_dflash_draft_window_size {window} must be at least the block size, {minimum}"


def _ngram(arguments: Arguments) -> Iterator[str]:
    a = arguments
    shortest, longest = a.speculative_ngram_min_match_window_size, a.speculative_ngram_max_match_window_size
    minimum, maximum = a.speculative_ngram_min_bfs_breadth, a.speculative_ngram_max_bfs_breadth
    if shortest > longest:
        yield (
            f"speculative_ngram_min_match_window_size {shortest} must be at most "
            f"speculative_ngram_max_match_window_size, {longest}"
        )
    if a.speculative_ngram_match_type == "PROB" and minimum != 1:
        yield (
            "speculative_ngram_min_bfs_breadth has no effect with speculative_ngram_match_type PROB, whose breadth is "
            "speculative_ngram_max_bfs_breadth; leave it out"
        )
    if minimum > maximum:
        yield (
            f"speculative_ngram_min_bfs_breadth {minimum} must be at most speculative_ngram_max_bfs_breadth, {maximum}"
        )
    if shortest >= a.speculative_ngram_max_trie_depth:
        yield (
            f"speculative_ngram_max_trie_depth {a.speculative_ngram_max_trie_depth} holds a match of "
            f"speculative_ngram_min_match_window_size {shortest} and nothing after it; give at least {shortest + 1}"
        )


def _listed(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
