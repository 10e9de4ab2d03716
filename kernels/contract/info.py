"""The description of a loaded model."""

from __future__ import annotations

import msgspec

from kernels.contract.caches import GroupPages
from kernels.contract.pooling import PoolingConfig

__all__ = ["ModelInfo"]


class ModelInfo(msgspec.Struct, frozen=True):
    """A loaded runner's description of its model, cache and limits."""

    architecture: str
    dtype: str
    device: str
    vocab_size: int
    context_length: int  # tokens a sequence may have
    layers: int
    parameters: int
    weight_bytes: int  # of a worker; the engine's are of all workers that run the model together
    num_pages: int  # of the main page table: usable ids are 1 .. num_pages - 1; page 0 is the null page
    page_size: int
    cache_bytes: int  # as weight_bytes
    load_seconds: dict[str, float]  # by phase
    graph_rows: tuple[int, ...] = ()  # rows of each captured decode
    # most tokens that a row runs to verify draft tokens, its own last token among them; 1: off
    speculative_nodes: int = 1
    speculative_depth: int = 0  # most draft tokens that a row accepts in a step
    speculative_levels: tuple[int, ...] = (0,)  # draft tokens that a row verifies, by levels of its draft
    speculative_tokens: int = 0  # most tokens that the rows of a step should verify together; 0: no limit
    speculative_decode_only: bool = False  # steps with prompts should verify no draft tokens
    draft_parameters: int = 0
    draft_weight_bytes: int = 0
    cache_dtype: str = ""
    cache_token_bytes: int = 0  # of one token's keys and values over all layers, their scales among them
    tasks: tuple[str, ...] = ("generate", "embed", "score", "next_token")  # see kernels.contract.tasks
    pooling: PoolingConfig | None = None  # of a model that generates no text
    hidden_size: int = 0  # numbers of a hidden state, and so of an embedding; 0: not known
    experts: tuple[int, int] = (0, 0)  # layers, and experts that a token takes in each; 0: there are none
    cpu_isa: str = ""  # the instruction set that a CPU's operators may use
    # a CPU's native operators at load: of the "wheel", "compiled" on this machine, "pending": still compiled, or "none"
    cpu_operators: str = ""
    cache_groups: tuple[GroupPages, ...] = ()  # what the layers keep, and the pages of each group

    @property
    def max_prompt_tokens(self) -> int:
        """Tokens that a prompt may have: an encoder's fills the context, others leave room for a token after it."""
        return self.context_length - (self.pooling is None or not self.pooling.encoder)

    @property
    def bounded_groups(self) -> tuple[GroupPages, ...]:
        """Groups with a page table of their own, in the order in which messages speak of them."""
        return tuple(group for group in self.cache_groups if group.bounded)
