"""The texts that drafts learn from: conversations of the corpus, and the target's own answers to its prompts."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from app.understudy import MODEL_DIR
from tests.understudy.drafts.decoder import Decoder, generate
from tests.understudy.packing import LEARN, Stream, encode_corpus, split_by_length

__all__ = ["Batch", "Texts", "frequencies", "load_texts", "write_texts"]

_LONGEST = 2048  # tokens of a document
_PROMPT, _ANSWER = 352, 160  # tokens of those that the target answers
_HEAT = (0.0, 0.0, 0.6, 1.0)  # half of the answers are greedy
_STEP = 32  # batches have lengths that are multiples of this


@dataclass(frozen=True, slots=True)
class Batch:
    """`ids` int64 [batch, length], padded at the end; `learned` bool, true where the assistant wrote the token."""

    ids: Tensor
    learned: Tensor


def _prompts(stream: Stream, rng: np.random.Generator) -> list[Any]:
    """The part of each document before one of the assistant's turns, uint16 with the LEARN bit."""
    prompts = []
    for first, last in zip(stream.bounds[:-1], stream.bounds[1:], strict=True):
        tokens = stream.tokens[first:last]
        learned = (tokens & LEARN) != 0
        starts = np.flatnonzero(learned & ~np.concatenate(([False], learned[:-1])))
        starts = np.maximum(starts[starts <= _PROMPT], 6)  # plain text is continued after a few words
        if len(starts):
            prompts.append(tokens[: rng.choice(starts)])
    return prompts


def write_texts(file: Path, target: Decoder, documents: int, seed: int, cores: int, batch: int) -> None:
    """Write `documents` of the corpus, every other one with an answer of the target's in place of what follows.

    The seeds are others than those of the target's training. An .npz file: `tokens` uint16 with the LEARN bit, and
    `bounds` int64.
    """
    tokens, lengths = encode_corpus(MODEL_DIR / "tokenizer.json", seed, documents, cores, _LONGEST)
    lengths = lengths[:documents]  # a shard holds more
    tokens = tokens[: lengths.sum()]
    half = len(lengths) // 2
    asked, _ = split_by_length(tokens[: lengths[:half].sum()], lengths[:half], _PROMPT + _ANSWER)
    pieces = [tokens[lengths[:half].sum() :]]
    sizes = lengths[half:].tolist()
    rng = np.random.default_rng(seed)
    prompts = _prompts(asked, rng)
    rng.shuffle(prompts)
    order = sorted(range(len(prompts)), key=lambda at: len(prompts[at]))
    ends = (0, 2)
    torch.manual_seed(seed)
    for start in range(0, len(order), batch):
        chosen = [prompts[at] for at in order[start : start + batch]]
        heats = rng.choice(_HEAT, len(chosen)).tolist()
        answers = generate(target, [(prompt & (LEARN - 1)).tolist() for prompt in chosen], heats, _ANSWER, ends)
        for prompt, answer in zip(chosen, answers, strict=True):
            pieces += [prompt, np.array(answer, dtype=np.uint16) | LEARN]
            sizes.append(len(prompt) + len(answer))
    np.savez(file, tokens=np.concatenate(pieces), bounds=np.concatenate(([0], np.cumsum(sizes))))


@dataclass(frozen=True, slots=True)
class Texts:
    """Documents on the device, in groups of about one length."""

    tokens: Tensor
    starts: Tensor
    lengths: Any

    def batches(self, size: int, seed: int) -> Iterator[Batch]:
        """Batches of at most `size` tokens, without end, another order each time around."""
        rng = np.random.default_rng(seed)
        steps = -(-self.lengths // _STEP)
        while True:
            plan = []
            for step in np.unique(steps):
                group = rng.permutation(np.flatnonzero(steps == step))
                rows = max(1, size // (int(step) * _STEP))
                plan += [(int(step) * _STEP, group[at : at + rows]) for at in range(0, len(group), rows)]
            for index in rng.permutation(len(plan)):
                yield self._batch(*plan[index])

    def _batch(self, length: int, rows: Any) -> Batch:
        device = self.tokens.device
        places = torch.arange(length, device=device)
        starts = self.starts[torch.from_numpy(rows).to(device)]
        long = torch.from_numpy(self.lengths[rows]).to(device)
        inside = places < long[:, None]
        packed = self.tokens[(starts[:, None] + places).clamp(max=len(self.tokens) - 1)].long()
        return Batch(torch.where(inside, packed & (LEARN - 1), 0), inside & ((packed & LEARN) != 0))


def load_texts(file: Path, device: str) -> Texts:
    """Read a file of write_texts."""
    with np.load(file) as arrays:
        tokens, bounds = arrays["tokens"], arrays["bounds"]
    packed = torch.from_numpy(tokens.astype(np.int32)).to(device)
    return Texts(packed, torch.from_numpy(bounds[:-1]).to(device), np.diff(bounds))


def frequencies(file: Path, vocabulary: int) -> Any:
    """How often the assistant writes each token, int64 [vocabulary]."""
    with np.load(file) as arrays:
        tokens = arrays["tokens"]
    return np.bincount(tokens[(tokens & LEARN) != 0] & (LEARN - 1), minlength=vocabulary)
