"""The grammars of a runner's slots: they follow tokens that arrive late, thoughts, and tokens from before a restart."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, cast

import numpy as np
import pytest
import torch

from kernels.contract.config import RunnerConfig
from kernels.contract.grammar import Grammar, GrammarError, GrammarSettings
from kernels.contract.step import Admission, SlotSampling
from kernels.core.attention_rows import DecodeTokens
from kernels.devices.memory import DeviceMemory, MemoryUsage
from kernels.execution.executors.host_masked import HostMasked
from kernels.execution.runner import ModelRunner
from kernels.grammar.compiler import GrammarCompiler
from kernels.grammar.slots import GrammarSlots
from kernels.models.host_model import HostModel
from kernels.sampling.masks import RowMasks
from tests.kits.driver import Driver, pack
from tests.kits.executors import find_executor, remove_executor
from tests.kits.grammars import BACKENDS, EOS, FILE, VOCAB, tokenizer
from tests.kits.native import require_native

SETTINGS = GrammarSettings("llguidance", str(FILE), (EOS, 0))


class Memory(DeviceMemory):
    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    def usage(self) -> MemoryUsage:
        return MemoryUsage(0, 0)


def ids(text: str) -> list[int]:
    return [token for sign in text for token in tokenizer().encode(sign, add_special_tokens=False).ids]


def admitted(pattern: str, output: str = "", **sampling: Any) -> GrammarSlots:
    """Slot 1 with a prompt of two tokens, on a device that is not the host."""
    slots = GrammarSlots(SETTINGS, VOCAB, Memory(), None)
    settings = SlotSampling(grammar=Grammar("regex", pattern), **sampling)
    slots.admit(Admission(1, 1, pack([7, 8, *ids(output)]), 2, 0, b"", settings))
    return slots


def allowed(slots: GrammarSlots, length: int) -> str:
    """The single characters that slot 1 may continue with, and $ for its end."""
    found = slots.masks([1], [length])
    assert not found.errors
    assert found.masks is not None
    bits = np.unpackbits(found.masks.bits.view(np.uint8), axis=1, count=VOCAB, bitorder="little")[0]
    signs = "".join(sign for sign in "abcd" if bits[ids(sign)[0]])
    return signs + ("$" if bits[EOS] else "")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_text_that_does_not_match_stays_an_error(backend: str) -> None:
    """Another executor may ask again for the masks of the same step."""
    slots = GrammarSlots(GrammarSettings(backend, str(FILE), (EOS, 0)), VOCAB, Memory(), None)
    settings = SlotSampling(grammar=Grammar("regex", "ab"))
    slots.admit(Admission(1, 1, pack([7, 8, *ids("aa")]), 2, 0, b"", settings))
    for _ in range(2):
        assert "does not match" in slots.masks([1], [4]).errors[1]


def test_a_step_does_not_wait_for_a_grammar_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.grammar.slots._COMPILE_SECONDS", 0.01)
    monkeypatch.setattr(GrammarCompiler, "compile", lambda self, grammar: Future())
    assert "to compile" in admitted("ab").masks([1], [2]).errors[1]


def test_a_text_that_takes_too_long_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.grammar.slots._TEXT_SECONDS", -1.0)
    slots = admitted("ab")
    assert "too long" in slots.masks([1], [2]).errors[1]
    monkeypatch.undo()
    assert "too long" in slots.masks([1], [2]).errors[1]
    assert not admitted("ab").masks([1], [2]).errors


def test_tokens_that_arrive_with_a_copy_are_followed() -> None:
    slots = admitted("ab?c")
    assert allowed(slots, 2) == "a"
    slots.sampled([5, 1], torch.tensor([3, ids("a")[0]]))
    assert allowed(slots, 3) == "bc"
    slots.sampled([1], torch.tensor(ids("c")))
    assert allowed(slots, 4) == "$"
    slots.sampled([1], torch.tensor([EOS]))
    assert allowed(slots, 5) == "abcd$"  # of a step that was sent before the end was known


def test_output_from_before_a_restart_is_followed() -> None:
    assert allowed(admitted("ab?c", "ab"), 4) == "c"


def test_a_token_that_does_not_match_fails_its_row_alone() -> None:
    slots = admitted("ab?c", "d")
    slots.admit(Admission(2, 1, pack([7]), 1, 0, b"", SlotSampling(grammar=Grammar("regex", "b"))))
    found = slots.masks([1, 2, 3], [3, 1, 1])
    assert list(found.errors) == [1]
    assert found.masks is not None
    assert found.masks.rows.tolist() == [0, 1]


def test_a_wrong_grammar_fails_at_the_admission_once_it_is_compiled() -> None:
    slots = GrammarSlots(SETTINGS, VOCAB, Memory(), None)
    wrong = Grammar("regex", "(")
    with pytest.raises(GrammarError):
        slots.compiler.compile(wrong).result(30)
    with pytest.raises(GrammarError):
        slots.admit(Admission(1, 1, pack([7]), 1, 0, b"", SlotSampling(grammar=wrong)))


def test_a_thought_is_free_but_may_not_end_the_text() -> None:
    slots = admitted("[ab]c", grammar_after=tuple(ids("cd")))
    for length, sign in enumerate("dccd", 2):
        assert allowed(slots, length) == "abcd"
        slots.sampled([1], torch.tensor(ids(sign)))
    assert allowed(slots, 6) == "ab"


def test_a_model_may_begin_with_a_thought_or_with_the_text() -> None:
    marks = {"grammar_after": tuple(ids("d")), "grammar_opens": ids("c")[0]}
    slots = admitted("[ab]c", **marks)
    assert allowed(slots, 2) == "abc"
    slots.sampled([1], torch.tensor(ids("c")))
    assert allowed(slots, 3) == "abcd"
    slots.sampled([1], torch.tensor(ids("d")))
    assert allowed(slots, 4) == "ab"
    assert allowed(admitted("[ab]c", "a", **marks), 3) == "c"


def test_a_mask_leaves_other_rows_and_the_order_of_bits() -> None:
    bits = np.zeros((1, 3), dtype=np.int32)
    for token in (0, 31, 32, 70):
        bits.view(np.uint32)[0, token // 32] |= np.uint32(1) << np.uint32(token % 32)
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.ones(2, 75, dtype=dtype)
        RowMasks(np.array([1]), bits, torch.from_numpy).apply(logits)
        assert logits[0].isfinite().all()
        assert logits[1].isfinite().nonzero().flatten().tolist() == [0, 31, 32, 70]


def test_a_device_makes_the_same_mask_of_packed_bits() -> None:
    bits = np.random.default_rng(1).integers(-(2**31), 2**31, (2, 3)).astype(np.int32)
    masks = RowMasks(np.arange(2), bits, torch.from_numpy)
    assert torch.equal(masks.unpack(75), masks.unpack_on_device(75))


def test_native_decodes_between_masks_give_the_tokens_of_other_executors() -> None:
    require_native()
    model = FILE.parent
    runner = ModelRunner(
        RunnerConfig(str(model), threads=2, max_slots=9, max_total_tokens=2048, grammar=SETTINGS), None
    )
    info = runner.load()
    assert find_executor(runner, "HostMasked") is not None

    def play() -> list[list[int]]:
        driver = Driver(runner, info)
        for slot in (1, 2, 3):
            grammar = Grammar("regex", "([a-z]{3} ){8}") if slot < 3 else None
            warm = SlotSampling(temperature=1.0 if slot > 1 else 0.0, top_p=0.9, seed=slot, grammar=grammar)
            driver.admit(slot, [300 + slot] * 5, sampling=warm)
        driver.step([(slot, 5) for slot in (1, 2, 3)])
        for _ in range(12):
            assert not driver.step([(slot, 1) for slot in (1, 2, 3)]).failed
        found = [driver.tokens[slot] for slot in (1, 2, 3)]
        for slot in (1, 2, 3):
            driver.release(slot)
        driver.step([])
        return found

    first = play()
    remove_executor(runner, "HostMasked")
    assert play() == first
    text = tokenizer().decode(first[0][5:])
    assert set(text) <= set("abcdefghijklmnopqrstuvwxyz ")


class EagerModel:
    """A ``HostModel`` without native operators: it runs the rows of the step in hand."""

    draw = None

    def __init__(self, runner: ModelRunner, rows: int) -> None:
        self.loaded, self.calls = runner._loaded, 0
        self.logits = torch.zeros(rows, self.loaded.slots.vocab_size)
        self.step: Any = None

    def run(self, rows: DecodeTokens) -> None:
        formed, loaded = self.step.form(), self.loaded
        assert rows.ids.tolist() == loaded.slots.here[formed.slots, formed.starts].tolist()  # type: ignore[index]
        assert rows.lengths.tolist() == (rows.positions + 1).tolist()
        result = loaded.model.forward(self.step.forward_batch(), loaded.caches)
        self.logits[: len(rows.ids)] = loaded.model.logits(loaded.model.split(result)[0])
        self.calls += 1


def test_decodes_between_masks_are_checked_once_and_give_the_eager_tokens() -> None:
    config = RunnerConfig(
        str(FILE.parent), dtype="float32", threads=1, max_slots=9, max_total_tokens=2048, grammar=SETTINGS
    )
    runner = ModelRunner(config)
    info, number = runner.load(), iter(range(1, 9))
    runner._executors = tuple(each for each in runner._executors if type(each).__name__ in ("NoRows", "EagerPass"))
    eager, model = runner._executors, EagerModel(runner, 8)
    assert runner._loaded.grammars is not None
    masked = HostMasked(runner._context, cast(HostModel, model), runner._loaded.grammars, 8, False)
    masked._greedy = lambda logits: (logits.argmax(-1), torch.zeros(len(logits), dtype=torch.bool))

    class Watched:
        def execute(self, step: Any) -> Any:
            model.step = step
            return masked.execute(step)

    def play(rows: int) -> list[list[int]]:
        driver = Driver(runner, info)
        driver.generation = dict.fromkeys(range(1, 9), next(number))
        for slot in range(1, rows + 1):
            grammar = Grammar("regex", "([a-z]{3} ){4}") if slot != 2 else None
            driver.admit(slot, [300 + slot] * 5, sampling=SlotSampling(temperature=0.0, seed=slot, grammar=grammar))
        driver.step([(slot, 5) for slot in range(1, rows + 1)])
        for _ in range(20):
            assert not driver.step([(slot, 1) for slot in range(1, rows + 1)]).failed
        found = [driver.tokens[slot] for slot in range(1, rows + 1)]
        for slot in range(1, rows + 1):
            driver.release(slot)
        driver.step([])
        return found

    for rows in (2, 5):  # below and above the number from which masks are filled apart
        runner._executors = eager
        expected = play(rows)
        runner._executors = (cast(Any, Watched()), *eager)
        model.calls = 0
        assert play(rows) == expected
        assert model.calls == 20
