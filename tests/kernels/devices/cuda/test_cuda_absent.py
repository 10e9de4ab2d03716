"""Models are loaded, captured and run down to the machine code of their kernels where there is no GPU."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import triton
from triton.runtime.jit import JITFunction

from kernels.contract.adapters import AdapterSettings
from kernels.contract.config import RunnerConfig
from kernels.contract.errors import UnsupportedError
from kernels.contract.speculation import SpeculativeSettings
from kernels.devices.experts import ExpertsInTurn, ExpertWeights, Routing
from kernels.devices.sampling import SamplingKernels
from kernels.devices.select import select_device
from tests.bench.device_speculative import Decoding, write_draft
from tests.kernels.devices.cuda.absent import install
from tests.kernels.devices.cuda.compiled import SHARED, compiling, empty
from tests.kits.cuda.absent_device import CONFIG, drive

__all__ = ["drive"]

pytestmark = [
    pytest.mark.skipif(triton.knobs.runtime.interpret, reason="kernels are interpreted, not compiled"),
    pytest.mark.long,
]


def test_whole_steps_are_captured(monkeypatch, tmp_path, drive):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with compiling(monkeypatch, 90) as found:
        driver, reported = drive()
        assert driver.info.graph_rows == (1, 4)
        for slot in (1, 2, 3):
            driver.admit(slot, range(1, 40 * slot))
            driver.step([(slot, 40 * slot - 1)])
        for _ in range(3):
            driver.step([(1, 1), (2, 1), (3, 1)])
    assert reported == ["replayed"] * 6
    kernels = {kernel.kernel for kernel in found}
    assert {
        "gemv_kernel",
        "gemm_small_tma_kernel",
        "decode_attention_kernel",
        "prefill_attention_kernel",
        "step_begin_kernel",
        "step_end_kernel",
        "qkv_gemv_kernel",
        "norm_rope_cache_kernel",
    } <= kernels
    assert all(kernel.shared <= SHARED[90] for kernel in found)


@pytest.mark.parametrize(("topk", "nodes"), [(4, 16), (1, 4)])
def test_drafts_are_captured(topk, nodes, monkeypatch, tmp_path, drive):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    draft = write_draft(CONFIG, tmp_path)
    settings = SpeculativeSettings("EAGLE3", str(draft), 3, topk, nodes, load_format="dummy", fixed_acceptance=3.0)
    with compiling(monkeypatch, 90) as found:
        driver, reported = drive(speculation=settings, max_step_tokens=2048)
        decoding = Decoding(driver.runner, driver.info, 2)
        # Nothing but kernels of a row or two stands between the graphs.
        device, model = driver.runner._loaded.device, driver.runner._loaded.model
        again = lambda *_: pytest.fail("logits are made again")  # noqa: E731
        monkeypatch.setattr(device, "sampling", SamplingKernels(greedy=again))
        own = [(device.drafting, name) for name in ("accept", "move_accepted", "copy_accepted")]
        for part, name in ((model, "logits"), *own):
            monkeypatch.setattr(part, name, again)
        for _ in range(3):
            decoding.runner.start(decoding._batch(1, drafts=True)).result()
    assert Counter(reported)["draft_tokens"] > 0
    assert Counter(reported)["drafted"] > 0
    assert "verify_attention_sm90_kernel" in {kernel.kernel for kernel in found}


_ALIKE = {
    "invariant_attention_kernel",
    "rope_angles_kernel",
    "embedding_kernel",
    "rms_norm_kernel",
    "norm_rope_cache_kernel",
    "invariant_gemm_kernel",
    "swiglu_kernel",
}
"""Kernels of a model that treat a token alike whatever else there is."""


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fp32_head": True},
        {"quantization": "int8"},
        {"kv_cache_dtype": "int8"},
        {"draft_tokens": True},
        {"adapters": AdapterSettings()},
    ],
    ids=lambda options: " ".join(options) or "plain",
)
def test_invariant_steps_have_no_kernels_for_some_numbers_of_tokens(options, monkeypatch, tmp_path, drive):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    options = dict(options)
    if options.pop("draft_tokens", False):
        draft = write_draft(CONFIG, tmp_path)
        options["speculation"] = SpeculativeSettings(
            "EAGLE3", str(draft), 3, 4, 16, load_format="dummy", fixed_acceptance=3.0
        )
    kernels, tokens_of_heads = set(), set()
    with compiling(monkeypatch, 90), monkeypatch.context() as patch:
        run = JITFunction.run

        def note(self, *arguments, **given):
            kernels.add(self.__name__)
            if self.__name__ == "norm_rope_cache_kernel":
                tokens_of_heads.add(dict(zip(self.arg_names, arguments, strict=False))["block"])
            return run(self, *arguments, **given)

        patch.setattr(JITFunction, "run", note)
        driver, _ = drive(invariant=True, max_step_tokens=2048, **options)
        driver.admit(1, range(1, 100))
        driver.step([(1, 99)])
        driver.step([(1, 1)])
    if "adapters" in options:
        assert kernels >= {"low_rank_down_kernel", "low_rank_up_kernel"}
    elif "speculation" not in options:
        assert kernels == _ALIKE | {"step_begin_kernel", "step_end_kernel", "argmax_parts_kernel", "argmax_kernel"}
    assert kernels >= _ALIKE
    assert (
        not {
            "gemv_kernel",
            "gemm_small_tma_kernel",
            "decode_attention_kernel",
            "prefill_attention_kernel",
            "qkv_gemv_kernel",
            "verify_attention_sm90_kernel",
            "verify_attention_kernel",
            "gemm_small_kernel",
            "low_rank_few_kernel",
        }
        & kernels
    )
    assert tokens_of_heads == {1}


def test_an_invariant_platform_runs_experts_one_by_one_and_is_of_one_gpu(monkeypatch):
    install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    experts = [ExpertWeights(empty(128, 64), None, empty(64, 64), None) for _ in range(4)]
    for invariant in (False, True):
        platform = select_device(RunnerConfig(model_path="", device="cuda", invariant=invariant))
        made = platform.experts.make(empty(4, 64), None, experts, Routing(2, True))
        assert isinstance(made, ExpertsInTurn) == invariant
        assert platform.experts.reads_back == invariant
    with pytest.raises(UnsupportedError, match=r"several GPUs.*--enable-deterministic-inference with one GPU"):
        select_device(RunnerConfig(model_path="", device="cuda", invariant=True, tp_size=2))
