"""The grammars of a runner's slots: they follow tokens that arrive late, thoughts, and tokens from before a restart."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from itertools import takewhile
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from kernels.contract.config import RunnerConfig
from kernels.contract.grammar import Grammar, GrammarError, GrammarSettings
from kernels.contract.step import Admission, SlotSampling
from kernels.devices.memory import DeviceMemory, MemoryUsage
from kernels.execution.runner import ModelRunner
from kernels.grammar.compiler import GrammarCompiler
from kernels.grammar.llguidance_backend import LlMatcher
from kernels.grammar.slots import GrammarSlots, TextTree, _Text
from kernels.sampling.masks import RowMasks
from kernels.sampling.sampler import Sampler
from kernels.state.native_grammars import NativeGrammars
from tests.kits.driver import Driver, pack
from tests.kits.executors import remove_executor
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


def test_a_text_that_takes_too_long_to_accept_a_token_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    judged = Judged("[ab]c")
    slow = judged.grammars._texts[2]
    accept = slow.accept

    def spend(token: int) -> bool:
        begun = time.thread_time()
        while time.thread_time() - begun < 0.02:
            pass
        return accept(token)

    monkeypatch.setattr(slow, "accept", spend)
    assert judged.step("daa") == ("daa", {})
    monkeypatch.setattr("kernels.grammar.slots._TEXT_SECONDS", 0.01)
    found, failed = judged.step("dcc")
    assert found == "dcc"
    assert list(failed) == [2]
    assert "too long" in failed[2]


def test_a_text_that_no_token_may_follow_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = admitted("ab?c")
    assert allowed(slots, 2) == "a"
    monkeypatch.setattr(LlMatcher, "fill", lambda self, row: row.fill(0))
    assert "no token may follow" in slots.masks([1], [2]).errors[1]


def test_tokens_that_arrive_with_a_copy_are_followed() -> None:
    slots = admitted("ab?c")
    assert allowed(slots, 2) == "a"
    slots.sampled([5, 1], torch.tensor([3, ids("a")[0]]))
    assert allowed(slots, 3) == "bc"
    slots.sampled([1], torch.tensor(ids("c")))
    assert allowed(slots, 4) == "$"
    slots.sampled([1], torch.tensor([EOS]))
    assert allowed(slots, 5) == "abcd$"  # of a step that was sent before the end was known


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_node_of_a_draft_tree_has_its_own_mask(backend: str) -> None:
    """Nodes whose tokens are not allowed, and those behind them, are free: they cannot be accepted."""
    slots = GrammarSlots(GrammarSettings(backend, str(FILE), (EOS, 0)), VOCAB, Memory(), None)
    slots.admit(Admission(1, 1, pack([7, 8]), 2, 0, b"", SlotSampling(grammar=Grammar("regex", "a(bc|c)|bd"))))
    #        0
    #   a1  b2  d3
    #  b4   a5  a6    and c8 behind 4, an end behind 8
    #   c7
    signs, parents = "abdbaac", [-1, 0, 0, 0, 1, 2, 3, 4, 7]
    tree = TextTree([8, *(ids(sign)[0] for sign in signs), EOS], parents)
    found = slots.masks([5, *[1] * len(parents)], [9, 2, *[0] * (len(parents) - 1)], {1: tree})
    assert found.masks is not None
    assert found.masks.rows.tolist() == list(range(1, 1 + len(parents)))
    bits = np.unpackbits(found.masks.bits.view(np.uint8), axis=1, count=VOCAB, bitorder="little")
    after = ["".join(sign for sign in "abcd" if row[ids(sign)[0]]) + "$" * row[EOS] for row in bits]
    assert after == ["ab", "bc", "d", "abcd$", "c", "abcd$", "abcd$", "$", "abcd$"]
    drawn, outcome = torch.tensor([ids(sign)[0] for sign in "abd"]), torch.tensor([[2]])
    slots.sampled([1, 1, 1], drawn, outcome, lambda outcome: np.arange(3) < outcome[0, 0])
    assert allowed(slots, 4) == "c"


@pytest.mark.parametrize("backend", BACKENDS)
def test_threads_share_the_texts_of_a_step(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks, trees and errors are those of one thread."""
    names: set[str] = set()
    step = _Text._step

    def spy(text: _Text, token: int, sure: bool) -> bool:
        names.add(threading.current_thread().name)
        return step(text, token, sure)

    monkeypatch.setattr(_Text, "_step", spy)
    found = []
    for cores in (1, 4):
        monkeypatch.setattr("kernels.grammar.slots.usable_cores", lambda cores=cores: cores)
        names.clear()
        slots = GrammarSlots(GrammarSettings(backend, str(FILE), (EOS, 0)), VOCAB, Memory(), None)
        for slot in range(1, 18):
            sampling = SlotSampling(grammar=Grammar("regex", f"a{{{slot}}}(b|c)d"))
            output = pack([7, 8, *ids("a" * min(slot, 16))])  # slot 17 lacks one
            slots.admit(Admission(slot, 1, output, 2, 0, b"", sampling))
        sampling = SlotSampling(grammar=Grammar("regex", "b"))
        slots.admit(Admission(18, 1, pack([7, 8, *ids("a")]), 2, 0, b"", sampling))
        tree = TextTree([ids("a")[0], ids("b")[0], ids("d")[0]], [-1, 0, 1])
        rows = [1, 1, 1, *range(2, 19)]
        masks = slots.masks(rows, [2 + slot for slot in rows], {0: tree})
        assert masks.masks is not None
        assert list(masks.errors) == [18]
        found.append(masks.masks.bits)
        assert (len(names) > 1) == (cores > 1)
        slots.close()
    assert np.array_equal(*found)


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
    slots = admitted("[ab]c", reasoning_end_ids=tuple(ids("cd")))
    for length, sign in enumerate("dccd", 2):
        assert allowed(slots, length) == "abcd"
        slots.sampled([1], torch.tensor(ids(sign)))
    assert allowed(slots, 6) == "ab"


