"""What runs where Gluon is not as the kernels that are written in it want it."""

from __future__ import annotations

import logging
import sys
from types import ModuleType

import numpy as np
import pytest
import torch
import triton
from triton.experimental.gluon import language
from triton.runtime.jit import JITFunction

import kernels.devices.cuda
import kernels.devices.cuda.attention.plan
from kernels.contract.errors import UnsupportedError
from kernels.core.attention_rows import AttentionRows
from kernels.devices.cuda import launch
from kernels.devices.cuda.attention.decode import DecodeScratch
from kernels.devices.cuda.attention.plan import attention, plan_attention
from kernels.devices.cuda.errors import DeviceError
from tests.kernels.devices.cuda.compiled import compiling, empty, put

ROWS = {
    "attention.decode_persistent": ([40] * 8, [1] * 8, 8, 0, "decode_attention_kernel"),
    "attention.verify_sm90": ([40, 9], [6, 5], 0, 2, "verify_attention_kernel"),
    "attention.prefill_warp_specialized": ([0, 70], [200, 300], 0, 0, "prefill_attention_kernel"),
}
"""What each of the kernels attends for: tokens in the cache and new ones of rows, how many decode and how many verify,
and the kernel that is taken in its place."""
MODULES = {
    "attention.decode_persistent": "attend_many",
    "attention.verify_sm90": "attend_few",
    "attention.prefill_warp_specialized": "attend_prompts",
}


@pytest.fixture(autouse=True)
def nothing_is_missing(monkeypatch):
    monkeypatch.setattr(launch, "_missing", set())
    launch.has_gluon.cache_clear()
    yield
    launch.has_gluon.cache_clear()


def attend(module, queries, cache, put):
    starts, counts, decodes, verifies, _ = ROWS[module]
    table = 1 + np.arange(len(starts) * 6, dtype=np.int32).reshape(len(starts), 6) % 12
    plan = plan_attention(AttentionRows(np.array(starts), np.array(counts), table, decodes, verifies), 0, 2, put)
    return attention(queries, cache, plan, 0.1, DecodeScratch(queries.device))


@pytest.mark.skipif(triton.knobs.runtime.interpret, reason="kernels are interpreted, not compiled")
@pytest.mark.parametrize("module", ROWS)
def test_attention_that_cannot_be_compiled_is_another_kernels(module, monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delattr(language, "thread_barrier")  # as if a newer one called it something else
    _, counts, *_, kernel = ROWS[module]
    found, compile_one = [], JITFunction._do_compile

    def tell(self, *arguments, **options):
        compiled = compile_one(self, *arguments, **options)
        found.append(self.__name__)
        return compiled

    # Not listed: what is compiled here would not be listed once more for the tests that look for it.
    with compiling(monkeypatch, 90, reported=False), caplog.at_level(logging.WARNING):
        monkeypatch.setattr(JITFunction, "_do_compile", tell)
        for _ in range(2):
            attend(module, empty(sum(counts), 4, 128), empty(60, 2, 2, 64, 128), put)
    assert set(found) == {kernel}
    (reported,) = [record.getMessage() for record in caplog.records]
    assert reported.startswith(
        f"The kernel of kernels.devices.cuda.{module} cannot be compiled by Triton {triton.__version__};"
    )
    assert "thread_barrier" in reported


@pytest.fixture
def attend_step(device, monkeypatch):
    """Attention of numbers, where the kernels in Gluon would be taken."""
    monkeypatch.setattr(kernels.devices.cuda.attention.plan, "copying", lambda _: True)
    monkeypatch.setattr(kernels.devices.cuda.attention.plan, "has_gluon", lambda _: True)
    torch.manual_seed(3)
    cache = torch.randn(13, 2, 2, 64, 128, device=device).half()

    def ask(module):
        _, counts, *_ = ROWS[module]
        queries = torch.randn(sum(counts), 4, 128, device=device).half()
        return attend(module, queries, cache, lambda array: torch.from_numpy(array.copy()).to(device))

    return ask


def replaced(module, attends):
    """``module`` with another kernel."""
    found = ModuleType(f"kernels.devices.cuda.{module}")
    attends.__module__ = found.__name__
    setattr(found, MODULES[module], attends)
    return found


@pytest.mark.parametrize("module", ROWS)
def test_what_is_attended_instead_is_the_same(module, attend_step, monkeypatch, caplog):
    calls = []

    def fails(*arguments):
        calls.append(arguments)
        raise TypeError("one argument\nis another\n")

    name = module.rpartition(".")[2]
    monkeypatch.setattr(kernels.devices.cuda.attention, name, replaced(module, fails), raising=False)
    torch.manual_seed(4)
    found = attend_step(module)
    again = attend_step(module)
    assert len(calls) == 1
    assert again.isfinite().all()
    assert [record.getMessage().rpartition("(")[2] for record in caplog.records] == ["is another)."]
    monkeypatch.setattr(kernels.devices.cuda.attention.plan, "has_gluon", lambda _: False)
    torch.manual_seed(4)
    torch.testing.assert_close(found, attend_step(module), rtol=0, atol=0)


@pytest.mark.parametrize("module", ROWS)
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("CUDA error: x"),
        DeviceError("GPU 0 failed"),
        UnsupportedError("no memory is left for it"),
    ],
)
def test_errors_of_the_device_are_reported_as_such(module, error, attend_step, monkeypatch, caplog):
    calls = []

    def fails(*arguments):
        calls.append(arguments)
        raise error

    name = module.rpartition(".")[2]
    monkeypatch.setattr(kernels.devices.cuda.attention, name, replaced(module, fails), raising=False)
    for _ in range(2):
        with pytest.raises(type(error)) as raised:
            attend_step(module)
        assert raised.value is error
    assert len(calls) == 2  # it is not the kernel that is missing
    assert not caplog.records
    assert isinstance(error, UnsupportedError | DeviceError) or isinstance(launch.explain(error, "GPU 0"), DeviceError)


@pytest.mark.parametrize("module", [*ROWS, "matmul.gemm_small_tma", "matmul.gemv_quantized"])
def test_kernels_that_cannot_be_imported_are_none(module, monkeypatch, caplog):
    """As where a newer Gluon has no such name, or elsewhere."""
    monkeypatch.delitem(sys.modules, f"kernels.devices.cuda.{module}", raising=False)
    monkeypatch.setitem(sys.modules, "triton.experimental.gluon", ModuleType("gluon"))
    monkeypatch.setattr(launch, "find_spec", lambda _: True)
    assert not launch.has_gluon(module)
    assert not launch.has_gluon(module)
    (reported,) = [record.getMessage() for record in caplog.records]
    assert reported.startswith(f"The kernel of kernels.devices.cuda.{module} cannot be compiled by Triton")
    monkeypatch.undo()
    launch.has_gluon.cache_clear()
    assert launch.has_gluon(module)
