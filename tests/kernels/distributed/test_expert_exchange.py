"""Ranks of data-parallel attention send rows to the experts that they take."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.contract.errors import ConfigError
from kernels.contract.expert_placement import dispatch_table
from kernels.contract.expert_settings import ExchangeMode, ExchangeSettings
from kernels.devices.experts import Dispatch, ExpertsInTurn, Routing
from kernels.distributed.expert_exchange import ExpertExchange
from kernels.distributed.group import Group
from kernels.distributed.turns import PassValue
from tests.kernels.distributed.ranks import run_ranks
from tests.kits.waiting import PATIENCE

NAMES = ["placed-moe", "placed-shared", "parallel-deepseek-v3", "parallel-deepseek-v4"]
COPIES = {"experts": {"redundant": 4, "dispatch": "static"}}
EVEN = {"experts": {"redundant": 2, "dispatch": "dynamic"}}


def job(model: Any, parts: list[Any], mode: str, overlap: bool = False, **options: Any) -> dict[str, Any]:
    options = {"dp_size": 2, "ep_size": 2, "exchange": {"mode": mode, "overlap": overlap}} | options
    return {"model": str(model.path), "parts": parts, "length": 36, "options": options}


def test_rows_that_travel_generate_what_one_device_does(reference, prompts):
    """In chunks, one part with more tokens than the other or with none; shared experts run beside and after."""
    models, texts = [reference(name) for name in NAMES], prompts(5, 23, 9)
    parts = [[texts[0]], texts[1:]], [[], texts]
    jobs = [
        job(models[0], parts[1], "low_latency", **EVEN),
        job(models[0], parts[0], "normal", **COPIES),
        job(models[1], parts[0], "auto", overlap=True),
        job(models[2], parts[1], "normal", overlap=True),
        job(models[2], parts[0], "low_latency"),
        job(models[3], parts[1], "normal"),
    ]
    found = run_ranks(jobs)
    for rank, answers in enumerate(found):
        for one, answer in zip(jobs, answers, strict=True):
            model = next(each for each in models if str(each.path) == one["model"])
            assert answer["tokens"] == [model.greedy(text, 36) for text in one["parts"][rank]], (rank, one["options"])


class Threads:
    """What ranks that are threads give each other."""

    def __init__(self, size: int) -> None:
        self.barrier, self.given = threading.Barrier(size, timeout=PATIENCE), dict[int, list[Tensor]]()


class ThreadGroup(Group):
    def __init__(self, rank: int, size: int, threads: Threads) -> None:
        self.rank, self.size, self.threads = rank, size, threads
        self.sent = 0  # rows to other ranks

    def _trade(self, pieces: list[Tensor]) -> Tensor:
        self.threads.given[self.rank] = [piece.clone() for piece in pieces]
        self.sent += sum(len(piece) for rank, piece in enumerate(pieces) if rank != self.rank)
        self.threads.barrier.wait()
        result = torch.cat([self.threads.given[rank][self.rank] for rank in range(self.size)])
        self.threads.barrier.wait()
        return result

    def begin_gather_rows(self, x: Tensor) -> Callable[[], Tensor]:
        return lambda: self._trade([x] * self.size)

    def begin_all_to_all(
        self, x: Tensor, outgoing: Sequence[int] | None = None, incoming: Sequence[int] | None = None
    ) -> Callable[[], Tensor]:
        return lambda: self._trade(list(x.split(len(x) // self.size if outgoing is None else list(outgoing))))


def experts_of(places: Sequence[int], logits: Tensor, routing: Routing) -> ExpertsInTurn:
    """A layer whose expert n multiplies by n + 1; the first columns of ``x`` choose."""

    def expert(number: int) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
        return lambda x: x * (number + 1), lambda x: x

    return ExpertsInTurn(lambda x: x @ logits, [expert(number) for number in places], routing)


@pytest.mark.parametrize(("mode", "listed"), [("normal", False), ("low_latency", False), ("normal", True)])
def test_each_row_reaches_its_experts_and_comes_back(mode: ExchangeMode, listed: bool):
    """Two parts of two ranks, which divide their rows; one brings fewer rows than it may, or none. ``listed``: a table
    has the experts of each row."""
    size, parts, chosen, hidden = 4, 2, 2, 6
    torch.manual_seed(1)
    router = torch.randn(hidden, 7)
    placement = torch.tensor([3, 0, 1, 2, 6, 5, 4, 0]).numpy()
    table = torch.from_numpy(dispatch_table(placement, 7, size, "static"))
    ids = PassValue()
    chosen_of = torch.stack([torch.randperm(7)[:chosen] for _ in range(5)])

    def look_up() -> Tensor:
        assert ids.value is not None
        return chosen_of[ids.value]

    fixed = look_up if listed else None
    whole = experts_of(range(7), router, Routing(chosen, True, fixed=fixed))
    for tokens, rows in (((5, 3), (5, 3)), ((4, 3), (4, 1)), ((1, 0), (1, 0))):
        x = [torch.randn(count, hidden) for count in rows]
        threads, groups, beside = Threads(size), dict[int, ThreadGroup](), list[int]()

        def run(
            rank: int,
            tokens: tuple[int, int] = tokens,
            x: Sequence[Tensor] = x,
            threads: Threads = threads,
            groups: dict[int, ThreadGroup] = groups,
            beside: list[int] = beside,
        ) -> Tensor:
            here = range(2 * rank, 2 * rank + 2)
            routing = Routing(
                chosen, True, local=here, dispatch=Dispatch(table, 8, source=rank), parts=size, fixed=fixed
            )
            layer = experts_of(placement[here.start : here.stop].tolist(), router, routing)
            groups[rank] = ThreadGroup(rank, size, threads)
            exchange = ExpertExchange(groups[rank], parts, ExchangeSettings(mode))
            own = x[rank // 2]
            ids.value = torch.arange(len(own))
            return exchange.run(own, tokens, layer, routing, lambda: beside.append(rank), ids=ids if listed else None)

        with ThreadPoolExecutor(size) as pool:
            found = list(pool.map(run, range(size)))
        for part in range(parts):
            if len(x[part]):
                summed = found[2 * part] + found[2 * part + 1]
                ids.value = torch.arange(len(x[part]))
                torch.testing.assert_close(summed, whole(x[part]))
                each = -(-tokens[part] // 2)
                assert not found[2 * part][each:].any()
        assert sorted(beside) == [0, 1, 2, 3]
        if mode == "normal":  # counts, rows that have an expert on another rank, and their results
            assert sum(group.sent for group in groups.values()) <= 12 + 2 * chosen * sum(rows)


def test_rows_that_cannot_travel_are_refused(reference, drive):
    for options in ({"tp_size": 2, "ep_size": 2}, {"tp_size": 2, "dp_size": 2}):
        with pytest.raises(ConfigError, match="deepep needs --enable-dp-attention and --enable-expert-parallel"):
            drive(reference(NAMES[0]).path, rendezvous="127.0.0.1:1", exchange=ExchangeSettings(), **options)
    options = {"tp_size": 2, "ep_size": 2, "dp_size": 2, "exchange": ExchangeSettings(overlap=True)}
    for name, says in (
        (NAMES[0], "no shared expert"),
        ("parallel-qwen3", "no experts to divide: leave --moe-a2a-backend out"),
        ("parallel-moe", "cannot be divided over 2 devices, as --moe-a2a-backend does"),
    ):
        with pytest.raises(ConfigError, match=says):
            drive(reference(name).path, rendezvous="127.0.0.1:1", **options)
