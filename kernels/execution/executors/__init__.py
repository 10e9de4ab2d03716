"""The ways to run a step, one a file, all with the contract of ``Executor``.

A runner walks an ordered list of them, made when its model is loaded (``kernels.execution.executor_list``): the first
executor that takes a step runs it; the log names them at level DEBUG. What a step needs before it runs is in
``kernels.execution.pending_step``.

========================  =======================================================  ===================================
executor                  takes                                                    where
========================  =======================================================  ===================================
``NativeDecode``          decodes without draft tokens, in one native call         the device is a CPU
``OverlappedVerifyPass``  verifying passes, before the host knows the last result  passes that accept on the device
``NativeChains``          decodes with draft tokens, in one native call            the device is a CPU
``NativePrefill``         short prompts and ends of prompts, in one native call    the device is a CPU
``NoRows``                steps none of whose rows can run                         everywhere
``WholeStep``             decodes and prompts, sampling included, in a graph       steps that a device captures whole
``VerifyPass``            rows that all verify whole trees, in a graph             verifying passes that take no batch
``CapturedPass``          the model's pass, in a graph                             passes that a device captures
``TwoBatches``            prompts, as two batches that take turns                  several ranks, where it is asked for
``EagerPass``             everything                                               everywhere
========================  =======================================================  ===================================
"""

from __future__ import annotations

from typing import Protocol

from kernels.contract.runner import RunningStep
from kernels.execution.pending_step import PendingStep

__all__ = ["Executor"]


class Executor(Protocol):
    """One way to run a step."""

    def execute(self, step: PendingStep) -> RunningStep | None:
        """Run the step, if it is one for this executor; called in the model's thread, in the order of the steps.

        None: state is unchanged but for the step's preparation, which is done once; the caller may try the next
        executor. Raises ValueError for a malformed batch, and the device's errors.
        """
        ...
