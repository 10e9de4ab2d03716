"""Sampling: from a step's logits to one token a row, on the device, batched over the rows.

The order of the transforms: masks of grammars (``masks``), allowed tokens, bans, bad words, min_tokens and logit_bias
(``edits``), penalties
(``penalties``), temperature, top-k, top-p (``nucleus``), min-p, then the Gumbel-max argmax (``noise``).
Log-probabilities are those of the raw logits, before all transforms and at temperature 1. Ties are broken by the lowest
id. A row's token depends only on its own logits, history, position and parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.contract.step import SlotSampling
from kernels.core.logit_blocks import argmax, block_maxima, log_normalizer, top
from kernels.core.noise import gumbel_argmax, gumbel_argmax_over_all, keys_at, seed_key, uniform
from kernels.core.operators import DRAWS, Draw, Draws, Greedy, MaskLogits, TopKTopP
from kernels.sampling.edits import BatchEdits, Put, SlotEdits
from kernels.sampling.masks import RowMasks
from kernels.sampling.nucleus import cut, outside
from kernels.sampling.penalties import apply_penalties

__all__ = ["Noise", "SampledTokens", "Sampler"]

_GREEDY_BELOW = 1e-5  # temperatures below are greedy
_FEW_LOGITS = 1 << 14  # up to here processing all rows is faster than selecting some; the result is the same
_MAX_K = 1024
_PLANS = 8
_GREEDY = SlotSampling(temperature=0.0)
_SCORE_CHUNK = 1 << 24  # logits scored at once


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The result of ``Sampler.sample``. All tensors but ``top_counts`` are on the sampler's device."""

    tokens: Tensor  # int64 [rows]; 0 in a row that failed
    nonfinite: Tensor  # bool [rows]: the row's logits contain NaN or +inf, or only -inf
    logprobs: Tensor | None = None  # float32 [rows], NaN where not requested; None if no row requested them
    top_ids: Tensor | None = None  # int64 [rows, k], k the largest requested number; None if it is 0
    top_logprobs: Tensor | None = None  # float32 [rows, k], in order
    top_counts: Tensor | None = None  # int32 [rows] on the host: how many of the k the row requested

    @property
    def failed(self) -> list[int]:
        """Indices of the rows that failed. Waits for the device."""
        return self.nonfinite.nonzero().squeeze(1).tolist()


@dataclass(frozen=True, slots=True)
class Noise:
    """The noise and temperature of rows. ``keys`` int32 [rows, 2]: keys of the seeds, from which ``keys_at`` derives
    those of a position. ``temperature`` float32 [rows]: 0 is greedy, without noise."""

    keys: Tensor
    temperature: Tensor