def test_a_model_may_begin_with_a_thought_or_with_the_text() -> None:
    marks = {"reasoning_end_ids": tuple(ids("d")), "reasoning_start_id": ids("c")[0]}
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


def test_native_steps_that_grammars_judge_give_the_tokens_of_masks() -> None:
    require_native()
    model = FILE.parent
    runner = ModelRunner(
        RunnerConfig(str(model), threads=2, max_slots=9, max_total_tokens=2048, grammar=SETTINGS), None
    )
    info = runner.load()
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {}, {"top_p": 0.9}, {"top_k": 5, "min_p": 0.05}, {}]

    def play() -> list[list[int]]:
        driver, slots = Driver(runner, info), range(1, 1 + len(kinds))
        for slot, kind in zip(slots, kinds, strict=True):
            grammar = Grammar("regex", "([a-z]{3} ){8}") if slot < len(kinds) else None
            driver.admit(slot, [300 + slot] * 5, sampling=SlotSampling(**kind, seed=slot, grammar=grammar))
        driver.step([(slot, 5) for slot in slots])
        for _ in range(16):
            assert not driver.step([(slot, 1) for slot in slots]).failed
        found = [driver.tokens[slot] for slot in slots]
        for slot in slots:
            driver.release(slot)
        driver.step([])
        return found

    first = play()
    for name in ("NativeDecode", "NativePrefill"):
        remove_executor(runner, name)
    assert play() == first
    for tokens in first[:-1]:
        output = list(takewhile(lambda token: token not in SETTINGS.eos_ids, tokens[5:]))
        assert set(tokenizer().decode(output)) <= set("abcdefghijklmnopqrstuvwxyz ")


class Judged:
    """``NativeGrammars`` over slots 1 and 2 with a grammar and 3 without one, whose prompts are tokens 7 and 8, on a
    device whose draw is the argmax of what masks allow."""

    def __init__(self, pattern: str, **sampling: Any) -> None:
        self.table = np.full((4, 8), 7, dtype=np.int32)
        self.state = cast(Any, SimpleNamespace(here=self.table, known=np.full(4, 2), generation=np.arange(4)))
        self.grammars = GrammarSlots(SETTINGS, VOCAB, Memory(), self.table)
        self.sampler = Sampler(VOCAB, 4)
        self.draws = 0
        self.nonfinite: set[int] = set()  # slots of the next draw without a finite logit
        for slot in (1, 2, 3):
            grammar = Grammar("regex", pattern) if slot < 3 else None
            settings = SlotSampling(temperature=1.0, grammar=grammar, **sampling)
            self.sampler.admit(slot, settings, 2)
            self.grammars.admit(Admission(slot, 1, pack([7, 8]), 2, 0, b"", settings))
        self.host = NativeGrammars(self.grammars, self.sampler, self._draw, self.state)
        self.rows = self.host.rows((3, 1, 2), self.sampler.masked((3, 1, 2)))

    def _draw(self, logits: Any, draws: Any, positions: Any, ids: Any, vocab: int, masks: Any, rows: Any) -> Any:
        self.draws += len(rows)
        logits = logits[torch.from_numpy(rows)]
        RowMasks(np.arange(len(logits)), masks, torch.from_numpy).apply(logits)
        nonfinite = torch.tensor([place + 1 in self.nonfinite for place in range(len(logits))])
        return logits.argmax(-1), nonfinite

    def step(self, text: str, likely: str = "") -> tuple[str, dict[int, str]]:
        """A step that has drawn these characters for slots 3, 1 and 2. ``likely``: of all rows, the best first."""
        logits, drawn = torch.zeros(3, VOCAB), np.array([ids(sign)[0] for sign in text], dtype=np.int32)
        for place, sign in enumerate(likely):
            logits[:, ids(sign)[0]] = 9.0 - place
        self.state.known += 1
        self.table[[3, 1, 2], self.state.known[1] - 1] = drawn
        found, failed = self.host.check(self.rows, logits, drawn.tobytes())
        tokens = np.frombuffer(found, dtype=np.int32)
        assert self.table[[3, 1, 2], self.state.known[1] - 1].tolist() == tokens.tolist()
        return "".join(tokenizer().decode([token]).strip() for token in tokens), {e.slot: e.message for e in failed}


