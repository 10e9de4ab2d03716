"""The n-gram drafter as a runner drives it: admitted, reported what was computed, asked for trees."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.contract.config import RunnerConfig
from kernels.contract.speculation import NgramSettings, SpeculativeSettings
from kernels.contract.step import Admission, SlotSampling
from kernels.core.tree import tree_of
from kernels.devices.cpu.device import CpuDevice
from kernels.speculation.drafter import DrafterContext, DraftRows, Observation
from kernels.speculation.drafters.ngram import NgramDrafter, NgramPruner, NgramTree

NONE = np.zeros((1, 0), dtype=np.int32)


class Slots:
    """A drafter and what its slots hold."""

    def __init__(self, max_nodes: int = 8, **ngram: int) -> None:
        context = object.__new__(DrafterContext)
        chosen = SpeculativeSettings(
            algorithm="NGRAM", num_draft_tokens=max_nodes, ngram=NgramSettings(max_depth=6, **ngram)
        )
        object.__setattr__(context, "settings", chosen)
        object.__setattr__(context, "device", CpuDevice(RunnerConfig(model_path="")))
        self.drafter = NgramDrafter(context)
        self.tokens: dict[int, list[int]] = {}
        self.linear = False  # the last trees

    def admit(
        self,
        slot: int,
        tokens: list[int],
        computed: int = 0,
        salt: bytes = b"",
        first: int = 0,
        prediction: tuple[int, ...] = (),
    ) -> None:
        """``first``: tokens of the first chunk; 0 computes the prompt at once. Its last token counts as sampled."""
        known = np.array(tokens[:-1], dtype=np.int32)
        self.tokens[slot] = list(tokens)
        sampling = SlotSampling(prediction=np.array(prediction, dtype=np.int32).tobytes())
        self.drafter.admit(Admission(slot, 1, known.tobytes(), len(known), computed, b"", sampling, salt), known)
        if first:
            self.observe(slot, computed, first, 0)
        self.observe(slot, computed + first, len(known) - computed - first, 1)

    def observe(self, slot: int, start: int, count: int, sampled: int) -> None:
        tokens = self.tokens[slot]
        ints = np.array(tokens[start + 1 + count - sampled : start + 1 + count], dtype=np.int32)
        ones, blank = np.ones(1, dtype=np.int64), torch.zeros(count, dtype=torch.int64)
        self.drafter.observe(
            Observation(
                slots=slot * ones,
                starts=start * ones,
                counts=count * ones,
                pages=NONE,
                capacity=99 * ones,
                reached=ones > 0,
                token_ids=blank,
                next_tokens=blank,
                positions=blank,
                cache_index=blank,
                features=None,
                last=blank,
                device_slots=blank,
                table=blank,
                sampled=(ints,),
            )
        )

    def say(self, slot: int, tokens: list[int]) -> None:
        start = len(self.tokens[slot]) - 1
        self.tokens[slot] += tokens
        self.observe(slot, start, len(tokens), len(tokens))

    def draft(self, slots: list[int], limits: list[int] | None = None) -> list[list[tuple[int, ...]]]:
        """The paths of each slot's verified nodes."""
        places = np.array(slots, dtype=np.int64)
        roots = np.array([len(self.tokens[slot]) - 1 for slot in slots], dtype=np.int64)
        most = np.array(limits or [99] * len(slots), dtype=np.int64)
        blank = torch.zeros(len(slots), dtype=torch.int64)
        rows = DraftRows(
            slots=places,
            roots=roots,
            pages=NONE,
            capacity=places,
            limits=most,
            root_tokens=blank,
            root_positions=blank,
            device_slots=blank,
            table=blank,
            noise=None,
            steps=3,
        )
        drafts = self.drafter.draft(rows)
        self.linear = drafts.tree.linear
        same = tree_of(drafts.tree.tokens, drafts.tree.parents)
        assert torch.equal(drafts.tree.bits, same.bits)
        assert torch.equal(drafts.tree.depths, same.depths)
        if drafts.tree.linear:
            assert bool((drafts.tree.parents == torch.arange(drafts.tree.tokens.shape[1]) - 1).all())
        assert bool((drafts.nodes <= most + 1).all())
        found = []
        for row, slot in enumerate(slots):
            assert int(drafts.tree.tokens[row, 0]) == self.tokens[slot][-1]
            paths: list[tuple[int, ...]] = []
            for node in range(int(drafts.nodes[row])):
                above = int(drafts.tree.parents[row, node])
                paths.append((*paths[above], int(drafts.tree.tokens[row, node])) if above >= 0 else ())
            found.append(paths[1:])
        return found


