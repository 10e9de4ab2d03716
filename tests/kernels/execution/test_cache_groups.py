"""Small models whose layers keep windows, latent vectors and states: planner, prefix cache and runner together give
what the model gives without a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kernels.contract.caches import PageRun, State, Window
from kernels.contract.errors import ConfigError
from kernels.contract.speculation import SpeculativeSettings
from kernels.contract.step import Admission, StepBatch
from kernels.devices import group_caches
from kernels.state import group_sizes
from tests.kits.families import WITH_STATES
from tests.kits.mixed_caches import install, make_mixed_model
from tests.kits.planned_runner import GREEDY, PAGE, Line, make_runner, pack
from tests.kits.speculation.oracles import Oracle, draft_with

KINDS = {
    "full": ("full", "full"),
    "window": ("window", "window"),
    "latent": ("latent", "latent"),
    "state": ("state", "state"),
    "full-window": ("full", "window", "window"),
    "latent-state": ("state", "latent", "state"),
    "all": ("full", "window", "latent", "state"),
}


def unpack(data: bytes) -> list[int]:
    return np.frombuffer(data, dtype=np.int32).tolist()


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(install(tmp_path / "site")))


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return make_mixed_model(tmp_path / "model", KINDS[request.param])


class Uncached:
    """The model without a cache: every token comes of a run of all tokens before it, in one step."""

    def __init__(self, model: Path) -> None:
        self._runner, info = make_runner(model)
        self._groups, self._number = info.bounded_groups, 0

    def says(self, prompt: Sequence[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            self._number += 1
            runs = tuple(PageRun(0, pack(self._pages(len(tokens), group.page_tokens))) for group in self._groups)
            admission = Admission(
                1,
                self._number,
                pack(tokens),
                len(prompt),
                0,
                pack(self._pages(len(tokens), PAGE)),
                GREEDY,
                bounded=runs,
            )
            result = self._runner.run(
                StepBatch(
                    self._number,
                    pack([1]),
                    pack([self._number]),
                    pack([len(tokens)]),
                    admitted=(admission,),
                    released=pack([1]) if self._number > 1 else b"",
                )
            )
            assert not result.failed
            tokens += unpack(result.tokens)
        return tokens[len(prompt) :]

    @staticmethod
    def _pages(tokens: int, size: int) -> list[int]:
        return list(range(1, -(-tokens // size) + 1))


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 380, length).tolist() for length in lengths]


def test_chunks_and_decodes_give_what_the_model_gives_without_a_cache(model: Path) -> None:
    batch = prompts(5, 61, 33)
    line, uncached = Line(model), Uncached(model)
    for number, prompt in enumerate(batch):
        line.submit(number, prompt, 12)
    line.play()
    assert [line.outputs[number] for number in range(3)] == [uncached.says(prompt, 12) for prompt in batch]


def test_a_cached_prefix_gives_the_same_tokens(model: Path) -> None:
    (shared, first, second) = prompts(70, 9, 6)
    line, uncached = Line(model), Uncached(model)
    line.submit(0, shared + first, 6)
    line.play()
    line.submit(1, shared + second, 6)
    line.submit(2, shared + first, 6)
    line.play()
    assert line.cached[1] > 0
    assert line.cached[2] >= line.cached[1]
    assert line.outputs[1] == uncached.says(shared + second, 6)
    assert line.outputs[2] == line.outputs[0] == uncached.says(shared + first, 6)


def test_preempted_sequences_go_on_with_the_same_tokens(model: Path) -> None:
    batch = prompts(30, 47, 30)
    line, uncached = Line(model, max_running=2, priority_scheduling=True), Uncached(model)
    for number, prompt in enumerate(batch[:2]):
        line.submit(number, prompt, 20)
    for _ in range(9):
        line.step()
    line.submit(2, batch[2], 20, priority=100)
    line.play()
    assert line.planner.load(0.0).preemptions == 1
    assert [line.outputs[number] for number in range(3)] == [uncached.says(prompt, 20) for prompt in batch]


@pytest.mark.parametrize("kinds", ["full", "latent-state"])
def test_sequences_that_lack_pages_take_turns(kinds: str, tmp_path: Path) -> None:
    batch, model = prompts(30, 30, 30), make_mixed_model(tmp_path / "model", KINDS[kinds])
    line, uncached = Line(model, {"max_total_tokens": 27 * PAGE}, conservativeness=0.0), Uncached(model)
    for number, prompt in enumerate(batch):
        line.submit(number, prompt, 20)
    line.play()
    assert line.planner.load(0.0).preemptions > 0
    assert [line.outputs[number] for number in range(3)] == [uncached.says(prompt, 20) for prompt in batch]


def test_sequences_wait_for_room_in_a_window_group(tmp_path: Path) -> None:
    batch, model = prompts(60, 61, 62, 63), make_mixed_model(tmp_path / "model", KINDS["full-window"])
    line, uncached = Line(model, {"max_total_tokens": 220}), Uncached(model)
    for number, prompt in enumerate(batch):
        line.submit(number, prompt, 4)
    line.step()
    load = line.planner.load(0.0)
    assert load.running < len(batch)
    line.play()
    assert [line.outputs[number] for number in range(4)] == [uncached.says(prompt, 4) for prompt in batch]


def test_sequences_wait_for_room_for_their_states(tmp_path: Path) -> None:
    batch, model = prompts(60, 61, 62, 63), make_mixed_model(tmp_path / "model", KINDS["latent-state"])
    line, uncached = Line(model, {"max_total_tokens": 320}), Uncached(model)
    for number, prompt in enumerate(batch):
        line.submit(number, prompt, 4)
    line.step()
    assert line.planner.load(0.0).running < len(batch)
    line.play()
    assert [line.outputs[number] for number in range(4)] == [uncached.says(prompt, 4) for prompt in batch]


def test_a_new_worker_goes_on_where_the_old_one_was(model: Path) -> None:
    batch = prompts(26, 41)
    line, uncached = Line(model), Uncached(model)
    for number, prompt in enumerate(batch):
        line.submit(number, prompt, 16)
    for _ in range(9):
        line.step()
    line.start_worker()
    line.play()
    assert [line.outputs[number] for number in range(2)] == [uncached.says(prompt, 16) for prompt in batch]


def test_pages_outside_of_the_window_are_returned(tmp_path: Path) -> None:
    line = Line(make_mixed_model(tmp_path / "model", KINDS["full-window"], window=10))
    (prompt,) = prompts(120)
    line.submit(0, prompt, 100)
    line.play()
    (group,) = line.info.bounded_groups
    assert isinstance(group.group.spec, Window)
    assert line.max_used[0] <= group.sequence_pages(PAGE) + group.step_pages(20) < 220 // PAGE


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "gemma4", "llama4", "mistral", "olmo3"])
def test_families_give_pages_back_and_keep_their_tokens(name: str, reference: Any) -> None:
    model, (prompt, other) = reference(name), prompts(61, 9)
    prompt, other = ([token % 211 for token in tokens] for tokens in (prompt, other))
    line = Line(model.path, {"window_pages": True, "max_total_tokens": 1024})
    (group,) = line.info.bounded_groups
    assert isinstance(group.group.spec, Window)
    line.submit(0, prompt, 12)
    line.play()
    line.submit(1, prompt + other, 6)
    line.play()
    assert line.cached[1] > 0
    assert (len(line.outputs[0]), len(line.outputs[1])) == (12, 6)
    assert model.continues(prompt, line.outputs[0])
    assert model.continues(prompt + other, line.outputs[1])


def drafting(monkeypatch: pytest.MonkeyPatch, right: Callable[[int], bool], truths: list[list[int]]) -> Oracle:
    """Runners draft the tokens of ``truths``, where they are to be ``right``. -> their drafter."""
    oracle = Oracle(4, 1, right, 211)
    oracle.truths = truths
    draft_with(monkeypatch, oracle)
    return oracle


DRAFTS = SpeculativeSettings("STANDALONE", num_draft_tokens=5)


@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafts"])
@pytest.mark.parametrize("name", WITH_STATES)
def test_families_with_states_keep_their_tokens(
    name: str, drafts: bool, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks beside decodes, prefixes from snapshots, preemption, and a new worker in the middle."""
    model = reference(name)
    options = {"max_total_tokens": 1024, "speculation": DRAFTS if drafts else None}
    oracle = drafting(monkeypatch, lambda position: position % 7 > 0, [])
    line = Line(model.path, options, max_running=2, priority_scheduling=True)
    snapshot = max(group.page_tokens for group in line.info.bounded_groups if isinstance(group.group.spec, State))
    texts = prompts(snapshot + 6, 9, 26, 31)
    shared, first, second, third = ([token % 211 for token in tokens] for tokens in texts)
    asked = [(shared + first, 6), (shared + second, 26 if drafts else 12), (third, 26 if drafts else 16), (first, 4)]
    if drafts:
        oracle.truths = [model.greedy(prompt, len(prompt) + count + 6) for prompt, count in asked]
    line.submit(0, *asked[0])
    line.play()
    for number in (1, 2):
        line.submit(number, *asked[number])
    for _ in range(5 if drafts else 8):
        line.step()
    line.submit(3, *asked[3], priority=100)
    line.step()
    assert line.planner.load(0.0).preemptions == 1
    assert line.cached[1] == len(shared) // snapshot * snapshot
    line.start_worker()
    line.play()
    for number, (prompt, count) in enumerate(asked):
        assert len(line.outputs[number]) == count
        assert model.continues(prompt, line.outputs[number])
    assert (sum(oracle.accepted) > 10) == drafts


