"""How many tokens the operators of an exchange take."""

from __future__ import annotations

import pytest

from kernels.devices.npu.expert_exchange import exchange_limit


@pytest.mark.parametrize(
    ("generation", "width", "local", "chosen", "ranks", "limit"),
    [
        ("A2", 7168, 32, 8, 8, 112),  # (200 / 2 - 2) MiB by 8 ranks, 8 experts and 14336 bytes
        ("A2", 64, 4, 2, 2, 256),
        ("A2", 7168, 32, 8, 16, 0),
        ("A2", 100, 4, 2, 2, 0),
        ("A3", 7168, 4, 8, 64, 26),  # 100 MiB by 256 rows of 14848 bytes and 8 of 14336
        ("A3", 64, 4, 2, 2, 0),
        ("A3", 2048, 64, 17, 2, 0),
        ("A3", 2048, 1024, 8, 2, 0),
        ("A5", 7168, 4, 8, 8, 0),
    ],
)
def test_tokens_within_the_documented_limits(generation, width, local, chosen, ranks, limit, monkeypatch):
    monkeypatch.delenv("HCCL_BUFFSIZE", raising=False)
    assert exchange_limit(generation, width, local, chosen, ranks) == limit


def test_a_larger_buffer_takes_more_tokens(monkeypatch):
    monkeypatch.setenv("HCCL_BUFFSIZE", "400")
    assert exchange_limit("A2", 7168, 32, 8, 8) == 226