def test_what_a_request_generated_is_drafted_for_it_and_for_others() -> None:
    slots = Slots()
    slots.admit(1, [1, 2, 3, 4, 5, 1, 2])
    slots.admit(2, [8, 9])
    assert slots.draft([1, 2]) == [[(3,), (3, 4), (3, 4, 5), (3, 4, 5, 1), (3, 4, 5, 1, 2)], []]
    slots.say(1, [3, 4])
    assert slots.draft([1])[0][0] == (5,)
    slots.say(2, [3, 4])
    assert slots.draft([2])[0][:3] == [(5,), (5, 1), (5, 1, 2)]
    assert slots.draft([1, 2], [1, 2]) == [[(5,)], [(5,), (5, 1)]]


def test_a_prediction_is_drafted_as_soon_as_the_output_meets_it() -> None:
    slots = Slots()
    slots.admit(1, [8, 9], salt=b"a", prediction=(1, 2, 3, 4, 5))
    assert slots.draft([1]) == [[]]
    slots.say(1, [2])
    assert slots.draft([1])[0][:3] == [(3,), (3, 4), (3, 4, 5)]
    slots.admit(2, [8, 2], salt=b"b")
    assert slots.draft([2]) == [[]]


def test_a_cached_prefix_is_known_to_a_request_that_computes_nothing_of_it() -> None:
    slots = Slots()
    slots.admit(1, [1, 2, 3, 4, 1, 2], computed=4)
    assert slots.draft([1])[0][0] == (3,)


def test_a_prompt_is_known_as_far_as_it_was_computed_and_then_all_of_it() -> None:
    slots = Slots()
    slots.admit(1, [1, 2, 3, 4, 1, 2], first=2)
    assert slots.draft([1])[0][:2] == [(3,), (3, 4)]


def test_a_salt_hides_earlier_text_and_a_released_slot_is_forgotten() -> None:
    slots = Slots()
    slots.admit(1, [1, 2, 3, 1], salt=b"a")
    slots.admit(2, [1, 2, 7, 1])
    slots.admit(3, [5, 1], salt=b"b")
    assert slots.draft([1])[0][0] == (2,)
    assert slots.draft([3]) == [[]]
    assert slots.draft([2])[0][:2] == [(2,), (2, 7)]
    slots.drafter.release(1)
    slots.admit(1, [5, 1], salt=b"a")
    assert slots.draft([1]) == [[]]


def test_a_slot_that_is_given_away_starts_again() -> None:
    slots = Slots()
    slots.admit(1, [1, 2, 3])
    slots.admit(1, [4, 5, 4, 5, 4])
    assert slots.draft([1])[0][:2] == [(5,), (5, 4)]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=12), st.integers(2, 16))