@pytest.mark.parametrize("name", ["falcon-h1", "kimi-linear", "lfm2", "qwen3.5"])
def test_prefixes_go_on_from_states_between_draft_tokens(
    name: str, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_sizes, "snapshot_pages", lambda state_bytes, page_bytes: 2)
    model, (prompt, other) = reference(name), prompts(19, 3)
    prompt, other = ([token % 211 for token in tokens] for tokens in (prompt, other))
    answer = model.greedy(prompt, 70)
    text = answer[:53] + other
    oracle = drafting(monkeypatch, lambda position: position % 5 > 0, [answer, model.greedy(text, 70)])
    line = Line(model.path, {"speculation": DRAFTS})
    line.submit(0, prompt, 45)
    line.play()
    line.submit(1, text, 8)
    line.play()
    assert line.cached[1] == 48
    assert sum(oracle.accepted) > 20
    assert text + line.outputs[1] == oracle.truths[1][: len(text) + 8]


@pytest.mark.parametrize("options", [{}, {"context_length": 40}, {"speculation": SpeculativeSettings("NGRAM")}])
def test_windows_keep_all_tokens_where_that_is_better(options: dict[str, Any], reference: Any) -> None:
    """Without the option; in a context that is too short; with drafts, which know one page table."""
    options = {"window_pages": bool(options)} | options
    assert not make_runner(reference("mistral").path, **options)[1].bounded_groups