def test_a_row_is_drawn_again_only_where_its_grammar_refuses_it() -> None:
    judged = Judged("[ab]c[cd]")
    assert judged.host.masks(judged.rows, 3) is None
    assert judged.step("dad", likely="db") == ("dab", {})
    assert judged.draws == 1
    bits = judged.host.masks(judged.rows, 3)  # the row that was refused is masked at once
    assert bits is not None
    assert bits[[0, 1]].tolist() == np.full((2, len(bits[0])), -1).tolist()
    allowed = set(np.unpackbits(bits[2].view(np.uint8), bitorder="little").nonzero()[0].tolist())
    assert allowed >= set(ids("c"))
    assert not allowed & {*ids("a"), *ids("d")}
    assert judged.step("ccc") == ("ccc", {})
    assert judged.host.masks(judged.rows, 3) is None
    assert judged.step("ada", likely="c") == ("adc", {})
    assert judged.draws == 2


def test_rows_whose_cut_depends_on_the_mask_are_masked_at_once() -> None:
    judged = Judged("[ab]c", top_p=0.5)
    for _ in range(2):
        bits = judged.host.masks(judged.rows, 3)
        assert bits is not None
        assert [(row == -1).all() for row in bits] == [True, False, False]
        judged.step("dab" if judged.state.known[1] == 2 else "dcc")
    assert not judged.draws


def test_a_token_that_is_certain_is_drawn_alone() -> None:
    judged = Judged("[ab] is the first letter[cd]")
    judged.step("dab")
    bits = judged.host.masks(judged.rows, 3)
    assert bits is not None
    assert (bits[0] == -1).all()
    for row in bits[1:]:
        [token] = np.unpackbits(row.view(np.uint8), bitorder="little").nonzero()[0].tolist()
        assert tokenizer().decode([token]) == " is"
    assert not judged.draws


def test_a_row_fails_where_the_model_excludes_all_allowed_tokens() -> None:
    judged = Judged("[ab]c")
    judged.nonfinite.add(1)
    _, failed = judged.step("ddd")
    assert list(failed) == [1]
    assert "finite" in failed[1]


def test_a_row_whose_grammar_cannot_go_on_fails_alone() -> None:
    judged = Judged("[ab]c")
    judged.table[2, 1] = ids("d")[0]
    judged.grammars._texts[2].position = 1  # a text that is wrong already
    found, failed = judged.step("daa")
    assert found == "daa"
    assert list(failed) == [2]
    assert "does not match" in failed[2]


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0.0}, {"top_p": 0.5}, {"logprobs": 1}, {"logit_bias": True}, {"repetition_penalty": 1.5}],
    ids=str,
)
def test_a_mask_that_allows_only_excluded_tokens_fails_its_row(sampling: dict[str, Any]) -> None:
    sampler, grammar = Sampler(64, 3), Grammar("regex", "a")
    if sampling.pop("logit_bias", False):
        sampling = {"bias_ids": (5,), "bias_values": (3.0,)}
    for slot in (1, 2):
        sampler.admit(slot, SlotSampling(**sampling, grammar=grammar), 1)
    bits = np.zeros((2, 2), dtype=np.int32)
    bits[:, 0] = 1 << 5
    logits = torch.zeros(2, 64)
    logits[0, 5] = -torch.inf
    slots = torch.tensor([1, 2])
    history = torch.zeros(3, 8, dtype=torch.int32)
    masks = RowMasks(np.arange(2), bits, torch.from_numpy)
    found = sampler.sample(logits, slots, torch.ones(2, dtype=torch.int64), history, masks=masks)
    assert (found.failed, int(found.tokens[1])) == ([0], 5)


def test_the_error_of_a_row_without_finite_logits_names_its_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = RunnerConfig(
        str(FILE.parent), dtype="float32", threads=2, max_slots=3, max_total_tokens=512, grammar=SETTINGS
    )
    runner = ModelRunner(settings, None)
    driver, logits = Driver(runner, runner.load()), runner._loaded.model.logits

    def excluded(hidden: torch.Tensor) -> torch.Tensor:
        found = logits(hidden)
        found[:, 10:] = -torch.inf
        return found

    monkeypatch.setattr(runner._loaded.model, "logits", excluded)
    for slot in (1, 2):
        grammar = Grammar("regex", "a") if slot == 1 else None
        driver.admit(slot, [300] * 3, sampling=SlotSampling(grammar=grammar))
    [error] = driver.step([(1, 3), (2, 3)]).failed
    assert error.slot == 1
    assert "its grammar allows" in error.message
