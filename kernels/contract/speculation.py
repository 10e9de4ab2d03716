"""The settings of speculation, as plain data: they cross a process boundary, so nothing here imports torch."""

from __future__ import annotations

from typing import Literal

import msgspec

from kernels.contract.expert_settings import ExchangeSettings

__all__ = ["AdaptiveSettings", "Algorithm", "NgramSettings", "SpeculativeSettings", "same_tokens"]

Algorithm = Literal["EAGLE", "EAGLE3", "MTP", "DFLASH", "STANDALONE", "NGRAM"]


class NgramSettings(msgspec.Struct, frozen=True):
    """NGRAM: settings of the trie of seen tokens and of the trees from it."""

    min_breadth: int = 1  # children that a node of the draft tree has, at least ...
    max_breadth: int = 10  # ... and at most
    match_type: Literal["BFS", "PROB"] = "BFS"  # by recency, or by frequency
    max_depth: int = 18  # tokens of a suffix that is stored and matched
    min_window: int = 1  # tokens that a match has, at least
    max_window: int = 12  # and at most
    capacity: int = 10_000_000  # nodes of the trie


class AdaptiveSettings(msgspec.Struct, frozen=True):
    """Adaptive speculation: fewer draft tokens where they are not accepted."""

    enabled: bool = False
    config: str = "{}"  # JSON object of the policy's own settings


class SpeculativeSettings(msgspec.Struct, frozen=True):
    """All a runner needs to draft and verify. Every value is already chosen and checked.

    A step verifies up to ``num_draft_tokens`` nodes of each row, including the last known token; a chain of
    ``num_steps`` draft tokens has ``num_steps + 1`` nodes.
    """

    algorithm: Algorithm
    draft_model_path: str = ""  # a directory; empty for NGRAM, and where the model's own file has the heads
    num_steps: int = 3  # draft passes: the depth of the tree
    topk: int = 1  # continuations of each expanded node
    num_draft_tokens: int = 4  # nodes of a row in a verify pass, the root among them: 2 to 64
    accept_threshold_single: float = 1.0  # below 1 drafts are accepted that the target would not sample
    accept_threshold_acc: float = 1.0  # the same, by the accumulated probability of the children tried
    block_size: int = 0  # DFLASH: tokens of a block, the root among them; 0: num_draft_tokens
    draft_window: int = 0  # DFLASH: positions that the draft sees; 0: all
    token_map: str = ""  # FR-Spec: a JSON list of token ids; the draft's head has only these
    capture_layers: tuple[int, ...] = ()  # EAGLE3: after which layers features are taken; empty: the draft's own
    multi_layer: bool = False  # MTP: one layer for each step, where the checkpoint has them
    ngram: NgramSettings = NgramSettings()
    adaptive: AdaptiveSettings = AdaptiveSettings()
    load_format: str = ""  # of the draft; empty: the target's
    quantization: str = ""  # of the draft, as RunnerConfig.quantization; empty: as it says, or as the target's
    attention_mode: Literal["prefill", "decode"] = "prefill"  # which operator verifies
    draft_attention_backend: str = ""  # empty: the target's
    disable_graphs: bool = False  # run the draft without captured graphs
    exchange: ExchangeSettings | None = None  # of the draft's experts, which all ranks of dp_size parts then divide
    fixed_acceptance: float = 0.0  # benchmarks only: so many tokens are accepted a step, right or wrong; 0: off

    @property
    def lossy(self) -> bool:
        """Whether accepted tokens may differ from the target's samples."""
        return self.accept_threshold_single < 1.0 or self.accept_threshold_acc < 1.0 or self.fixed_acceptance > 0


def same_tokens(draft: int, target: int) -> bool:
    """Whether embedding tables of these sizes may have the same vocabulary: padding may differ by at most 1/256."""
    return abs(draft - target) * 256 <= max(draft, target)