def test_a_prefix_of_a_state_ends_at_a_snapshot(tmp_path: Path) -> None:
    line = Line(make_mixed_model(tmp_path / "model", KINDS["latent-state"]))
    (group,) = line.info.bounded_groups
    assert isinstance(group.group.spec, State)
    assert group.page_tokens > PAGE
    (prompt,) = prompts(3 * group.page_tokens + 5)
    line.submit(0, prompt, 1)
    line.play()
    assert line.cache.usage().bounded[0].evictable == 3
    line.submit(1, prompt[: 2 * group.page_tokens + PAGE + 1], 1)
    line.play()
    assert line.cached[1] == 2 * group.page_tokens


def test_a_window_changes_the_tokens(tmp_path: Path) -> None:
    """Otherwise the comparisons above would say nothing of it."""
    (prompt,) = prompts(60)
    outputs = [
        Uncached(make_mixed_model(tmp_path / str(window), KINDS["window"], window=window)).says(prompt, 4)
        for window in (8, 64)
    ]
    assert outputs[0] != outputs[1]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"speculation": SpeculativeSettings("STANDALONE", topk=2)}, "--speculative-eagle-topk 1"),
        ({"kv_cache_dtype": "int8"}, "--kv-cache-dtype"),
        ({"max_states": 9}, "keeps no recurrent states; leave --max-mamba-cache-size out"),
        (
            {"state_memory_ratio": 0.5, "snapshot_tokens": 16},
            "leave --mamba-full-memory-ratio, --mamba-track-interval out",
        ),
    ],
)
def test_options_for_plain_pages_are_refused_for_others(tmp_path: Path, options: dict[str, Any], says: str) -> None:
    model = make_mixed_model(tmp_path / "model", KINDS["full-window"])
    with pytest.raises(ConfigError, match=says):
        make_runner(model, **options)


def test_windows_verify_chains_of_draft_tokens(tmp_path: Path) -> None:
    model, (prompt,) = make_mixed_model(tmp_path / "model", KINDS["full-window"]), prompts(9)
    answer = Uncached(model).says(prompt, 40)
    line = Line(model, {"speculation": SpeculativeSettings("NGRAM")})
    line.submit(0, prompt + answer, 1)
    line.play()
    before = line.planner.load(0.0).steps
    line.submit(1, prompt, 40)
    line.play()
    assert line.outputs[1] == answer
    assert line.planner.load(0.0).steps - before < 20


def test_a_draft_model_that_keeps_more_than_plain_pages_is_refused(tmp_path: Path) -> None:
    target = make_mixed_model(tmp_path / "target", KINDS["full"])
    draft = make_mixed_model(tmp_path / "draft", KINDS["full-window"])
    settings = SpeculativeSettings("STANDALONE", draft_model_path=str(draft), num_steps=2, topk=1, num_draft_tokens=3)
    with pytest.raises(ConfigError, match="a draft model must keep keys and values of all tokens"):
        make_runner(target, speculation=settings)


def test_layers_in_plain_torch_are_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    group_caches._log_plain.cache_clear()
    caplog.set_level("INFO", "troupe.kernels")
    make_runner(make_mixed_model(tmp_path / "model", KINDS["latent-state"]))
    found = [record.getMessage() for record in caplog.records if "plain torch" in record.getMessage()]
    assert len(found) == 2
    assert ("states" in found[0]) != ("states" in found[1])


def test_a_plain_model_has_one_group_of_all_its_memory(tiny_model: Path) -> None:
    _, info = make_runner(tiny_model)
    (group,) = info.cache_groups
    assert info.bounded_groups == ()
    assert group.num_pages == info.num_pages
    assert group.page_bytes * group.num_pages == info.cache_bytes
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(info), type=type(info)) == info
