"""Keys and values that change places, all layers at once, against an index put for each."""

from __future__ import annotations

import torch

from kernels.devices.cuda.attention.moving import move_caches


def test_rows_move_their_tokens(device):
    generator = torch.Generator().manual_seed(5)
    caches = [torch.randn(6, 2, 3, 16, 24, generator=generator).to(device) for _ in range(2)]
    # The first row moves onto its own sources; the second stays where it is, but for its last.
    source = torch.tensor([17, 19, 22, 23, 40, 41, 60], device=device)[[0, 1, 2, 4, 5, 6]]
    target = torch.tensor([17, 18, 19, 40, 41, 42], device=device)
    expected = []
    for cache in caches:
        flat = cache.clone().transpose(2, 3).transpose(1, 2).reshape(6 * 16, -1)
        flat[target] = flat[source].clone()
        expected.append(flat.view(6, 16, 2, 3, 24).permute(0, 2, 3, 1, 4))
    move_caches(caches, source, target, 3, lambda array: torch.from_numpy(array).to(device))
    for cache, copy in zip(caches, expected, strict=True):
        assert torch.equal(cache, copy)
