"""Small models of every family, by the names that the fixture ``reference`` has for them, and what is compared with
transformers, or with the published formulas, on each device."""

from __future__ import annotations

from collections.abc import Mapping

from tests.kits.driver import DENSE, FAMILIES, HYBRID, LATENT, ROUTED, SPARSE
from tests.kits.published import PUBLISHED
from tests.kits.renamed import RENAMED

__all__ = ["COMPARED", "architecture"]

_BUILT = FAMILIES | DENSE | ROUTED | HYBRID | LATENT | SPARSE

COMPARED: Mapping[str, tuple[str, ...]] = {
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
