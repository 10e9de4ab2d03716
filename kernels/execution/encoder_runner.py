"""Runs an encoder step by step (``kernels.contract.step``).

An input of an encoder runs whole, in the step that brings its last tokens: most attend to tokens after them.
Nothing is kept of it: there is no cache, and the pages of a step have no meaning here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.contract.config import RunnerConfig
from kernels.contract.errors import ConfigError, UnsupportedError
from kernels.contract.grammar import Grammar
from kernels.contract.info import ModelInfo
from kernels.contract.pooling import PoolingConfig
from kernels.contract.runner import Progress, RunningStep
from kernels.contract.step import Admission, RowError, StepBatch, StepResult, StepTiming
from kernels.contract.tasks import Classify, Embed
from kernels.core.arrays import unpack_ints
from kernels.devices.select import select_device
from kernels.distributed.group import Group
from kernels.execution.device_errors import device_errors
from kernels.execution.pooled import DenseLayers, Put, activated, normalized
from kernels.models.config_loader import read_config
from kernels.models.encoder import Encoder, EncoderBatch
from kernels.models.layers.builder import ModelBuilder
from kernels.models.registry import build, tensors
from kernels.state.cache_size import context_length
from kernels.weights.loading import CheckpointFiles, Placement, open_weights
from kernels.weights.quantization.detect import detect_scheme

__all__ = ["EncoderRunner"]

_TOKENS = 4096
"""Tokens that run together: more of them gain nothing, and take memory."""


@dataclass
class _Slot:
    generation: int
    tokens: np.ndarray
    task: Embed | Classify
    computed: int = 0


class EncoderRunner:
    """One encoder on one device: see ``kernels.contract.runner.Runner``. progress: called while it is loaded."""

    def __init__(self, config: RunnerConfig, progress: Progress | None = None) -> None:
        self._config = config
        self._progress: Progress = progress or (lambda stage, fraction: None)
        self._device = select_device(config)
        self._slots: dict[int, _Slot] = {}
        self._thread = 0

    @torch.inference_mode()
    def load(self) -> ModelInfo:
        """Read the weights, run an input. Raises ConfigError, LoadError or UnsupportedError."""
        with device_errors(self._device):
            return self._load()

    def _load(self) -> ModelInfo:
        config, device, began = self._config, self._device, time.perf_counter()
        self._bind_thread()
        whole = read_config(config.model_path, config.config_overrides, quantized=True)
        assert whole.pooling is not None
        if config.adapters is not None:
            raise ConfigError(f"{whole.architecture} runs without adapters; leave --enable-lora out")
        if config.tp_size > 1:
            raise ConfigError(f"{whole.architecture} runs on one device; leave --tensor-parallel-size out")
        if config.speculation is not None:
            raise ConfigError(f"{whole.architecture} generates no text; leave --speculative-algorithm out")
        dtype = device.select_dtype(config.dtype, whole.dtype)
        context = context_length(config, whole)
        scheme = detect_scheme(config.model_path, config.quantization, config.config_overrides)
        weights = open_weights(
            CheckpointFiles(config.model_path, config.load_format, config.random_seed),
            tensors(whole) if scheme is None else scheme.adapt(tensors(whole)),
            Placement(dtype, device.torch_device),
            scheme,
            lambda fraction: self._progress("weights", 0.9 * fraction),
        )
        model = build(whole, ModelBuilder(weights, device, Group(), dtype, context))
        assert isinstance(model, Encoder)
        self._model, self._pooling = model, whole.pooling
        self._dense = DenseLayers(config, whole.pooling, device.torch_device)
        loaded = time.perf_counter()
        self._vectors([np.zeros(min(context, 8), dtype=np.int32)], [_default_task(whole.pooling)])
        self._progress("warmup", 1.0)
        return ModelInfo(
            architecture=whole.architecture,
            dtype=str(dtype).removeprefix("torch."),
            device=device.name,
            cpu_isa=device.traits.cpu_isa,
            cpu_operators=device.operators,
            vocab_size=whole.vocab_size,
            context_length=context,
            layers=whole.layers,
            hidden_size=whole.hidden_size,
            parameters=weights.parameters,
            weight_bytes=weights.weight_bytes + device.linear.dequantized_bytes,
            num_pages=(config.max_slots - 1) * (-(-context // config.page_size)) + 1,
            page_size=config.page_size,
            cache_bytes=0,
            tasks=(whole.pooling.task,),
            pooling=whole.pooling,
            load_seconds={"weights": loaded - began, "warmup": time.perf_counter() - loaded},
        )

    def start(self, batch: StepBatch) -> RunningStep:
        """Run a step. Raises the device's errors."""
        result = self.run(batch)
        return RunningStep(lambda: result, True)

    @torch.inference_mode()
    def run(self, batch: StepBatch) -> StepResult:
        """Run a step and wait for it. An error of one row is returned in ``failed`` and leaves the others alone."""
        began = time.perf_counter()
        self._bind_thread()
        failed = self._update(batch)
        slots, generations = unpack_ints(batch.slots).tolist(), unpack_ints(batch.generations).tolist()
        accepted = np.zeros(len(slots), dtype=np.int32)
        ready: list[tuple[int, _Slot]] = []
        for row, (number, generation, count) in enumerate(
            zip(slots, generations, unpack_ints(batch.counts).tolist(), strict=True)
        ):
            slot = self._slots.get(number)
            if slot is None or slot.generation != generation or slot.computed + count > len(slot.tokens):
                if not any(error.slot == number and error.generation == generation for error in failed):
                    failed.append(RowError(number, generation, f"slot {number} holds no such request"))
                continue
            slot.computed += count
            if slot.computed == len(slot.tokens):
                ready.append((row, slot))
        prepared = time.perf_counter()
        with device_errors(self._device):
            result = self._vectors([slot.tokens for _, slot in ready], [slot.task for _, slot in ready])
        rows, vectors = [], []
        for (row, slot), vector in zip(ready, result, strict=True):
            if np.isfinite(vector).all():
                accepted[row] = 1
                rows.append(row)
                vectors.append(vector)
            else:
                message = "the model's output is not finite for this request; try float32, or check the weights"
                failed.append(RowError(slots[row], slot.generation, message))
        ended = time.perf_counter()
        return StepResult(
            number=batch.number,
            accepted=accepted.tobytes(),
            tokens=np.zeros(len(rows), dtype=np.int32).tobytes(),
            logprobs=np.zeros(len(rows), dtype=np.float32).tobytes(),
            failed=tuple(failed),
            timing=StepTiming(prepare=prepared - began, run=ended - prepared, total=ended - began),
            pooled_rows=np.array(rows, dtype=np.int32).tobytes(),
            pooled_sizes=np.array([len(vector) for vector in vectors], dtype=np.int32).tobytes(),
            pooled=b"".join(vector.tobytes() for vector in vectors),
        )

    def compile_grammar(self, grammar: Grammar) -> Future[object]:
        """Raises UnsupportedError: an encoder generates no text."""
        raise UnsupportedError("this model generates no text")

    def load_adapter(self, index: int, path: str) -> None:
        """Encoders take no adapters."""
        raise UnsupportedError("encoders run without adapters; leave --enable-lora out")

    def unload_adapter(self, index: int) -> None:
        """Encoders take no adapters."""
        raise UnsupportedError("encoders run without adapters; leave --enable-lora out")

    def resident_adapters(self) -> tuple[int, ...]:
        """Encoders take no adapters."""
        return ()

    def close(self) -> None:
        """Drop the model. The runner is of no further use."""
        self._slots.clear()
        self.__dict__.pop("_model", None)

    def _bind_thread(self) -> None:
        if self._thread != threading.get_ident():
            self._device.bind_thread()
            self._thread = threading.get_ident()

    def _update(self, batch: StepBatch) -> list[RowError]:
        """Release and admit; the errors of admissions."""
        failed = []
        for number in unpack_ints(batch.released).tolist():
            self._slots.pop(number, None)
        for admission in batch.admitted:
            self._slots.pop(admission.slot, None)
            if admission.task.__class__ is not _default_task(self._pooling).__class__:
                message = f"this model can {self._pooling.task}, and nothing else"
                failed.append(RowError(admission.slot, admission.generation, message, invalid=True))
                continue
            self._slots[admission.slot] = _slot(admission)
        return failed

    def _vectors(self, inputs: list[np.ndarray], tasks: list[Embed | Classify]) -> list[np.ndarray]:
        """The result of each input, float32."""
        result: list[np.ndarray] = [np.empty(0, dtype=np.float32)] * len(inputs)
        order = sorted(
            range(len(inputs)), key=lambda index: len(inputs[index])
        )  # neighbors of one length attend in one call
        while order:
            chosen = [order.pop()]
            tokens = len(inputs[chosen[0]])
            while order and tokens + len(inputs[order[-1]]) <= _TOKENS:
                chosen.append(order.pop())
                tokens += len(inputs[chosen[-1]])
            vectors = self._pass([inputs[index] for index in chosen], [tasks[index] for index in chosen])
            for index, vector in zip(chosen, vectors.cpu().numpy(), strict=True):
                result[index] = vector
        return result

    def _pass(self, inputs: list[np.ndarray], tasks: list[Embed | Classify]) -> Tensor:
        """[inputs, n]"""
        put, model, pooling = self._device.memory.put, self._model, self._pooling
        lengths = [len(tokens) for tokens in inputs]
        segments = [_segments(len(tokens), task) for tokens, task in zip(inputs, tasks, strict=True)]
        hidden = model.forward(
            EncoderBatch(
                put(np.concatenate(inputs).astype(np.int64)),
                put(np.concatenate([np.arange(length) for length in lengths])),
                put(np.concatenate(segments)),
                lengths,
            )
        )
        states = _pooled(hidden, inputs, pooling, put)
        if model.projection is not None:
            states = model.projection(states)
        if model.head is None:
            wanted = [isinstance(task, Embed) and task.normalize for task in tasks]
            return normalized(self._dense(states), wanted, put)
        wanted = [isinstance(task, Classify) and task.activate for task in tasks]
        return activated(model.head(states.to(hidden.dtype)), pooling.activation, wanted, put)


