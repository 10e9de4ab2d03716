"""Kernels of a model are compiled in parallel before its first step."""

from __future__ import annotations

import json
from concurrent.futures import Executor, Future
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

import kernels.devices.cuda.capture
from kernels.contract.speculation import SpeculativeSettings
from kernels.contract.step import SlotSampling
from kernels.devices.cuda.launch import is_precompiling
from kernels.devices.cuda.precompile import of_each_kind, precompile_passes
from kernels.execution.step_memory import step_memory
from tests.bench.device_speculative import write_draft
from tests.kernels.devices.cuda import absent
from tests.kernels.devices.cuda.compiled import compiling, empty
from tests.kits.cuda.absent_device import CONFIG, drive
from tests.kits.driver import GREEDY

__all__ = ["drive"]

pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="kernels are interpreted, not compiled")


@triton.jit
def _double(x, out, count, block: tl.constexpr):
    at = tl.arange(0, block)
    tl.store(out + at, 2 * tl.load(x + at, mask=at < count), mask=at < count)


@triton.jit
def _wrong(x, out, count, block: tl.constexpr):
    tl.store(out, tl.arange(0, block), x, count)


class AtOnce(Executor):
    """What is handed over is done at once."""

    def __init__(self) -> None:
        self.done = 0

    def submit(self, work, /, *arguments, **options):
        future, self.done = Future(), self.done + 1
        try:
            future.set_result(work(*arguments, **options))
        except BaseException as error:
            future.set_exception(error)
        return future


