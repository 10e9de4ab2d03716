"""Chains of multi-token heads."""

from __future__ import annotations

import torch

__all__ = [
    "chained",
]


def chained(made, plain, prefixes, row, steps):
    """Run head k over all positions, with the token k + 1 positions later, or a draft token if it is unknown."""
    seen = made.seen[row]
    states, known, path = made.features[row, :seen], made.tokens[row, : seen + 1], []
    for number, prefix in enumerate(prefixes[:steps]):
        read = torch.cat((known, torch.tensor(path, dtype=torch.int64)))[number + 1 :]
        states = plain.run(read, states, prefix)
        path.append(int(plain.head(states[-1:]).argmax()))
    return path