class _Slots:
    """Sampling parameters by slot, on the host; those of a batch are gathered when its composition changes."""

    def __init__(self, count: int) -> None:
        self.temperature = np.zeros(count, np.float32)  # 0: greedy
        self.top_k = np.zeros(count, np.int64)
        self.top_p = np.ones(count, np.float64)
        self.min_p = np.zeros(count, np.float32)
        self.repetition = np.ones(count, np.float32)
        self.frequency = np.zeros(count, np.float32)
        self.presence = np.zeros(count, np.float32)
        self.keys = np.zeros((count, 2), np.int32)
        self.prompt_length = np.zeros(count, np.int64)
        self.held_until = np.zeros(count, np.int64)  # the position from which stop tokens may be sampled
        self.logprobs = np.full(count, -1, np.int32)
        self.edits: dict[int, SlotEdits] = {}
        self.unedited = np.ones(count, dtype=bool)  # no edits of logits, and no log-probabilities are requested
        self.masked = np.zeros(count, dtype=bool)  # whether a grammar masks the logits

    def put(self, slot: int, sampling: SlotSampling, prompt_length: int, vocab_size: int) -> None:
        greedy = sampling.temperature < _GREEDY_BELOW or sampling.top_k == 1
        self.temperature[slot] = 0.0 if greedy else sampling.temperature
        self.top_k[slot] = sampling.top_k if 0 < sampling.top_k < vocab_size else 0
        self.top_p[slot] = sampling.top_p
        self.min_p[slot] = sampling.min_p
        self.repetition[slot] = sampling.repetition_penalty
        self.frequency[slot] = sampling.frequency_penalty
        self.presence[slot] = sampling.presence_penalty
        self.keys[slot] = seed_key(sampling.seed)
        self.prompt_length[slot] = prompt_length
        self.held_until[slot] = prompt_length + sampling.min_tokens
        self.logprobs[slot] = sampling.logprobs
        self.edits.pop(slot, None)
        if SlotEdits.any(sampling):
            edits = SlotEdits(sampling, vocab_size, prompt_length)
            if edits:
                self.edits[slot] = edits
        penalized = (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty) != (1, 0, 0)
        self.masked[slot] = sampling.grammar is not None
        self.unedited[slot] = not (penalized or sampling.logprobs >= 0 or slot in self.edits)

    def draws(self, at: npt.NDArray[np.int64]) -> Draws:
        result = np.empty(len(at), DRAWS)
        for name in ("keys", "temperature", "top_p", "top_k"):
            result[name] = getattr(self, name)[at]
        with np.errstate(divide="ignore"):
            result["log_min_p"] = np.log(self.min_p[at])
        return result

    def clear(self, slot: int) -> None:
        self.put(slot, _GREEDY, 0, 1)


class _Plan:
    """The sampling plan of a batch: the rows of each path, and their parameters on the device."""

    def __init__(self, state: _Slots, slots: Sequence[int], put: Put, judges: bool) -> None:
        at = np.array(slots, dtype=np.int64)

        edited = (
            [(row, state.edits[slot]) for row, slot in enumerate(slots) if slot in state.edits] if state.edits else []
        )
        self.edits = BatchEdits(edited, put) if edited else None
        self.held_until = put(state.held_until[at])

        repetition, frequency, presence = state.repetition[at], state.frequency[at], state.presence[at]
        self.counted = bool(np.any(frequency) or np.any(presence))
        penalized = np.flatnonzero((repetition != 1) | (frequency != 0) | (presence != 0))
        self.penalized = put(penalized) if len(penalized) else None
        self.prompt_length = put(state.prompt_length[at][penalized])
        self.repetition, self.frequency, self.presence = (
            put(factors[penalized]) for factors in (repetition, frequency, presence)
        )

        sampled = np.flatnonzero(state.temperature[at] > 0)
        self.sampled = put(sampled) if len(sampled) else None
        self.all_sampled = len(sampled) == len(at)
        self.temperature = put(state.temperature[at][sampled])
        self.keys = put(state.keys[at][sampled])
        min_p = state.min_p[at][sampled]
        self.log_min_p = (
            put(np.log(min_p, where=min_p > 0, out=np.full_like(min_p, -np.inf))) if np.any(min_p) else None
        )

        # Sampled rows with a sorted cut, and those whose winner is checked (see ``nucleus``).
        top_k, top_p = state.top_k[at][sampled], state.top_p[at][sampled]
        judged = np.flatnonzero((top_k == 0) & (top_p < 1)) if judges else np.empty(0, np.int64)
        restricted = np.setdiff1d(np.flatnonzero((top_k > 0) | (top_p < 1)), judged)
        self.cut = put(restricted) if len(restricted) else None
        self.top_k, self.top_p = put(top_k[restricted]), put(top_p[restricted])
        self.largest_k = int(top_k.max(initial=0))
        # Whether a device's own kernel for top-k and top-p can run.
        cut_k = top_k[restricted]
        self.plain_k = bool((cut_k == 0).all() or (cut_k.min() > 0 and cut_k.max() <= _MAX_K))
        self.judged = put(judged) if len(judged) else None
        self.judged_p = put(top_p)

        logprobs = state.logprobs[at]
        scored = np.flatnonzero(logprobs >= 0)
        self.scored = put(scored) if len(scored) else None
        self.top_counts = torch.from_numpy(logprobs.clip(min=0))
        self.max_logprobs = int(logprobs.max(initial=0))
        unedited = bool(state.unedited[at].all())
        self.plain = unedited and not len(sampled)
        self.masked = bool(state.masked[at].any())
        self.draws: Draws | None = state.draws(at) if unedited and len(sampled) else None


