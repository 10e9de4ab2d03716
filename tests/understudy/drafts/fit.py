"""The training loop: one pass of the target over a batch teaches every draft."""

import time
from collections.abc import Mapping

import torch

from tests.understudy.drafts.decoder import Decoder
from tests.understudy.drafts.students import Draft, loss_of, prepare
from tests.understudy.drafts.texts import Texts

__all__ = ["fit"]

_WARM, _PLATEAU = 0.02, 0.3  # shares of the time


def _scale(share: float) -> float:
    """The rate's factor after a share of the time: a short way up, a plateau, a linear way down."""
    return min(1.0, (share + 1e-3) / _WARM, (1.0 - share) / (1.0 - _PLATEAU))


def fit(
    drafts: Mapping[str, Draft], target: Decoder, texts: Texts, size: int, rate: float, seconds: float, seed: int
) -> int:
    """Train drafts in place for `seconds` with batches of `size` tokens; the number of steps. Rates go by the clock."""
    device = target.embedding.device.type
    losses = {name: loss_of(draft) for name, draft in drafts.items()}
    optimizers = {}
    for name, draft in drafts.items():
        matrices = [w for w in draft.parameters() if w.dim() == 2]
        vectors = [w for w in draft.parameters() if w.dim() == 1]
        optimizers[name] = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}],
            lr=rate,
            betas=(0.9, 0.95),
            fused=device == "cuda",
        )
    started = reported = time.monotonic()
    steps = 0
    for batch in texts.batches(size, seed):
        now = time.monotonic()
        if now - started >= seconds:
            break
        scale = _scale((now - started) / seconds)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            lesson = prepare(target, batch)
        if not len(lesson.rows):
            continue
        steps += 1
        report = now - reported >= max(1.0, seconds / 20)
        values = []
        for name, draft in drafts.items():
            for group in optimizers[name].param_groups:
                group["lr"] = rate * scale
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                value = losses[name](lesson)
            value.backward()
            torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
            optimizers[name].step()
            optimizers[name].zero_grad(set_to_none=True)
            if report:
                values.append(f"{name} {float(value.detach()):.3f}")
        if report:
            reported = now
            print(f"step {steps}  {now - started:.0f} s  {'  '.join(values)}", flush=True)
    return steps
