"""Selects the attention kernels of an NPU for each kind of row."""

from __future__ import annotations

import torch

from kernels.contract.config import RunnerConfig
from kernels.contract.errors import UnsupportedError

__all__ = ["ASCEND", "NATIVE", "TREES", "AttentionBackends"]

ASCEND, NATIVE = "ascend", "torch_native"
TREES = "trees"
"""The fused attention with a mask for each row."""


class AttentionBackends:
    """``prefill``, ``decode``, ``verify``: ASCEND or NATIVE, by options and dtype. ``native_only``: NATIVE for all
    rows, regardless of options.
    """

    def __init__(self, config: RunnerConfig, native_only: bool = False) -> None:
        self._config = config
        self._native_only = native_only
        self.prefill = self.decode = self.verify = ASCEND

    def select(self, dtype: torch.dtype) -> None:
        """Choose for computing in ``dtype``. Raises UnsupportedError."""
        config = self._config
        self.prefill = self._choose(config.prefill_attention_backend, dtype)
        self.decode = self._choose(config.decode_attention_backend, dtype)
        decodes = config.speculation is not None and config.speculation.attention_mode == "decode"
        self.verify = self.decode if decodes else self.prefill

    @property
    def fused(self) -> bool:
        """Whether any rows use the fused attention."""
        return ASCEND in (self.prefill, self.decode)

    def _choose(self, chosen: str, dtype: torch.dtype) -> str:
        if self._native_only:
            return NATIVE
        chosen = chosen or self._config.attention_backend
        if not chosen:
            return NATIVE if dtype == torch.float32 else ASCEND
        if chosen == ASCEND and dtype == torch.float32:
            raise UnsupportedError(
                "the fused attention computes in 16 bits: use --dtype bfloat16, or --attention-backend torch_native"
            )
        return chosen