class Sampler:
    """Samples for the slots of one runner.

    vocab_size: width of the logits. max_slots: slots are ``0 .. max_slots - 1``; one that was never admitted is greedy.
    own_top_k_top_p: the device's kernel for top-k and top-p. put: copies an array to the device. own_greedy: the
    device's kernel for batches whose rows need only the argmax. own_draw: that for rows without logit edits and
    log-probabilities. own_mask: that for masks of grammars. apart: sample each row separately, because the last bits of
    an operator's result may depend on the batch.
    """

    def __init__(
        self,
        vocab_size: int,
        max_slots: int,
        device: torch.device | str = "cpu",
        *,
        own_top_k_top_p: TopKTopP | None = None,
        put: Put | None = None,
        own_greedy: Greedy | None = None,
        own_draw: Draw | None = None,
        apart: bool = False,
        own_mask: MaskLogits | None = None,
    ) -> None:
        self._apart = apart
        self._max_plans = _PLANS + max_slots if apart else _PLANS
        self._own_top_k_top_p, self._own_greedy, self._own_draw = own_top_k_top_p, own_greedy, own_draw
        self._own_mask = own_mask
        self._put = put or (lambda array: torch.from_numpy(array).to(self.device))
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self._slots = _Slots(max_slots)
        self._plans: dict[tuple[int, ...], _Plan] = {}

    def admit(self, slot: int, sampling: SlotSampling, prompt_length: int) -> None:
        """Set the parameters of a request's slot. Tokens of its history from ``prompt_length`` on count as output."""
        self._slots.put(slot, sampling, prompt_length, self.vocab_size)
        self._plans.clear()

    def release(self, slot: int) -> None:
        """Forget the slot's parameters."""
        self._slots.clear(slot)
        self._plans.clear()

    def noise(self, slots: Sequence[int]) -> Noise | None:
        """The noise of these slots; None if all are greedy."""
        at = np.array(slots, dtype=np.int64)
        temperature = self._slots.temperature[at]
        return Noise(self._put(self._slots.keys[at]), self._put(temperature)) if temperature.any() else None

    def needs_history(self, slots: Sequence[int]) -> bool:
        """Whether sampling in one of these slots depends on the tokens of its history, not only on their number."""
        state, at = self._slots, np.array(slots, dtype=np.int64)
        if np.any(state.repetition[at] != 1) or np.any(state.frequency[at]) or np.any(state.presence[at]):
            return True
        return bool(state.edits) and any(slot in state.edits and state.edits[slot].reads_history for slot in set(slots))

    @staticmethod
    def chances(keys: Tensor, positions: Tensor) -> Tensor:
        """A uniform number float32 [rows] for each of the seeds' keys int32 [rows, 2] and positions int64 [rows]."""
        return uniform(keys_at(keys, positions))

    def plain(self, slots: tuple[int, ...]) -> bool:
        """Whether all of them need only the argmax."""
        plan, at = self._plans.get(slots), list(slots)
        if plan is not None:
            return plan.plain and not plan.masked
        state = self._slots
        return bool((state.unedited[at] & ~state.masked[at]).all()) and not state.temperature[at].any()

    def unedited(self, slots: tuple[int, ...]) -> bool:
        """Whether none of them has logit edits, or requests log-probabilities. Grammars may mask them."""
        return bool(self._slots.unedited[list(slots)].all())

    def masked(self, slots: tuple[int, ...]) -> list[int]:
        """The indices of those that a grammar masks."""
        result: list[int] = np.flatnonzero(self._slots.masked[list(slots)]).tolist()
        return result

    def draws(self, slots: tuple[int, ...], greedy: bool = False) -> Draws | None:
        """The draws of slots that are ``unedited``; None if all are greedy, unless ``greedy`` asks for these too."""
        at = np.array(slots, dtype=np.int64)
        return self._slots.draws(at) if greedy or self._slots.temperature[at].any() else None

    def sample(
        self,
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        history: Tensor,
        *,
        host_slots: Sequence[int] | None = None,
        longest: int | None = None,
        masks: RowMasks | None = None,
    ) -> SampledTokens:
        """One token for each row.

        logits: [rows, vocab], any floating dtype, worked on in float32; the memory of a float32 tensor may be reused.
        slots: int64 [rows]. positions: int64 [rows], the index in its sequence of the token to be sampled, which is the
        number of tokens known before. history: int [max_slots, context], token ids by slot; the first ``positions`` of
        a row's slot are read. host_slots (the slots) and longest (at least the largest position), avoid a wait for the
        device, if the caller knows them. With host_slots, slots may be rows of a history that is not by slot.
        masks: tokens that rows may sample; the logits of the others may be overwritten, whatever their dtype.

        A row with a NaN, +inf or only -inf fails alone (``SampledTokens.nonfinite``). If bans leave no token, the most
        likely allowed token is taken, or else the most likely of all; in rows with a mask the most likely that it
        allows. A row whose mask allows only -inf fails, too.
        """
        plan = self._plan(tuple(slots.tolist() if host_slots is None else host_slots))
        if self._apart and len(logits) > 1 and (masks is not None or not plan.plain):
            return self._sample_apart(plan, logits, slots, positions, history, host_slots, masks=masks)
        if masks is not None and (plan.plain or plan.draws is not None):
            masks.apply(logits, self._own_mask)  # nothing needs the raw logits
            masks = None
        if self._own_greedy is not None and plan.plain:
            return SampledTokens(*self._own_greedy(logits))
        if self._own_draw is not None and plan.draws is not None:
            drawn = self._own_draw(logits, plan.draws, positions, None, self.vocab_size)
            if drawn is not None:
                return SampledTokens(*drawn)
        raw = logits.float()
        rows = torch.arange(len(raw), device=raw.device)
        raw_blocks = block_maxima(raw)
        raw_max = raw_blocks.amax(-1)
        nonfinite = ~raw_max.isfinite()

        work, blocks, row_max = raw, raw_blocks, raw_max
        if plan.edits is not None or plan.penalized is not None or masks is not None:
            if plan.scored is not None or masks is not None or (plan.edits is not None and plan.edits.masks):
                work = raw.clone()
            if masks is not None:
                masks.apply(work, self._own_mask)
                nonfinite |= work.amax(-1) == -torch.inf  # whatever edits leave below
            if plan.edits is not None:
                plan.edits.apply(work, slots, positions, plan.held_until, history)
            if plan.penalized is not None:
                self._apply_penalties(plan, work, slots, positions, history, longest)
            blocks = block_maxima(work)
            row_max = blocks.amax(-1)
            nonfinite |= ~(row_max < torch.inf)

        if plan.sampled is None:
            tokens = argmax(work, rows, blocks)
        elif plan.all_sampled:
            tokens = self._draw(plan, work, blocks, row_max, positions)
        else:
            tokens = argmax(work, rows, blocks)
            some = plan.sampled
            tokens[some] = self._draw(plan, work, blocks[some], row_max[some], positions[some])
        if masks is not None or (plan.edits is not None and plan.edits.masks):
            self._fall_back(plan.edits, masks, tokens, row_max == -torch.inf, raw)
        tokens.masked_fill_(nonfinite, 0)

        if plan.scored is None:
            return SampledTokens(tokens, nonfinite)
        return self._score(plan, raw, raw_blocks, raw_max, tokens, nonfinite)

    def _sample_apart(
        self,
        plan: _Plan,
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        history: Tensor,
        host_slots: Sequence[int] | None,
        *,
        masks: RowMasks | None,
    ) -> SampledTokens:
        given = slots.tolist() if host_slots is None else host_slots
        result = [
            self.sample(
                logits[row : row + 1].clone(),
                slots[row : row + 1],
                positions[row : row + 1],
                history,
                host_slots=given[row : row + 1],
                masks=None if masks is None else masks.of_row(row),
            )
            for row in range(len(logits))
        ]
        tokens, nonfinite = (
            torch.cat(parts) for parts in zip(*((one.tokens, one.nonfinite) for one in result), strict=True)
        )
        if plan.scored is None:
            return SampledTokens(tokens, nonfinite)
        missing = torch.full((1,), torch.nan, device=logits.device)
        logprobs = torch.cat([missing if one.logprobs is None else one.logprobs for one in result])
        widest = max(0 if one.top_ids is None else one.top_ids.shape[1] for one in result)
        if not widest:
            return SampledTokens(tokens, nonfinite, logprobs, top_counts=plan.top_counts)
        top_ids = torch.zeros((len(result), widest), dtype=torch.int64, device=logits.device)
        top_logprobs = torch.full(top_ids.shape, torch.nan, device=logits.device)
        for row, one in enumerate(result):
            if one.top_ids is not None and one.top_logprobs is not None:
                top_ids[row, : one.top_ids.shape[1]] = one.top_ids[0]
                top_logprobs[row, : one.top_ids.shape[1]] = one.top_logprobs[0]
        return SampledTokens(tokens, nonfinite, logprobs, top_ids, top_logprobs, plan.top_counts.clamp(max=widest))

    def score_prompt(self, logits: Tensor, targets: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities of known tokens: logits [n, vocab] each predict one of the targets int64 [n].

        Returns the targets' float32 [n], and the k most likely tokens' ids int64 [n, k] and log-probabilities float32
        [n, k], in order. Logits with NaN or +inf yield NaN.
        """
        scores = torch.empty(len(targets), device=logits.device)
        top_ids = torch.zeros((len(targets), min(k, self.vocab_size)), dtype=torch.int64, device=logits.device)
        top_scores = torch.empty(top_ids.shape, device=logits.device)
        step = 1 if self._apart else max(1, _SCORE_CHUNK // self.vocab_size)
        for start in range(0, len(targets), step):
            part = slice(start, start + step)
            chunk = logits[part].to(torch.float32, copy=self._apart)
            rows = torch.arange(len(chunk), device=logits.device)
            blocks = block_maxima(chunk)
            normalizer = log_normalizer(chunk, rows, blocks.amax(-1))
            scores[part] = chunk[rows, targets[part]] - normalizer
            if k > 0:
                values, top_ids[part] = top(chunk, rows, blocks, k)
                top_scores[part] = values - normalizer[:, None]
        return scores, top_ids, top_scores

    def _plan(self, slots: tuple[int, ...]) -> _Plan:
        plan = self._plans.get(slots)
        if plan is None:
            if len(self._plans) >= self._max_plans:
                self._plans.clear()
            plan = self._plans[slots] = _Plan(self._slots, slots, self._put, self.device.type == "cpu")
        return plan

    @staticmethod
    def _apply_penalties(
        plan: _Plan, logits: Tensor, slots: Tensor, positions: Tensor, history: Tensor, longest: int | None
    ) -> None:
        some = plan.penalized
        assert some is not None
        lengths = positions[some]
        width = min(history.shape[1], max(1, int(lengths.max()) if longest is None else longest))
        factors = (plan.repetition, plan.frequency, plan.presence)
        apply_penalties(logits, some, history[slots[some], :width], lengths, plan.prompt_length, *factors, plan.counted)

    def _draw(self, plan: _Plan, logits: Tensor, blocks: Tensor, row_max: Tensor, positions: Tensor) -> Tensor:
        """Sample the plan's sampled rows; blocks, row_max and positions are of those rows only."""
        rows = plan.sampled
        assert rows is not None
        vocab = logits.shape[1]
        floor, floor_id = torch.full_like(row_max, -torch.inf), torch.full_like(rows, vocab)
        some = plan.cut
        if some is not None:
            wanted = (row_max[some], plan.temperature[some], plan.top_k, plan.top_p, plan.largest_k)
            if self._own_top_k_top_p is not None and plan.plain_k:
                floor[some], floor_id[some] = self._own_top_k_top_p(logits, rows[some], *wanted)
            else:
                floor[some], floor_id[some] = cut(logits, rows[some], blocks[some], *wanted)
        if plan.log_min_p is not None:
            min_logit = row_max + plan.temperature * plan.log_min_p
            floor_id = torch.where(min_logit > floor, vocab, floor_id)
            floor = torch.maximum(min_logit, floor)
        keys = keys_at(plan.keys, positions)
        if logits.device.type != "cpu":
            return gumbel_argmax_over_all(logits, rows, row_max, keys, plan.temperature, floor, floor_id)
        if rows.numel() * vocab <= _FEW_LOGITS:
            tokens = gumbel_argmax_over_all(logits, rows, row_max, keys, plan.temperature, floor, floor_id)
        else:
            tokens = gumbel_argmax(logits, rows, blocks, row_max, keys, plan.temperature, floor, floor_id)
        some = plan.judged
        while some is not None and len(some):
            winners = tokens[some].clamp_(max=vocab - 1)
            top_p = plan.judged_p[some]
            behind = outside(logits, rows[some], blocks[some], row_max[some], plan.temperature[some], top_p, winners)
            some, winners = some[behind], winners[behind]
            if len(some):
                # The winner lies outside the nucleus: search again among the tokens before it.
                floor[some], floor_id[some] = logits[rows[some], winners], winners - 1
                narrowed = (rows[some], blocks[some], row_max[some], keys[some], plan.temperature[some])
                tokens[some] = gumbel_argmax(logits, *narrowed, floor[some], floor_id[some])
        return tokens

    def _fall_back(
        self, edits: BatchEdits | None, masks: RowMasks | None, tokens: Tensor, exhausted: Tensor, raw: Tensor
    ) -> None:
        if raw.device.type != "cpu" or bool(exhausted.any()):  # reading it on an accelerator would synchronize
            spare = raw.clamp(
                min=torch.finfo(torch.float32).min
            )  # prefer an allowed token with -inf to a forbidden one
            if masks is not None:  # a grammar wins over a request's lists
                raw = spare.clone()
            if edits is not None:
                edits.allow(spare)
            if masks is not None:
                masks.restore(spare, raw)
                masks.apply(spare, self._own_mask)
            torch.where(exhausted, spare.argmax(-1), tokens, out=tokens)

    @staticmethod
    def _score(
        plan: _Plan, raw: Tensor, blocks: Tensor, row_max: Tensor, tokens: Tensor, nonfinite: Tensor
    ) -> SampledTokens:
        some = plan.scored
        assert some is not None
        normalizer = log_normalizer(raw, some, row_max[some])
        logprobs = torch.full_like(row_max, torch.nan)
        logprobs[some] = raw[some, tokens[some]] - normalizer
        if plan.max_logprobs == 0:
            return SampledTokens(tokens, nonfinite, logprobs, top_counts=plan.top_counts)
        values, ids = top(raw, some, blocks[some], plan.max_logprobs)
        top_ids = torch.zeros((len(raw), ids.shape[1]), dtype=torch.int64, device=raw.device)
        top_logprobs = torch.full(top_ids.shape, torch.nan, device=raw.device)
        top_ids[some], top_logprobs[some] = ids, values - normalizer[:, None]
        return SampledTokens(
            tokens, nonfinite, logprobs, top_ids, top_logprobs, plan.top_counts.clamp(max=ids.shape[1])
        )
