"""Computes a step's outputs from hidden states: prompt scores, samples, accepted draft tokens, rows that are not
finite."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.contract.step import RowError
from kernels.contract.tasks import Classify, Embed, NextToken
from kernels.core.arrays import Bools, Ints, Longs
from kernels.core.operators import Draws
from kernels.devices.base import Device
from kernels.devices.prepared import CapturedStepResult, PassResult
from kernels.execution.pooled import DenseLayers, activated, normalized
from kernels.execution.result_builder import PromptScores, ResultBuilder, RowValues
from kernels.grammar.slots import NO_MASKS, GrammarSlots, StepMasks, TextTree
from kernels.models.decoder import Decoder
from kernels.sampling.sampler import SampledTokens, Sampler
from kernels.speculation.early_draft import OverlappedResult
from kernels.speculation.speculator import Speculator
from kernels.speculation.verify import Samples, VerifyResult
from kernels.state.slots import SlotTable
from kernels.state.step_rows import StepRows

__all__ = ["StepOutputs"]


SCORE_ROWS = 64  # prompt positions whose logits exist at a time


class StepOutputs:
    """Computes the outputs of one runner's steps. ``caches``: the model's, in which accepted draft tokens are moved.
    ``grammars``: of the slots; None: requests have none. ``dense``: what embeddings pass behind the pooling."""

    def __init__(
        self,
        device: Device,
        model: Decoder,
        sampler: Sampler,
        slots: SlotTable,
        caches: list[Any],
        *,
        speculator: Speculator | None,
        grammars: GrammarSlots | None = None,
        dense: DenseLayers | None = None,
    ) -> None:
        self._dense = dense
        self._device = device
        self._model = model
        self._sampler = sampler
        self._slots = slots
        self._caches = caches
        self._speculator = speculator
        self._grammars = grammars

    def is_all_greedy(self, step: StepRows, grows: Bools) -> bool:
        """Whether every row needs the argmax or no token, and nothing else. ``grows`` [rows]: whether a row reaches its
        last known token."""
        return self._needs_tokens_alone(step, grows) and self._sampler.plain(tuple(step.slots.tolist()))

    def draws(self, step: StepRows, grows: Bools) -> Draws | None:
        """The draws of the rows; None if some need more than a token drawn from the logits as they are, or all the
        argmax."""
        slots = tuple(step.slots.tolist())
        if not self._needs_tokens_alone(step, grows) or self._sampler.masked(slots):
            return None
        return self._sampler.draws(slots) if self._sampler.unedited(slots) else None

    def _needs_tokens_alone(self, step: StepRows, grows: Bools) -> bool:
        """Whether no row scores its prompt."""
        prompts = step.slots[step.decodes :] if grows.all() else step.slots
        return not (self._slots.prompt_logprobs[prompts] >= 0).any()

    def commit(self, step: StepRows, grows: Bools, result: CapturedStepResult, builder: ResultBuilder) -> None:
        """Take the tokens that a captured step has written to the table of tokens, for rows that need no others."""
        state = self._slots
        state.computed[step.slots] += step.counts
        state.grew(step.slots[grows])
        builder.argmax, builder.sampled_rows, builder.sampling = result.argmax, step.rows, grows
        builder.arrives = result.arrives

    def needs_all_tokens(self, step: StepRows) -> bool:
        """Whether a row needs the states of other tokens than its last one: for scores of its prompt's tokens, or to
        return them."""
        state, slots = self._slots, step.slots
        scored = (state.prompt_logprobs[slots] >= 0) & (step.starts + 1 < state.prompt_length[slots])
        returned = state.returns_states[slots] | np.isin(slots, list(state.returns_experts))
        return bool((scored | (returned & (step.counts > 1))).any())

    def read_step(self, step: StepRows, result: CapturedStepResult, builder: ResultBuilder) -> None:
        """Score and sample the rows of a captured whole step, as ``read`` does for a pass."""
        self._slots.computed[step.slots] += step.counts
        self._score_prompts(step, result.hidden, builder)
        self._return_states(step, result.hidden, builder)
        self._test_chunks(step, result.hidden, builder)
        self._pool(step, result.hidden, builder)
        self._sample(step, result.hidden, builder, result.logits)

    def read(self, step: StepRows, result: PassResult, builder: ResultBuilder) -> None:
        """Score and sample the rows of a pass. ``result``: the model's result, for all tokens or each row's last; where
        keys and values were written; and the head's results, if it ran."""
        hidden, features = self._model.split(result.result)
        self._slots.computed[step.slots] += step.certain()
        stage = self._model.stage
        if not stage.is_last:
            self._follow_last_stage(step, result.index, builder)
            return
        reached = self._reached(step)
        if result.experts is not None:
            wanted = np.isin(step.slots, list(self._slots.returns_experts))
            builder.experts = self._values(step, wanted, result.experts)
            if result.recorded:
                builder.expert_counts = self._model.count_experts(result.experts)
            if result.recorded == "tokens":
                builder.routes = self._values(step, np.ones_like(wanted), result.experts.to(torch.int16))
        self._score_prompts(step, hidden, builder)
        self._return_states(step, hidden, builder)
        self._test_chunks(step, hidden, builder)
        self._pool(step, hidden, builder)
        if self._speculator is not None:
            self._sample_verified(self._speculator, step, hidden, features, result, builder)
        else:
            self._sample(step, hidden, builder)
        if stage.size > 1:
            self._tell_stages(step, reached, builder)

    def _logits(self, hidden: Tensor, slots: Iterable[int]) -> Tensor:
        """Logits of ``hidden`` [rows, hidden], whose rows are of these ``slots``."""
        rows = self._model.rows
        if rows is not None and rows.in_head:
            rows.enter_slots(slots)
        return self._model.logits(hidden)

    def _score_prompts(self, step: StepRows, hidden: Tensor, builder: ResultBuilder) -> None:
        """Add the requested log-probabilities of the prompt tokens that this step's positions predict."""
        state = self._slots
        wanted = state.prompt_logprobs[step.slots]
        for row in np.flatnonzero(wanted >= 0).tolist():
            slot, start, offset = int(step.slots[row]), int(step.starts[row]), int(step.offsets[row])
            scored = min(int(step.counts[row]), int(state.prompt_length[slot]) - 1 - start)
            parts = []
            for begin in range(0, scored, SCORE_ROWS):
                end = min(begin + SCORE_ROWS, scored)
                logits = self._logits(hidden[offset + begin : offset + end], [slot] * (end - begin))
                targets = state.tokens[slot, start + 1 + begin : start + 1 + end].to(torch.int64)
                parts.append(self._sampler.score_prompt(logits, targets, int(wanted[row])))
            if parts:
                scores = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
                builder.prompts.append(PromptScores(int(step.rows[row]), *scores))

    def _return_states(self, step: StepRows, hidden: Tensor, builder: ResultBuilder) -> None:
        """Add the states of the tokens of rows whose requests return them, float32."""
        builder.states = self._values(step, self._slots.returns_states[step.slots], hidden)

    def _values(self, step: StepRows, wanted: Bools, values: Tensor) -> RowValues | None:
        """The ``values`` [tokens, ...] of the tokens of the rows that are ``wanted``; None without any."""
        rows = np.flatnonzero(wanted)
        if not len(rows):
            return None
        counts, last = step.counts[rows], self._places(step, values)[rows]
        ends = np.cumsum(counts)
        places = np.arange(ends[-1]) + np.repeat(last + 1 - ends, counts)
        chosen = values.index_select(0, self._device.memory.put(places))
        return RowValues(step.rows[rows], counts, chosen.float() if chosen.is_floating_point() else chosen)

    def _test_chunks(self, step: StepRows, hidden: Tensor, builder: ResultBuilder) -> None:
        """Check rows that sample nothing too, because their pages are shared before a token is sampled from them. The
        last token is enough: it attends to all others.
        """
        short = np.flatnonzero(step.starts + step.counts < self._slots.known[step.slots])
        if len(short):
            last = hidden.index_select(0, self._device.memory.put(self._places(step, hidden)[short]))
            builder.chunk_rows, builder.chunks_broken = step.rows[short], ~last.isfinite().all(-1)

    def _pool(self, step: StepRows, hidden: Tensor, builder: ResultBuilder) -> None:
        """Add the vectors of rows that end the prompt of a task with such a result, float32. They are made from the
        final hidden state of the last token. Call it before the slots grow."""
        tasks, device, model = self._slots.pooled, self._device, self._model
        if not tasks:
            return
        ends = step.starts + step.counts == self._slots.prompt_length[step.slots]
        rows = [row for row in np.flatnonzero(ends).tolist() if int(step.slots[row]) in tasks]
        places = self._places(step, hidden)

        def states(group: list[int]) -> Tensor:
            return hidden.index_select(0, device.memory.put(places[group]))

        put = device.memory.put
        of = {row: tasks[int(step.slots[row])] for row in rows}
        embeds = [(row, task) for row, task in of.items() if isinstance(task, Embed)]
        classes = [(row, task) for row, task in of.items() if isinstance(task, Classify)]
        if embeds:
            group = [row for row, _ in embeds]
            embedded = states(group) if self._dense is None else self._dense(states(group))
            vectors = normalized(embedded, [task.normalize for _, task in embeds], put)
            builder.add_vectors(step.rows[group], vectors)
        if classes and model.classifier is not None and model.pooling is not None:
            group = [row for row, _ in classes]
            numbers = model.classifier(states(group))
            wanted = [task.activate for _, task in classes]
            builder.add_vectors(step.rows[group], activated(numbers, model.pooling.activation, wanted, put))
        for row, task in of.items():
            if isinstance(task, NextToken):
                logprobs = self._logits(states([row]), step.slots[[row]]).float().log_softmax(-1)
                ids = put(np.array(task.ids, dtype=np.int64))
                builder.add_vectors(step.rows[[row]], logprobs.index_select(1, ids))

    def _sample(self, step: StepRows, hidden: Tensor, builder: ResultBuilder, logits: Tensor | None = None) -> None:
        """Sample the next token of rows that reached their last known one. ``logits``: of each row's last token, if
        they were computed."""
        state = self._slots
        reached = np.flatnonzero(step.starts + step.counts == state.known[step.slots])
        if not len(reached):
            return
        slots = step.slots[reached]
        lengths = state.known[slots]
        chosen, wanted = (hidden, self._places(step, hidden)[reached]) if logits is None else (logits, reached)
        if len(wanted) < len(chosen):
            chosen = chosen.index_select(0, self._device.memory.put(wanted))
        at_slots, at = self._device.memory.put(slots), self._device.memory.put(lengths)
        result, named = self._logits(chosen, slots) if logits is None else chosen, slots.tolist()
        allowed = self._allowed(slots, lengths)
        sampled = self._sampler.sample(
            result,
            at_slots,
            at,
            state.tokens,
            host_slots=named,
            longest=int(lengths.max()),
            masks=allowed.masks,
        )
        state.append(slots, at_slots, at, sampled.tokens)
        if allowed.masks is not None:
            assert self._grammars is not None
            self._grammars.sampled(named, sampled.tokens)
            self._report_masked(named, allowed, builder)
        builder.sampled, builder.sampled_rows = sampled, step.rows[reached]

    def _reached(self, step: StepRows) -> Bools:
        """bool [rows]: which rows sample. Ask before the slots grow."""
        reached: Bools = step.starts + step.counts == self._slots.known[step.slots]
        reached[step.verifying] = True
        return reached

    def _tell_stages(self, step: StepRows, reached: Bools, builder: ResultBuilder) -> None:
        """Send the other stages of a pipeline what the state of their slots needs: which chunks are not finite, the
        sampled tokens, -1 in a row that is not finite, which draft tokens were accepted, and the next ones."""
        parts = [] if builder.chunks_broken is None else [builder.chunks_broken.to(torch.int64)]
        if builder.sampled is not None:
            parts.append(builder.sampled.tokens.masked_fill(builder.sampled.nonfinite, -1).reshape(-1))
        if builder.outcome is not None:
            parts.append(builder.outcome.reshape(-1))
        if self._speculator is not None:
            drafted, broken = self._speculator.drafts_for(step, reached), self._broken(step, builder)
            begun = perf_counter()
            trees = self._speculator.draft_next(step, drafted, broken)
            builder.draft += perf_counter() - begun
            parts.append(self._device.memory.put(trees.reshape(-1)))
        if sum(map(len, parts)):
            self._model.stage.send_outcome(torch.cat(parts))

    def _broken(self, step: StepRows, builder: ResultBuilder) -> Bools:
        """bool [rows]: which rows without draft tokens are not finite. Waits for the results."""
        parts: list[tuple[Longs, Tensor]] = []
        if builder.chunks_broken is not None and builder.chunk_rows is not None:
            parts.append((builder.chunk_rows, builder.chunks_broken))
        if builder.sampled is not None and builder.sampled_rows is not None:
            parts.append((builder.sampled_rows, builder.sampled.nonfinite))
        host = self._device.memory.fetch([tensor for _, tensor in parts])()
        named = [rows[found.numpy().reshape(-1)] for (rows, _), found in zip(parts, host, strict=True)]
        broken: Bools = np.isin(step.rows, np.concatenate([np.zeros(0, dtype=np.int64), *named]))
        broken[step.verifying] = False
        return broken

    def _follow_last_stage(self, step: StepRows, index: Tensor, builder: ResultBuilder) -> None:
        """Let ``builder.settle`` do to the slots what ``read`` does, in a stage without an output. ``index``: where the
        keys and values of the step's tokens are."""
        state, speculator = self._slots, self._speculator
        reached = self._reached(step)
        short = np.flatnonzero(step.starts + step.counts < state.known[step.slots])
        sizes = [len(short), int(reached.sum()), 0, 0]
        samples: Samples | None = None
        if speculator is not None and step.drafts is not None:
            samples = Samples.from_step(step, state.known)
            levels = speculator.drafter.depth + 1
            sizes[1:3] = sizes[1] + step.verifies * (levels - 1), step.verifies * (levels + 2)
        drafted: Longs = np.zeros(0, dtype=np.int64)
        if speculator is not None:
            drafted = speculator.drafts_for(step, reached)
            sizes[3] = len(drafted) * speculator.stage_drafter.width
        if not sum(sizes):
            return
        arrived = self._model.stage.await_outcome(sum(sizes), self._device.torch_device)
        generations = state.generation[step.slots]

        def settle() -> None:
            broken, tokens, outcome, trees = arrived().split(sizes)
            if len(short):
                builder.chunk_rows, builder.chunks_broken = step.rows[short], broken != 0
            if speculator is not None and samples is not None:
                sent = SampledTokens(tokens.clamp(min=0), tokens < 0)
                verified = VerifyResult.from_stage(step, samples, sent, outcome.view(step.verifies, -1))
                self._follow_accepted(speculator, step, samples, generations, verified, builder)
                speculator.verifier.move(step, index, verified.outcome, self._caches)
            elif len(tokens):
                self._follow_samples(step, np.flatnonzero(reached), tokens, builder)
            if speculator is not None:
                slots, found = step.slots[drafted], trees.view(-1, speculator.stage_drafter.width).cpu().numpy()
                speculator.stage_drafter.store(slots, state.known[slots] - 1, found)

        builder.settle = settle

    def _follow_accepted(
        self,
        speculator: Speculator,
        step: StepRows,
        samples: Samples,
        generations: Ints,
        verified: VerifyResult,
        builder: ResultBuilder,
    ) -> None:
        """``_follow_samples`` for a step with draft tokens."""
        allowed = self._allowed(samples.slots, samples.lengths, _trees(step, samples))
        speculator.follow(step, samples, generations, verified)
        if allowed.masks is not None:
            self._follow_verified(step, verified)
            self._report_masked(samples.slots.tolist(), allowed, builder)
        self._report(step, verified, builder)

    def _follow_samples(self, step: StepRows, reached: Longs, sent: Tensor, builder: ResultBuilder) -> None:
        """Take the tokens ``sent`` int64 [reached] of these rows, -1 in one that is not finite."""
        state, put = self._slots, self._device.memory.put
        slots = step.slots[reached]
        lengths = state.known[slots]
        allowed = self._allowed(slots, lengths)
        sampled = SampledTokens(sent.clamp(min=0), sent < 0)
        state.append(slots, put(slots), put(lengths), sampled.tokens)
        if allowed.masks is not None:
            assert self._grammars is not None
            self._grammars.sampled(slots.tolist(), sampled.tokens)
            self._report_masked(slots.tolist(), allowed, builder)
        builder.sampled, builder.sampled_rows = sampled, step.rows[reached]

    def _allowed(self, slots: Longs, lengths: Longs, trees: Mapping[int, TextTree] | None = None) -> StepMasks:
        """What the grammars of ``slots`` allow after so many tokens. Call it when the pass is launched. ``trees``: see
        ``GrammarSlots.masks``."""
        if self._grammars is None:
            return NO_MASKS
        return self._grammars.masks(slots.tolist(), lengths.tolist(), trees)

    def _follow_verified(self, step: StepRows, verified: VerifyResult) -> None:
        """Pass the sampled tokens to the grammars, those behind draft tokens if these were accepted."""
        assert self._grammars is not None
        rows, places, verifying = verified.rows, verified.places, step.verifying

        def kept(outcome: Longs) -> Bools:
            counts = np.ones(len(step.slots), dtype=np.int64)
            counts[verifying] = np.abs(outcome[:, 0])
            return places < counts[rows]

        self._grammars.sampled(step.slots[rows].tolist(), verified.sampled.tokens, verified.outcome, kept)

    def _report_masked(self, slots: list[int], allowed: StepMasks, builder: ResultBuilder) -> None:
        """Name the rows that a grammar masks, and fail those whose grammar cannot go on. ``slots``: of the masks."""
        assert allowed.masks is not None
        masked = {slots[row] for row in allowed.masks.rows.tolist()}
        builder.masked = frozenset(row for row, slot in enumerate(builder.slots.tolist()) if slot in masked)
        for slot, message in allowed.errors.items():
            builder.failed.append(RowError(slot, int(self._slots.generation[slot]), message, invalid=True))

    @staticmethod
    def _places(step: StepRows, hidden: Tensor) -> npt.NDArray[np.int64]:
        """The index of each row's last token in ``hidden``, which has all tokens or only these."""
        return step.last if len(hidden) > len(step.rows) else np.arange(len(step.rows))

    def _sample_verified(
        self,
        speculator: Speculator,
        step: StepRows,
        hidden: Tensor,
        features: Tensor,
        result: PassResult,
        builder: ResultBuilder,
    ) -> None:
        """``_sample`` for steps with draft tokens: sample after each of them, and accept the right ones."""
        reached = self._reached(step)
        verified: VerifyResult | None = None
        if step.drafts is None:
            self._sample(step, hidden, builder)
        elif result.accepted is not None:
            verified = speculator.early_drafts.take_accepted(result)
        else:
            samples = Samples.from_step(step, self._slots.known)
            allowed = self._allowed(samples.slots, samples.lengths, _trees(step, samples))
            if result.head is not None and len(samples.tokens) == len(hidden):
                logits, *greedy = result.head
                verified = speculator.sample(step, samples, logits, SampledTokens(*greedy), allowed.masks)
            else:
                every = len(samples.tokens) == len(hidden)
                chosen = hidden if every else hidden[self._device.memory.put(samples.tokens)]
                logits = self._logits(chosen, samples.slots)
                verified = speculator.sample(step, samples, logits, masks=allowed.masks)
            if allowed.masks is not None:
                self._follow_verified(step, verified)
                self._report_masked(samples.slots.tolist(), allowed, builder)
            speculator.verifier.move(step, result.index, verified.outcome, self._caches)
        if verified is not None:
            self._report(step, verified, builder)
        builder.arrives = speculator.record_run(
            step, reached, features, builder.sampled, verified, states=result.states
        )

    def followed(self, step: StepRows, followed: OverlappedResult, builder: ResultBuilder) -> None:
        """Read a pass that was launched before the host knew the result of the one before."""
        assert self._speculator is not None
        verified, features = followed.verified, self._model.split(followed.found.result)[1]
        self._report(step, verified, builder)
        reached = np.ones(len(step.slots), dtype=bool)
        builder.arrives = self._speculator.record_run(step, reached, features, builder.sampled, verified)
        self._speculator.early_drafts.set_followed(
            self._speculator.last_run, followed.found.accept_size, followed.behind
        )

    @staticmethod
    def _report(step: StepRows, verified: VerifyResult, builder: ResultBuilder) -> None:
        builder.sampled, builder.sampled_rows = verified.sampled, step.rows[verified.rows]
        builder.places, builder.outcome = verified.places, verified.outcome
        builder.verified_rows = step.rows[step.verifying]
        builder.drafted = step.counts[step.verifying] - 1


def _trees(step: StepRows, samples: Samples) -> dict[int, TextTree] | None:
    """The draft trees of a step for its grammars, by the first sample of each row that verifies. Waits for them, while
    the pass runs."""
    if step.fetched is None:
        return None
    tokens, parents = (part.tolist() for part in step.fetched())
    counts = step.counts[step.verifying]
    firsts = samples.verified.start + np.cumsum(counts) - counts
    return {
        first: TextTree(tokens[row][:count], parents[row][:count])
        for row, (first, count) in enumerate(zip(firsts.tolist(), counts.tolist(), strict=True))
    }
