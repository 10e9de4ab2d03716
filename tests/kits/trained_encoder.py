"""A tiny BERT that is trained to put sentences of one subject near each other, in a few seconds and from a fixed seed.

A subject has two sets of words that never stand in one sentence: only training makes them related.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer

from tests.kits.tiny_encoder import make_tiny_encoder

__all__ = ["SUBJECTS", "make_trained_encoder", "sentence"]

SUBJECTS = {
    "kitchen": ("soup bread butter salt", "chef oven recipe spoon"),
    "sea": ("ship sailor anchor harbour", "wave tide reef fish"),
    "music": ("violin drum piano flute", "melody rhythm chord song"),
    "money": ("bank loan coin credit", "price market trade profit"),
    "garden": ("rose tulip seed soil", "rake shovel hedge lawn"),
    "space": ("rocket comet planet moon", "orbit telescope star galaxy"),
}
_FRAMES = ("the {} and the {}", "a {} with a {}", "one {} or one {}", "the {} is like a {}")
_STEPS, _RATE, _SEED = 200, 3e-3, 5


def sentence(subject: str, half: int, choose: random.Random) -> str:
    """A sentence with two words of a ``half`` of a subject's words."""
    return choose.choice(_FRAMES).format(*choose.sample(SUBJECTS[subject][half].split(), 2))


def make_trained_encoder(directory: Path) -> None:
    """Write the model into ``directory``, as sentence-transformers saves one of mean pooling."""
    words = [text for halves in SUBJECTS.values() for text in halves]
    model = make_tiny_encoder(directory, words=[*words, *_FRAMES], deviation=0.05)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.enable_padding()
    choose = random.Random(_SEED)
    torch.manual_seed(_SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, _STEPS)
    targets, threads = torch.arange(len(SUBJECTS)), torch.get_num_threads()
    torch.set_num_threads(1)  # more of them only wait for each other
    for _ in range(_STEPS):
        first, second = (
            _embedded(model, tokenizer, [sentence(one, half, choose) for one in SUBJECTS]) for half in (0, 1)
        )
        optimizer.zero_grad()
        alike = first @ second.T / 0.1
        (F.cross_entropy(alike, targets) + F.cross_entropy(alike.T, targets)).backward()
        optimizer.step()
        decay.step()
    torch.set_num_threads(threads)
    model.eval().save_pretrained(directory)
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds.items()]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))


def _embedded(model: transformers.PreTrainedModel, tokenizer: Tokenizer, texts: list[str]) -> torch.Tensor:
    encoded = tokenizer.encode_batch(texts)
    ids, mask = (torch.tensor([getattr(one, name) for one in encoded]) for name in ("ids", "attention_mask"))
    hidden = model(ids, attention_mask=mask).last_hidden_state * mask.unsqueeze(-1)
    return F.normalize(hidden.sum(1) / mask.sum(1, keepdim=True), dim=-1)
