"""What a decoder hands out of its layers, for drafts to be made from."""

from __future__ import annotations

import pytest
import torch

from kernels.contract.errors import ConfigError
from tests.kits.speculation.captures import decoder
from tests.kits.speculation.paged import Paged


def test_layers_are_handed_out_in_the_order_requested(reference, prompts):
    model = reference("qwen3")
    (prompt,) = prompts(30)
    expected = model.model(torch.tensor([prompt]), output_hidden_states=True).hidden_states
    paged = Paged()
    config, target = decoder(model.path, paged, (2, 0))
    caches = paged.caches(config)
    first = target.split(target.forward(paged.batch([(1, 0, 20)], prompt[:20]), caches))
    others = [
        target.split(target.forward(paged.batch([(1, at, 1)], prompt[at : at + 1]), caches)) for at in range(20, 30)
    ]
    hidden, features = (torch.cat(parts) for parts in zip(first, *others, strict=True))
    torch.testing.assert_close(hidden, expected[3][0], atol=1e-4, rtol=1e-4)
    last, early = features.split(config.hidden_size, dim=1)
    torch.testing.assert_close(early, expected[1][0], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(last, hidden)
    torch.testing.assert_close(target.norm(last.contiguous()), hidden, atol=1e-4, rtol=1e-4)


def test_without_captures_drafts_are_made_from_the_last_hidden_state(reference, prompts):
    paged = Paged()
    config, target = decoder(reference("qwen3").path, paged, ())
    caches = paged.caches(config)
    hidden = target.forward(paged.batch([(0, 0, 9)], *prompts(9)), caches)
    assert hidden.shape == (9, config.hidden_size)
    assert all(torch.equal(part, hidden) for part in target.split(hidden))


def test_where_nothing_is_made_from_layers_they_are_not_brought_together(reference, prompts):
    paged = Paged()
    config, target = decoder(reference("qwen3").path, paged, (2, 0))
    (prompt,) = prompts(9)
    caches = paged.caches(config)
    plain, wide = (target.forward(paged.batch([(0, 0, 9)], prompt), caches, capture) for capture in (False, True))
    assert plain.shape == (9, config.hidden_size)
    assert wide.shape == (9, 3 * config.hidden_size)
    assert torch.equal(target.split(wide)[0], plain)


@pytest.mark.parametrize("captures", [(3,), (-1,), (1, 1)])
def test_layers_that_are_not_there_are_refused(captures, reference):
    with pytest.raises(ConfigError, match=r"must be different ones of this model's 0 to 2"):
        decoder(reference("qwen3").path, Paged(), captures)
