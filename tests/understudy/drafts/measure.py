"""How many of a draft's tokens the target accepts, measured in plain torch with greedy decoding.

What the target writes is the same with and without drafts, so its answers are written once, and every draft is asked at
every place of them. A chain is accepted up to its first wrong token, and after a right beginning its tokens are those
of the answer: asking with the answer's tokens gives the same draft tokens as drafting token by token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from app.understudy import MODEL_DIR
from tests.understudy.drafts.decoder import Decoder, generate
from tests.understudy.drafts.dflash import DFlash
from tests.understudy.drafts.heads import Eagle3, Mtp, project, unroll
from tests.understudy.drafts.students import Draft
from tests.understudy.examination import questions

__all__ = ["Acceptance", "Dialogue", "held_out", "measure"]


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A prompt and the target's greedy answer, as token ids."""

    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Tokens a cycle (the target's own included) of chains, and of combs: the chain with the best few at each depth.

    `rates[k]`: the share of cycles that accept at least k + 1 tokens of the chain.
    """

    chain: float
    comb: float
    rates: tuple[float, ...]


def held_out(target: Decoder, count: int = 0, limit: int = 160, batch: int = 64) -> list[Dialogue]:
    """The examination's questions (`count` of them, evenly spread; 0: all) with the target's greedy answers."""
    from transformers import AutoTokenizer

    asked = questions()
    asked = asked[:: max(1, len(asked) // count)][:count] if count else asked
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    prompts = sorted(
        (
            tokenizer.encode(
                tokenizer.apply_chat_template(
                    question.messages,
                    tools=question.tools or None,
                    add_generation_prompt=True,
                    tokenize=False,
                    enable_thinking=question.thinking,
                ),
                add_special_tokens=False,
            )
            for question in asked
        ),
        key=len,
    )
    dialogues = []
    for start in range(0, len(prompts), batch):
        chosen = prompts[start : start + batch]
        answers = generate(target, chosen, [0.0] * len(chosen), limit, (0, 2))
        dialogues += [Dialogue(prompt, answer) for prompt, answer in zip(chosen, answers, strict=True)]
    return dialogues


def _best(read: Tensor, draft: Draft, target: Decoder, few: int) -> Tensor:
    """The ids of the best `few` tokens, [..., few], from what the output layer reads."""
    if isinstance(draft, Decoder):
        return draft.logits(read).topk(few).indices
    if isinstance(draft, DFlash):
        return target.logits(read.to(target.dtype)).topk(few).indices
    best = project(draft, read.to(target.dtype), target.embedding).topk(few).indices
    return draft.vocabulary[best] if isinstance(draft, Eagle3) else best


def _draft_tokens(draft: Draft, target: Decoder, ids: Tensor, roots: Tensor, depth: int, few: int) -> Tensor:
    """Draft tokens after each root, int64 [batch, roots, depth, few].

    `roots` [batch, roots]: positions of the last known token; the target has computed what stands before it.
    """
    sums, normed = target(ids)
    if isinstance(draft, DFlash):
        known, masked = target.embed(ids.gather(1, roots)), target.embed(torch.tensor(draft.mask_token).to(ids.device))
        return _best(draft(sums, known, masked, roots)[:, :, 1 : depth + 1], draft, target, few)
    if isinstance(draft, Decoder):
        hidden = draft(ids)[1]
        reads = [(hidden, step) for step in range(depth)]
    else:
        following = target.embed(torch.roll(ids, -1, dims=1))
        reads = [(read, step - 1) for step, read in enumerate(unroll(draft, sums, normed, following, depth))]
    tokens = []
    for read, offset in reads:
        at = (roots + offset).clamp(0, ids.shape[1] - 1)
        chosen = read.gather(1, at[..., None].expand(-1, -1, read.shape[-1]))
        tokens.append(_best(chosen, draft, target, few))
    return torch.stack(tokens, dim=2)


def _cycles(hits: Any, best: Any, comb: bool) -> list[int]:
    """Accepted drafts of each cycle over one answer; bool [answer, depth]: `hits` among the few, `best` the first."""
    accepted, at, size = [], 0, len(best)
    while at < size:
        right = int(best[at].cumprod().sum())
        if comb and right < best.shape[1] and hits[at, right]:
            right += 1
        accepted.append(right)
        at += right + 1
    return accepted


@torch.inference_mode()
def measure(
    draft: Draft, target: Decoder, dialogues: Sequence[Dialogue], depth: int, few: int = 3, batch: int = 16
) -> Acceptance:
    """Acceptance of chains of `depth` drafts over the answers; a DFlash draft proposes no more than its block
    holds, and each of several layers proposes once."""
    device = target.embedding.device
    if isinstance(draft, DFlash):
        depth = min(depth, draft.block - 1)
    elif isinstance(draft, Mtp) and len(draft.layers) > 1:
        depth = min(depth, len(draft.layers))
    chains: list[int] = []
    combs: list[int] = []
    tokens = 0
    for start in range(0, len(dialogues), batch):
        group = dialogues[start : start + batch]
        longest = max(len(one.prompt) + len(one.answer) for one in group)
        length = -(-longest // 8) * 8
        rows = [one.prompt + one.answer + [0] * (length - len(one.prompt) - len(one.answer)) for one in group]
        ids = torch.tensor(rows, device=device)
        most = max(len(one.answer) for one in group)
        first = torch.tensor([len(one.prompt) for one in group], device=device)
        roots = (first[:, None] + torch.arange(most, device=device)).clamp(max=length - 1)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            proposed = _draft_tokens(draft, target, ids, roots, depth, few).cpu().numpy()
        for one, candidates in zip(group, proposed, strict=True):
            size = len(one.answer) - 1  # the first token comes from the prompt's pass
            true = np.full((size, depth), -1)
            for ahead in range(depth):
                true[: max(0, size - ahead), ahead] = one.answer[1 + ahead :]
            right = candidates[:size] == true[..., None]
            chains += _cycles(right.any(-1), right[..., 0], comb=False)
            combs += _cycles(right.any(-1), right[..., 0], comb=True)
            tokens += size
    rates = tuple(sum(one > place for one in chains) / len(chains) for place in range(depth))
    return Acceptance(tokens / len(chains), tokens / len(combs), rates)
