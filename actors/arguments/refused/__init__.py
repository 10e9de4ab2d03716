"""Names that are known from other engines and do nothing here yet; one file a concern."""

from __future__ import annotations

from actors.arguments.refusal import Refusal
from actors.arguments.refused.execution import EXECUTION
from actors.arguments.refused.models import MODELS
from actors.arguments.refused.observability import OBSERVABILITY
from actors.arguments.refused.parallelism import PARALLELISM
from actors.arguments.refused.vllm import VLLM

__all__ = ["REFUSALS"]

REFUSALS: tuple[Refusal, ...] = MODELS + PARALLELISM + EXECUTION + OBSERVABILITY + VLLM