def test_trees_are_well_formed_after_any_steps(pieces: list[list[int]], max_nodes: int) -> None:
    slots = Slots(max_nodes, max_breadth=3)
    slots.admit(1, [0, *pieces[0]])
    slots.admit(2, [1, 0, *pieces[-1]], first=(len(pieces[-1]) + 1) // 2)
    for number, piece in enumerate(pieces[1:]):
        slots.say(1 + number % 2, piece)
        for paths in slots.draft([1, 2]):
            assert len(paths) < max_nodes
            assert len(set(paths)) == len(paths)


def test_nothing_is_drafted_behind_what_was_not_seen() -> None:
    """The row's last step was not finite: it is not observed, and the row runs on until that is known."""
    slots = Slots()
    slots.admit(1, [1, 2, 3, 4, 1, 2])
    slots.admit(2, [1, 2, 3, 4, 1, 2])
    slots.tokens[1] += [9, 2]
    assert [bool(paths) for paths in slots.draft([1, 2])] == [False, True]


def test_the_trie_learns_an_unobserved_prompt_with_what_follows() -> None:
    slots = Slots()
    prompt = [1, 2, 3, 4, 5, 6]
    slots.tokens[1] = [*prompt, 9, 8, 1, 2]
    known = np.array(prompt, dtype=np.int32)
    slots.drafter.admit(Admission(1, 1, known.tobytes(), len(known), 0, b"", SlotSampling()), known)
    slots.observe(1, 8, 1, 1)
    slots.say(1, [3])
    slots.say(1, [4])
    assert slots.draft([1])[0][:2] == [(5,), (5, 6)]


def test_a_draft_is_not_judged_by_what_came_behind_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    slots, judged = Slots(), []
    monkeypatch.setattr(NgramPruner, "record_outcomes", lambda _, slot, drafted: judged.append(drafted.known))
    slots.admit(1, [1, 2, 3, 1, 2])
    slots.draft([1])
    slots.tokens[1] += [3, 1]  # unseen
    slots.say(1, [2])
    slots.draft([1])
    assert not judged
    slots.say(1, [3])
    slots.draft([1])
    assert judged == [1]


def test_chains_of_different_lengths_are_chains() -> None:
    """They need no masks."""
    slots = Slots(max_breadth=1)
    slots.admit(1, [1, 2, 3, 4, 5, 1, 2])
    slots.admit(2, [8, 9])
    slots.draft([1, 2])
    assert slots.linear
    assert slots.drafter.branches  # but a runner prepares for trees: shorter windows may know other followers


def test_large_batches_verify_only_likely_draft_tokens() -> None:
    promises = NgramPruner(reads=True)
    slots = list(range(8))

    def crowd(tokens: list[int]) -> list[int]:
        """Draft tokens verified of each, behind which this comes."""
        draft_tokens = [NgramTree([7, 1, 2, 3], [-1, 0, 1, 2], [0, 4, 4, 4]) for _ in slots]
        promises.choose(slots, draft_tokens, [5] * len(slots))
        for slot, each in zip(slots, draft_tokens, strict=True):
            each.follow(tokens)
            promises.record_outcomes(slot, each)
        return [len(each.verified) for each in draft_tokens]

    assert min(crowd([9])) > 0
    for _ in range(8):
        last = crowd([9])
    assert last == [0] * 8
    alone = NgramTree([7, 1, 2, 3], [-1, 0, 1, 2], [0, 4, 4, 4])
    promises.choose([3], [alone], [2])
    assert alone.pruned() == ([7, 1, 2], [-1, 0, 1])
    for _ in range(60):  # nothing of it is verified at first, and it is seen all the same
        last = crowd([1, 2, 3, 4] if any(last) else [1])
    assert last == [3] * 8


def test_the_likelier_of_two_children_is_verified_alone() -> None:
    promises = NgramPruner(reads=True)
    draft_tokens = [NgramTree([7, 1, 2, 3, 4], [-1, 0, 0, 1, 2], [0, 5, 5, 5, 5]) for _ in range(4)]
    promises.choose([1, 2, 3, 4], draft_tokens, [4, 4, 1, 4])
    assert [each.pruned() for each in draft_tokens] == [
        ([7, 1, 3], [-1, 0, 1]),
        ([7, 1, 3], [-1, 0, 1]),
        ([7, 1], [-1, 0]),
        ([7, 1, 3], [-1, 0, 1]),
    ]
