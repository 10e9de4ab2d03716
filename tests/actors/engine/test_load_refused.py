"""A worker that refuses to load its model: the first start fails; a later incarnation counts as a death."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from actors.options import Arguments
from actors.protocol import LoadRefused, UnloadAdapter, WorkerLoaded
from actors.protocol.requests import InvalidRequest
from actors.requests.adapters import Adapters
from actors.runtime import MailboxFull
from actors.workers.group import WorkerGroup
from actors.workers.worker import _is_permanent
from kernels.contract.adapters import AdapterInfo
from kernels.contract.errors import CacheSizeError, ConfigError, LoadError, UnsupportedError
from kernels.contract.info import ModelInfo
from kernels.contract.topology import WorkerId

WORKER = WorkerId(0)


class Told:
    """A group of one worker in ``epoch``, and what it did."""

    def __init__(self, epoch: int) -> None:
        self.refused: list[tuple[str, bool]] = []
        self.crashed: list[str] = []
        system: Any = SimpleNamespace(crash_actor=lambda worker, error: self.crashed.append(error.reason))
        nothing: Any = None
        self.group = WorkerGroup(
            system,
            [WORKER],
            address=None,
            configure=nothing,
            on_progress=nothing,
            on_loaded=nothing,
            on_refused=lambda reason, permanent: self.refused.append((reason, permanent)),
        )
        self.group.workers[WORKER], self.group._running, self.group._epoch = nothing, {WORKER: epoch}, epoch

    def tell(self, epoch: int) -> None:
        self.group._on_report(LoadRefused(worker=WORKER, reason="no such dtype", permanent=True, epoch=epoch))


def test_a_refusal_of_the_first_incarnation_ends_the_start() -> None:
    reported = Told(epoch=0)
    reported.tell(0)
    assert (reported.refused, reported.crashed) == ([("no such dtype", True)], [])


def test_a_refusal_after_a_restart_is_a_death_and_a_stale_one_nothing() -> None:
    reported = Told(epoch=2)
    reported.tell(1)
    assert (reported.refused, reported.crashed) == ([], [])
    reported.tell(2)
    assert (reported.refused, reported.crashed) == ([], ["no such dtype"])


@pytest.mark.parametrize(
    ("error", "permanent"),
    [
        (ConfigError("heads"), True),
        (LoadError("weights"), True),
        (UnsupportedError("dtype"), True),
        (CacheSizeError("memory"), False),
        (ValueError("a mistake of ours"), None),
        (RuntimeError("out of memory"), None),
    ],
)
def test_only_lack_of_memory_may_heal_by_itself(error: Exception, permanent: bool | None) -> None:
    assert _is_permanent(error) is permanent


def test_an_adapter_that_one_rank_lost_is_forgotten_by_all() -> None:
    told: list[tuple[int, object]] = []
    lost: list[dict[int, str]] = []
    loaded: list[int] = []
    nothing: Any = None
    ids = (WorkerId(0), WorkerId(1))
    group = WorkerGroup(
        nothing,
        ids,
        address=None,
        configure=nothing,
        on_progress=nothing,
        on_loaded=lambda info, epoch: loaded.append(len(told)),
        on_refused=nothing,
        on_adapters_lost=lambda each: lost.append(dict(each)),
    )
    for each in ids:
        worker: Any = SimpleNamespace(offer=lambda message, number=each.number: told.append((number, message)))
        group.workers[each], group._running[each] = worker, 1
    group._epoch = 1
    info = ModelInfo("M", "float32", "cpu", 8, 8, 1, 1, 1, 2, 1, 1, {})
    for each, failed in zip(ids, ({7: "no such file"}, {}), strict=True):
        group._on_report(WorkerLoaded(worker=each, info=info, epoch=1, failed=failed))
    assert lost == [{7: "no such file on worker-0"}]
    assert told == [(0, UnloadAdapter(7)), (1, UnloadAdapter(7))]
    assert loaded == [2], "steps begin after the ranks were told"


def test_a_rank_that_cannot_be_told_of_a_lost_adapter_starts_again() -> None:
    """Its mailbox is full: steps would wait for ever in a collective that it does not enter."""
    reported, loaded = Told(epoch=1), list[int]()

    def full(message: object) -> None:
        raise MailboxFull("worker-0", 1)

    rank: Any = SimpleNamespace(offer=full)
    reported.group.workers[WORKER] = rank
    reported.group._on_loaded = lambda info, epoch: loaded.append(epoch)
    info = ModelInfo("M", "float32", "cpu", 8, 8, 1, 1, 1, 2, 1, 1, {})
    reported.group._on_report(WorkerLoaded(worker=WORKER, info=info, epoch=1, failed={7: "no such file"}))
    assert not loaded
    assert "mailbox is full" in reported.crashed[0]


@pytest.mark.parametrize("lost", [{1: "no such file"}, {}])
async def test_an_adapter_lost_while_it_is_loaded_is_not_offered(
    lost: dict[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank has answered, dies with the others, and cannot read it again: the others may."""
    forgotten: list[object] = []

    class Rank:
        async def ask(self, message: object, timeout: float) -> str:
            if isinstance(message, UnloadAdapter):
                forgotten.append(message)
            else:
                adapters.lose(lost)
            return ""

    rank: Any = Rank()
    info = AdapterInfo("own", 4, ("q_proj",), path="/adapter")
    monkeypatch.setattr("actors.requests.adapters._read", lambda *given: info)
    adapters = Adapters(Arguments(model_path="m", enable_lora=True), lambda: [rank])
    if not lost:
        assert (await adapters.load("own", "/adapter")).name == "own"
        return
    with pytest.raises(InvalidRequest, match="lora_path: no such file"):
        await adapters.load("own", "/adapter")
    assert (adapters.find("own"), adapters.numbered(), forgotten) == (None, (), [UnloadAdapter(1)])


async def test_unloading_is_asked_again_and_a_lost_adapter_is_unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    unloaded: list[object] = []

    class Rank:
        async def ask(self, message: object, timeout: float) -> str:
            if isinstance(message, UnloadAdapter):
                unloaded.append(message)
                if len(unloaded) == 1:
                    raise MailboxFull("worker-0", 1)
            return ""

    rank: Any = Rank()
    info = AdapterInfo("own", 4, ("q_proj",), path="/adapter")
    monkeypatch.setattr("actors.requests.adapters._read", lambda *given: info)
    adapters = Adapters(Arguments(model_path="m", enable_lora=True), lambda: [rank])
    await adapters.load("own", "/adapter")
    await adapters.unload("own")
    assert unloaded == [UnloadAdapter(1)] * 2
    await adapters.load("own", "/adapter")
    adapters.lose({2: "no such file"})
    assert "no such file" in adapters.loss("own")
    await adapters.unload("own")
    assert not adapters.loss("own")
    with pytest.raises(InvalidRequest, match="no adapter 'own'"):
        await adapters.unload("own")
