"""Cache specs: what they weigh, and that they cross a process boundary as what they are."""

from __future__ import annotations

import msgspec
import pytest

from kernels.contract.caches import CacheGroup, Latent, Paged, State, Window, is_plain

PAGED = Paged(kv_heads=2, k_dim=8, v_dim=4)


def test_specs_know_their_bytes() -> None:
    assert PAGED.token_bytes(2) == 2 * (8 + 4) * 2
    assert PAGED.token_bytes(1, scale_bytes=4) == 2 * (8 + 4) + 2 * 2 * 4
    assert Window(PAGED, 32).token_bytes(2) == PAGED.token_bytes(2)
    assert Latent(dim=16, rope_dim=4).token_bytes(2) == 40
    assert Latent(dim=16, rope_dim=4).token_bytes(1, scale_bytes=4) == 28
    assert Latent(dim=16, rope_dim=4, index_dim=8).token_bytes(1, scale_bytes=4) == 40
    assert State(((2, 3), (5,)), "bfloat16").sequence_bytes() == 2 * 11


def test_state_of_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="int3"):
        State(((2,),), "int3").sequence_bytes()


@pytest.mark.parametrize("spec", [PAGED, Latent(16, 4), Window(PAGED, 32), State(((2, 3), (5,)))])
def test_groups_survive_msgpack(spec: Paged | Latent | Window | State) -> None:
    group = CacheGroup(spec, (0, 2))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(group), type=CacheGroup) == group


def test_a_model_is_plain_while_all_layers_are_paged() -> None:
    assert is_plain([CacheGroup(PAGED, (0,)), CacheGroup(Paged(1, 8, 8), (1,))])
    assert not is_plain([CacheGroup(PAGED, (0,)), CacheGroup(Latent(16, 4), (1,))])
    assert not is_plain([CacheGroup(Window(PAGED, 32), (0,))])