@pytest.fixture
def made(monkeypatch, tmp_path):
    """What is compiled: names, whether that was ahead, and for which arguments. Kernels that are called are compiled
    and not launched."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found: list[tuple[str, bool, str]] = []
    with compiling(monkeypatch, 90, reported=False):
        compile_one = JITFunction._do_compile

        def tell(self, key, *arguments, **options):
            found.append((self.__name__, is_precompiling(), key))
            return compile_one(self, key, *arguments, **options)

        monkeypatch.setattr(JITFunction, "_do_compile", tell)
        yield found


def test_each_kind_of_arguments_is_compiled_once(made):
    x, pool = empty(64, dtype=torch.float32), AtOnce()

    def passes():
        assert is_precompiling()
        for count in (3, 3, 5, 16):
            assert _double[(1,)](x, x, count, 64) is None
        _double[(1,)](x[1:], x, 3, 64)  # does not begin where a vector does
        _double[(1,)](x.to(torch.int32), x, 3, 64)

    precompile_passes(passes, absent.META, pool)
    assert not is_precompiling()
    assert pool.done == 4
    before = list(made)
    for count in (3, 5, 16):
        assert _double[(1,)](x, x, count, 64) is not None
    assert made == before
    _double[(1,)](x, x, 1, 64)
    assert made[len(before) :] == [("_double", False, made[-1][2])]


def test_what_cannot_be_compiled_is_reported_when_it_is_launched(made):
    x = empty(64, dtype=torch.float32)
    precompile_passes(lambda: _wrong[(1,)](x, x, 3, 64), absent.META, AtOnce())
    with pytest.raises(triton.compiler.errors.CompilationError):
        _wrong[(1,)](x, x, 3, 64)


def test_passes_without_memory_fail_no_request(made):
    x, pool = empty(64, dtype=torch.float64), AtOnce()

    def passes():
        _double[(1,)](x, x, 3, 64)
        raise torch.OutOfMemoryError("no memory")

    precompile_passes(passes, absent.META, pool)
    assert pool.done == 1


def test_an_error_of_a_pass_leaves_launches_as_they_were(made):
    before = JITFunction.run

    def passes():
        assert JITFunction.run is not before
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        precompile_passes(passes, absent.META, AtOnce())
    assert JITFunction.run is before
    assert not is_precompiling()


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_that_would_wait_for_each_other_precompile_nothing(ranks):
    reported = []
    platform = SimpleNamespace(
        attention=SimpleNamespace(plans_latent=False),
        cache=SimpleNamespace(make=lambda *_: []),
        capture=SimpleNamespace(precompile=lambda _: reported.append("ahead"), holds_windows=True, holds_states=True),
        memory=SimpleNamespace(measure_step=lambda _: 7),
        traits=SimpleNamespace(compiles=True),
    )
    part = SimpleNamespace(layers=2, kv_heads=1, head_dim=16, vocab_size=10, windows=(0, 0), shared_caches={})
    config = SimpleNamespace(max_step_tokens=32, page_size=16, max_slots=3)
    cache = SimpleNamespace(scales=None)
    opened = SimpleNamespace(config=config, device=platform, part=part, dtype=torch.float16, context=64, cache=cache)
    model, sizes = SimpleNamespace(rows=None, reads_rows=False), SimpleNamespace(groups=())
    assert step_memory(opened, model, None, sizes, None, alone=ranks == 1) == 7
    assert reported == ["ahead"] * (ranks == 1)


def test_some_sizes_stand_for_all():
    sizes = [512, 496, 272, 256, 144, 128, 64, 56, 40, 32, 8, 4, 2, 1]
    assert of_each_kind(sizes) == [512, 272, 256, 144, 128, 64, 40, 32, 8, 4, 2, 1]
    assert of_each_kind([(2048, 8), (512, 8), (128, 8), (192, 64)]) == [(2048, 8), (128, 8), (192, 64)]


@pytest.fixture
def ahead(monkeypatch, drive):
    """Models are loaded as on a GPU, but one kernel is compiled after the other (``drive`` compiles none)."""

    def one_by_one(passes, device):
        precompile_passes(passes, device, AtOnce())

    monkeypatch.setattr(kernels.devices.cuda.capture, "precompile_passes", one_by_one)


@pytest.mark.long
def test_steps_launch_only_precompiled_kernels(ahead, made, drive):
    driver, _ = drive(graph_rows=(1, 2, 8, 16, 40), max_slots=41, max_step_tokens=2048)
    for slot in (1, 2, 3):
        driver.admit(slot, range(1, 40 * slot))
        driver.step([(slot, 40 * slot - 1)])
    driver.step([(1, 1), (2, 1), (3, 1)])
    names = {
        "decode_attention_kernel",
        "prefill_attention_kernel",
        "rms_norm_kernel",
        "gemv_kernel",
        "gemm_small_tma_kernel",
        "norm_rope_cache_kernel",
        "embedding_kernel",
        "step_end_kernel",
    }
    assert names <= {name for name, early, _ in made if early}
    assert not [name for name, early, _ in made if not early]
    assert len({key for name, _, key in made if name == "decode_attention_kernel"}) == 2  # of one row, and of more


STATES = {
    "Qwen3_5ForCausalLM": {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    },
    "FalconH1ForCausalLM": {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_ssm": 512, "mamba_d_state": 128},
}


@pytest.mark.long
@pytest.mark.parametrize("architecture", STATES)
def test_kernels_of_states_are_precompiled(architecture, ahead, made, drive):
    """Those of decodes that begin, and of others; in graphs, and beside chunks of prompts."""
    config = CONFIG | STATES[architecture] | {"architectures": [architecture], "num_hidden_layers": 4}
    driver, reported = drive({key: value for key, value in config.items() if key != "model_type"}, max_slots=5)
    driver.admit(1, range(1, 40))
    driver.admit(2, [7])
    driver.step([(1, 39), (2, 1)])
    driver.step([(1, 1), (2, 1)])
    driver.admit(3, range(1, 40))
    driver.step([(1, 1), (2, 1), (3, 39)])
    assert reported  # graphs
    assert {("_convolve", True), ("_step", True)} <= {(name, early) for name, early, _ in made}
    assert not [name for name, early, _ in made if not early and name in ("_convolve", "_step")]


@pytest.mark.long
def test_kernels_that_verify_drafts_are_precompiled(ahead, made, tmp_path, drive):
    draft = write_draft(CONFIG | {"num_key_value_heads": 4}, tmp_path)
    settings = SpeculativeSettings("EAGLE3", str(draft), 3, 1, 4, load_format="dummy")
    driver, _ = drive(speculation=settings, max_step_tokens=2048)
    assert driver.runner._device.cache.kv_heads == 2  # sequences are divided as the model's are, not as the draft's
    found = {(name, early) for name, early, _ in made}
    assert {("verify_attention_sm90_kernel", True), ("stage_inputs_kernel", True)} <= found
    assert ("stage_inputs_kernel", False) not in found
    assert not {name for name, early in found if not early} & {
        "accept_drafts_kernel",
        "copy_accepted_kernel",
        "draft_tree_enter_kernel",
        "draft_tree_start_kernel",
        "choose_level",
    }


@pytest.mark.long
@pytest.mark.parametrize(
    ("algorithm", "steps", "topk", "nodes", "last"),
    [
        ("EAGLE3", 3, 4, 16, {"candidates_kernel"}),
        ("EAGLE3", 5, 1, 6, {"argmax_kernel"}),
        ("STANDALONE", 3, 1, 4, {"rope_angles_kernel", "norm_rope_cache_kernel", "qkv_gemv_kernel"}),
        ("NGRAM", 1, 1, 12, set()),
    ],
)
def test_requests_that_draft_wait_for_no_compiler(algorithm, steps, topk, nodes, last, ahead, made, tmp_path, drive):
    draft = write_draft(CONFIG, tmp_path)
    if algorithm == "STANDALONE":
        (draft / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 1}))
    path = "" if algorithm == "NGRAM" else str(draft)
    settings = SpeculativeSettings(algorithm, path, steps, topk, nodes, load_format="dummy")
    driver, _ = drive(speculation=settings, max_step_tokens=512, max_slots=17, graph_rows=(1, 2, 4, 8, 16))
    late = {name for name, early, _ in made if not early}
    assert last <= late <= last | {"gemm_small_tma_kernel"}  # the others were compiled side by side
    loaded = len(made)
    admitted = set()

    def admit(slots, prompt, sampling=GREEDY):
        for slot in slots:
            if slot in admitted:
                driver.release(slot)
            admitted.add(slot)
            driver.admit(slot, [1, 2, 3, 4] * (prompt // 4), sampling=sampling)

    def step(slots, draft_tokens, others=(), count=1):
        drafts = dict.fromkeys(slots, draft_tokens) if draft_tokens else None
        result = driver.step([*((slot, 1) for slot in slots), *((slot, count) for slot in others)], drafts)
        assert not result.failed

    for rows, prompt in ((1, 28), (2, 28), (3, 28), (4, 28), (8, 28), (15, 300), (16, 28)):
        slots = range(1, rows + 1)
        admit(slots, prompt)
        for begin in range(0, rows, 512 // prompt):
            step((), 0, slots[begin : begin + 512 // prompt], prompt)
        for draft_tokens in (nodes - 1, nodes - 1, 1, 2, nodes - 2, 0, nodes - 1):
            step(slots, draft_tokens)
        step(slots[1:], nodes - 1, slots[:1])
        for draft_tokens in (nodes - 1, min(5, nodes - 1), 1):
            admit([16], 200)
            step(slots[:15], draft_tokens, [16], 200)
    for sampling in (SlotSampling(temperature=0.7, top_p=0.9), SlotSampling(temperature=0.0, repetition_penalty=1.3)):
        admit((1, 2), 28, sampling)
        step((), 0, (1, 2), 28)
        for draft_tokens in (nodes - 1, 1):
            step((1, 2), draft_tokens)
    assert made[loaded:] == []
    kinds = {key for name, _, key in made if name == "accept_drafts_kernel"}
    assert len(kinds) <= (4 if topk > 1 else 3)  # for any number of draft tokens


def test_launchers_are_loaded_apart_until_the_last_one_is(monkeypatch):
    own, apart = triton.runtime.build._load_module_from_path, []

    class Compiling:
        future_kernels = ()

        def __enter__(self):
            return self

        def __exit__(self, *error):  # which waits for the kernels that are compiled yet
            apart.append(triton.runtime.build._load_module_from_path is not own)

    monkeypatch.setattr(triton, "AsyncCompileMode", lambda *arguments, **options: Compiling())
    precompile_passes(lambda: None, torch.device("cpu"), AtOnce())
    assert apart == [True]
    assert triton.runtime.build._load_module_from_path is own
