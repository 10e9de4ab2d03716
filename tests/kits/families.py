"""Small models of every family, by the names that the fixture ``reference`` has for them, and what is compared with
transformers, or with the published formulas, on each device."""

from __future__ import annotations

from collections.abc import Mapping

from tests.kits.driver import DENSE, FAMILIES, HYBRID, LATENT, ROUTED, SPARSE
from tests.kits.published import PUBLISHED
from tests.kits.renamed import RENAMED

__all__ = [
    "COMPARED",
    "KEYS_AND_VALUES",
    "NPU_GRAPHS",
    "NPU_TRAFFIC",
    "ONE_OF_EACH",
    "PROOFS",
    "STATE_DRAFTS",
    "TWO_RANKS",
    "UNLIKE",
    "WITH_STATES",
    "architecture",
]

_BUILT = FAMILIES | DENSE | ROUTED | HYBRID | LATENT | SPARSE

COMPARED: Mapping[str, tuple[str, ...]] = {
    "cpu": (*FAMILIES, *SPARSE, *DENSE, *HYBRID, *LATENT, *PUBLISHED, *ROUTED, *RENAMED),
    "cuda": (*FAMILIES, *SPARSE, *DENSE, *ROUTED, *HYBRID, *LATENT, *PUBLISHED, *RENAMED),
    "npu": (*FAMILIES, *SPARSE, *DENSE, *ROUTED, *HYBRID, *LATENT, *PUBLISHED, *RENAMED),
}
"""Models whose logits are compared, by device: the README's matrix marks families that are missing here. The tests that
do it are parametrized with these names: ``test_cuda_families.py`` and ``test_npu_parity.py``."""


def architecture(name: str) -> str:
    """``architectures`` of the model's config.json."""
    if name in RENAMED:
        return RENAMED[name]
    if name in PUBLISHED:
        return str(PUBLISHED[name]["architectures"][0])
    return f"{_BUILT[name][0].removesuffix('Text')}ForCausalLM"


ONE_OF_EACH = tuple({architecture(name): name for name in reversed(COMPARED["cpu"])}.values())[::-1]
"""A model of each architecture."""

TWO_RANKS = (
    *(name for name in ONE_OF_EACH if name not in RENAMED),
    *("ernie4.5-moe-biased", "gemma4-equal", "gemma4-moe", "olmoe-clipped", "baichuan-alibi", "ling-v2", "xverse-moe"),
)
"""Models whose greedy tokens two ranks compute on a CPU; ``test_two_ranks.py`` takes those named parallel-NAME."""

KEYS_AND_VALUES = tuple(name for name in COMPARED["cuda"] if name not in {*HYBRID, *LATENT})
"""Models without states and latent vectors, which other tests of GPUs compare."""

UNLIKE = ("gemma4", "gemma4-moe", "grok", "llama4", "mimo-v2-flash")
"""Models unlike Llama on a GPU: heads of several sizes, scores that grow, chunks, experts with other gates and whose
inputs are weighted."""

NPU_TRAFFIC = (*FAMILIES, *SPARSE, "deepseek-v3")
NPU_GRAPHS = (*FAMILIES, "gpt-oss")
WITH_STATES = tuple(name for name in ONE_OF_EACH if name in HYBRID)
"""Models of which some layers keep states, one of each architecture."""

STATE_DRAFTS = ("falcon-h1", "kimi-linear", "lfm2", "qwen3.5")

PROOFS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "logits, chunks": COMPARED,
    "greedy tokens, mixed batches": {
        "cpu": COMPARED["cpu"],
        "cuda": (*KEYS_AND_VALUES, *HYBRID, *LATENT),
        "npu": NPU_TRAFFIC,
    },
    "prefixes, preemption": {"cpu": COMPARED["cpu"], "cuda": tuple(HYBRID)},
    "two ranks": {
        "cpu": (*TWO_RANKS, "internlm2", "exaone"),
        "npu": ("llama2", "qwen2", "qwen3", "qwen3-moe", "deepseek-v3"),
    },
    "graphs": {"cuda": (*KEYS_AND_VALUES, *HYBRID, *LATENT), "npu": NPU_GRAPHS},
    "draft tokens": {"cpu": ONE_OF_EACH, "cuda": (*UNLIKE, *HYBRID, "gemma2", "gpt-oss"), "npu": STATE_DRAFTS},
}
"""What tests compare on each device, by models."""
