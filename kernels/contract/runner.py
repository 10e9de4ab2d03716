"""The runner: the worker's interface to a model. No torch: ``open_runner`` imports the model's code by name."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from importlib import import_module
from typing import Protocol, cast

from kernels.contract.config import RunnerConfig
from kernels.contract.grammar import Grammar
from kernels.contract.info import ModelInfo
from kernels.contract.step import StepBatch, StepResult

__all__ = ["RUNNER_MODULE", "Progress", "Runner", "RunningStep", "import_runner", "open_runner"]

Progress = Callable[[str, float], None]
"""Called with a stage (weights | cache | warmup) and the fraction of the whole load that is done."""

RUNNER_MODULE = "kernels.execution.runner"
"""Imports torch; a worker's process may import it before it knows its model."""
_QUANTIZATION = "kernels.weights.quantization.detect"
_SIMULATOR = "kernels.devices.npu_simulator.activate"


class RunningStep:
    """A step that was launched on the device.

    done: whether nothing is left to wait for, so that ``result`` returns at once.
    idle_work: optional work before the next step, best done while no client waits; call it in the model's thread.
        None: no such work.
    stage_seconds: ``StepTiming.stage``.
    """

    __slots__ = ("_finish", "done", "idle_work", "stage_seconds")

    def __init__(
        self, finish: Callable[[], StepResult], done: bool, idle_work: Callable[[], None] | None = None
    ) -> None:
        self._finish = finish
        self.done = done
        self.idle_work = idle_work
        self.stage_seconds = 0.0

    def result(self) -> StepResult:
        """Wait for the step. Call it once, in any thread, in the order of the steps. Raises the device's errors."""
        return self._finish()


class Runner(Protocol):
    """One model on one device. Not thread safe: one thread at a time calls it, strictly in step order.

    Only ``RunningStep.result`` may be called in another thread, so that the next step is prepared while one runs.
    """

    def load(self) -> ModelInfo:
        """Read the weights, make the cache, warm up.

        Raises ConfigError, LoadError, UnsupportedError or CacheSizeError (``kernels.contract.errors``).
        """
        ...

    def start(self, batch: StepBatch) -> RunningStep:
        """Launch a step on the device. Raises ValueError for a batch that is malformed as a whole."""
        ...

    def run(self, batch: StepBatch) -> StepResult:
        """Start a step and wait for it."""
        ...

    def compile_grammar(self, grammar: Grammar) -> Future[object]:
        """Compile in another thread, so that an admission with the grammar finds it ready.

        The future raises GrammarError, or UnsupportedError where the backend cannot be used.
        """
        ...

    def load_adapter(self, index: int, path: str) -> None:
        """Read the PEFT directory ``path`` into this process's memory, as the adapter ``index`` >= 1 of admissions.

        Another thread may call it while steps run. A number that no slot uses is replaced. Raises UnsupportedError
        without ``RunnerConfig.adapters``, and one ConfigError that names everything that is wrong; then nothing has
        changed.
        """
        ...

    def unload_adapter(self, index: int) -> None:
        """Forget an adapter that no slot uses. Raises ConfigError where a slot does, or there is no such adapter."""
        ...

    def resident_adapters(self) -> tuple[int, ...]:
        """The adapters on the device; those that no slot uses may be overwritten. None without adapters."""
        ...

    def close(self) -> None:
        """Drop the model and the cache. The runner is of no further use."""
        ...


def open_runner(config: RunnerConfig, progress: Progress | None = None) -> Runner:
    """The runner of ``config``, not loaded yet. Imports torch, and activates the NPU simulator before, if configured.

    Raises UnsupportedError where the device does not exist, and ConfigError.
    """
    _activate_simulator(config)
    return cast(Runner, import_module(RUNNER_MODULE).make_runner(config, progress))


def import_runner(config: RunnerConfig) -> None:
    """Import the modules that ``open_runner`` and ``Runner.load`` need: torch, the model's code, readers of quantized
    checkpoints. That is most of a start's time and needs no device."""
    _activate_simulator(config)
    import_module(RUNNER_MODULE)
    import_readers = import_module(_QUANTIZATION).preload
    import_readers(config.model_path, config.config_overrides)
    if config.speculation is not None and config.speculation.draft_model_path:
        import_readers(config.speculation.draft_model_path)


def _activate_simulator(config: RunnerConfig) -> None:
    if config.npu_simulator:
        import_module(_SIMULATOR).activate(config.npu_simulator)
