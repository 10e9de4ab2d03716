"""Every argument there is, in the order of the help text."""

from __future__ import annotations

from actors.arguments.argument import Argument
from actors.arguments.devices import DEVICE_ARGUMENTS
from actors.arguments.logs import LOG_ARGUMENTS
from actors.arguments.metrics import METRIC_ARGUMENTS
from actors.arguments.model import MODEL_ARGUMENTS
from actors.arguments.parallelism import PARALLELISM_ARGUMENTS
from actors.arguments.quantization import QUANTIZATION_ARGUMENTS
from actors.arguments.recovery import RECOVERY_ARGUMENTS
from actors.arguments.scheduling import SCHEDULING_ARGUMENTS
from actors.arguments.serving import SERVING_ARGUMENTS
from actors.arguments.speculative import SPECULATIVE_ARGUMENTS
from actors.arguments.tracing import TRACING_ARGUMENTS

__all__ = ["ARGUMENTS"]

ARGUMENTS: tuple[Argument, ...] = (
    MODEL_ARGUMENTS
    + SERVING_ARGUMENTS
    + METRIC_ARGUMENTS
    + LOG_ARGUMENTS
    + TRACING_ARGUMENTS
    + SCHEDULING_ARGUMENTS
    + RECOVERY_ARGUMENTS
    + DEVICE_ARGUMENTS
    + PARALLELISM_ARGUMENTS
    + QUANTIZATION_ARGUMENTS
    + SPECULATIVE_ARGUMENTS
)
