"""What each draft learns: to give the target's distribution at every token that the assistant writes."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.understudy.drafts.decoder import Decoder
from tests.understudy.drafts.dflash import DFlash
from tests.understudy.drafts.heads import Eagle, Eagle3, Mtp, project, unroll
from tests.understudy.drafts.texts import Batch

__all__ = ["STEPS", "Draft", "Lesson", "loss_of", "prepare"]

Draft = Eagle | Eagle3 | Mtp | DFlash | Decoder

STEPS = 5
"""How often a head that drafts a token at a time is unrolled."""

_FADE = 0.85  # the weight of a step, to that of the step before
_BLOCK_FADE = 0.85  # the same for the places of a block
_TOKENS_A_BLOCK = 16  # a block of DFlash for so many tokens of a row
_SHORTER = (1, 1, 1, 2, 4)  # what divides the draft's own block in a batch: users may ask for shorter ones


@dataclass(frozen=True, slots=True)
class Lesson:
    """A batch with what the target says of it.

    `rows`: flat indices j [n] at which the target predicts a learned token, `wanted` [n, vocabulary] its distribution
    there, float32; `row_of` [batch * length]: the place in `rows` of a flat index, -1 where there is none.
    """

    batch: Batch
    target: Decoder
    sums: list[Tensor]
    normed: Tensor
    rows: Tensor
    wanted: Tensor
    row_of: Tensor


def prepare(target: Decoder, batch: Batch) -> Lesson:
    """Run the target over a batch. The first tokens of a row are no drafts' business: heads unroll over them."""
    with torch.no_grad():
        sums, normed = target(batch.ids)
        predicts = torch.roll(batch.learned, -1, dims=1)
        predicts[:, -1] = False
        predicts[:, : STEPS + 1] = False
        rows = predicts.flatten().nonzero().flatten()
        wanted = target.logits(normed.flatten(0, 1)[rows]).float().softmax(-1)
        row_of = torch.full_like(predicts.flatten(), -1, dtype=torch.int64)
        row_of[rows] = torch.arange(len(rows), device=rows.device)
    return Lesson(batch, target, sums, normed, rows, wanted, row_of)


def _head_loss(head: Eagle | Eagle3 | Mtp, lesson: Lesson) -> Tensor:
    following = lesson.target.embed(torch.roll(lesson.batch.ids, -1, dims=1))
    wanted = lesson.wanted[:, head.vocabulary] if isinstance(head, Eagle3) else lesson.wanted
    total, weight = torch.zeros((), device=following.device), 1.0
    for read in unroll(head, lesson.sums, lesson.normed, following, STEPS):
        # Index i predicts token i + 2, as the target does at i + 1.
        chosen = read.flatten(0, 1)[lesson.rows - 1]
        logits = project(head, chosen, lesson.target.embedding)
        total = total + weight * F.cross_entropy(logits.float(), wanted)
        if isinstance(head, Eagle):
            true = lesson.normed.flatten(0, 1)[lesson.rows]
            total = total + weight * F.smooth_l1_loss(chosen.float(), true.float())
        weight *= _FADE
    return total


def _block_loss(draft: DFlash, lesson: Lesson) -> Tensor:
    ids = lesson.batch.ids
    rows, length = ids.shape
    block = draft.block // _SHORTER[int(torch.randint(len(_SHORTER), ()))]
    places = lesson.row_of.view(rows, length)
    likely = (places >= 0).float() + 1e-6 * (torch.arange(length, device=ids.device) >= STEPS)
    starts = torch.multinomial(likely, max(1, length // _TOKENS_A_BLOCK), replacement=True)
    known = lesson.target.embed(ids.gather(1, starts))
    masked = lesson.target.embed(torch.tensor(draft.mask_token, device=ids.device))
    read = draft(lesson.sums, known, masked, starts, block)[:, :, 1:]
    # Place j predicts the token at start + j, as the target does at start + j - 1.
    before = starts[..., None] + torch.arange(block - 1, device=ids.device)
    at = places.gather(1, before.flatten(1).clamp(max=length - 1)).view_as(before)
    at = torch.where(before < length, at, -1)
    used = at >= 0
    used = used.cumprod(-1).bool()  # a block ends with the turn
    weights = (_BLOCK_FADE ** torch.arange(block - 1, device=ids.device)).expand_as(at)[used]
    logits = lesson.target.logits(read[used]).float()
    losses = F.cross_entropy(logits, lesson.wanted[at[used]], reduction="none")
    return (losses * weights).sum() / weights.sum()


def _model_loss(model: Decoder, lesson: Lesson) -> Tensor:
    _, normed = model(lesson.batch.ids)
    return F.cross_entropy(model.logits(normed.flatten(0, 1)[lesson.rows]).float(), lesson.wanted)


def loss_of(draft: Draft) -> Callable[[Lesson], Tensor]:
    """The loss of a draft over a lesson: a scalar."""
    if isinstance(draft, DFlash):
        return lambda lesson: _block_loss(draft, lesson)
    if isinstance(draft, Decoder):
        return lambda lesson: _model_loss(draft, lesson)
    return lambda lesson: _head_loss(draft, lesson)
