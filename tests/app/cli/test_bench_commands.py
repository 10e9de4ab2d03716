"""Every benchmark says what it does, and each of its options what it is for."""

from __future__ import annotations

import tests.kits.simulated_npu  # noqa: F401 - where torch_npu is installed, NPUs come before torch

# isort: split
import argparse
from importlib import import_module
from pathlib import Path

import pytest

from tests.bench import _needs, quantization
from tests.bench.__main__ import names
from tests.kits import llama_server


def test_parts_of_a_benchmark_are_none() -> None:
    assert {"serving", "device", "understudy"} <= set(names())
    assert not {"device_chain", "_options", "__main__"} & set(names())


@pytest.mark.parametrize("name", names())
def test_help_lists_everything(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    parsers: list[argparse.ArgumentParser] = []
    known = argparse.ArgumentParser.parse_known_args
    monkeypatch.setattr(
        argparse.ArgumentParser, "parse_known_args", lambda self, *rest: parsers.append(self) or known(self, *rest)
    )
    module = import_module(f"tests.bench.{name}")
    with pytest.raises(SystemExit) as ended:
        module.main(["--help"])
    assert ended.value.code == 0
    output = capsys.readouterr().out
    assert f"python -m tests.bench {name}" in output
    assert (module.__doc__ or "").strip() in output
    assert [action.dest for action in parsers[0]._actions if not action.help] == []


def test_checkpoints_whose_tools_are_missing_are_named_and_skipped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(llama_server, "QUANTIZE", None)
    monkeypatch.setattr("tests.bench._ggml.LIBRARY", "libno-such-library.so")
    box = quantization._written(["gguf-q4_k_m", "gguf-iq3_s", "gguf-q8"], tmp_path, quantization.MODEL_DIR)
    assert list(box) == ["gguf-q8"]
    output = capsys.readouterr().out
    assert "gguf-q4_k_m is skipped: llama-quantize makes files of Q4_K_M" in output
    assert "gguf-iq3_s is skipped: libno-such-library.so" in output


@pytest.mark.parametrize(
    ("name", "words", "output"),
    [
        ("device", [], "an NVIDIA GPU"),
        ("quantization", ["--device", "cuda"], "an NVIDIA GPU"),
        ("npu_operators", [], "torch_npu is needed"),
        ("npu_check", [], "torch_npu is needed"),
        ("products", [], "native operators are needed here, which need AVX2 or NEON"),
        ("gguf_answers", [], "llama-server must be on the PATH"),
    ],
)
def test_a_benchmark_names_what_it_needs(
    name: str, words: list[str], output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(_needs.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("TROUPE_CPU_ISA", "torch")
    monkeypatch.setattr("tests.bench.gguf_answers.SERVER", None)
    with pytest.raises(SystemExit, match=output):
        import_module(f"tests.bench.{name}").main(words)


@pytest.mark.parametrize("delay", [0.0, 0.001])
def test_steps_that_cost_nothing_are_what_a_worker_takes_them_for(delay: float) -> None:
    from kernels.contract.config import RunnerConfig
    from kernels.contract.runner import RunningStep
    from kernels.contract.step import StepBatch, StepResult
    from tests.bench._costless import CostlessRunner

    real = RunningStep(lambda: StepResult(number=1, accepted=b"", tokens=b""), True)
    step = CostlessRunner(RunnerConfig(model_path=""), delay).start(StepBatch(1, b"", b"", b""))
    assert step.done == (not delay)
    assert [name for name in dir(real) if not name.startswith("_") and not hasattr(step, name)] == []