def _default_task(pooling: PoolingConfig) -> Embed | Classify:
    return Embed() if pooling.task == "embed" else Classify()


def _slot(admission: Admission) -> _Slot:
    assert isinstance(admission.task, Embed | Classify)
    tokens = np.frombuffer(admission.tokens, dtype=np.int32)[: admission.prompt_length]
    return _Slot(admission.generation, tokens, admission.task, admission.computed)


def _segments(length: int, task: Embed | Classify) -> np.ndarray:
    """0 for the tokens of the first text, 1 for those of the second."""
    second = task.second if isinstance(task, Classify) else 0
    return (np.arange(length) >= (second or length)).astype(np.int64)


def _pooled(hidden: Tensor, inputs: Sequence[np.ndarray], pooling: PoolingConfig, put: Put) -> Tensor:
    """One state of each input [inputs, hidden]: the mean of all its tokens', or that of one of them."""
    lengths = [len(tokens) for tokens in inputs]
    if pooling.mode == "mean":
        return torch.stack([part.float().mean(0) for part in hidden.split(lengths)])
    places = np.array([_place(tokens, pooling) for tokens in inputs], dtype=np.int64)
    return hidden.index_select(0, put(np.cumsum([0, *lengths[:-1]]) + places))


def _place(tokens: np.ndarray, pooling: PoolingConfig) -> int:
    """The token of an input whose state is taken."""
    match pooling.mode:
        case "cls":
            return 0
        case "end":
            return int((tokens == pooling.end_token).argmax())
        case "largest":
            return int(tokens.argmax())
    return len(tokens) - 1
