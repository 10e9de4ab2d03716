"""How much memory unfinished bodies may take, together and for each owner."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.server.request_body import RequestBody
from app.server.upload_budget import FREE, UploadBudget

CHUNK = 64 << 10


def held(budget: UploadBudget, owner: str, size: int = 1000) -> int:
    """What ``owner`` can take in pieces of ``size``."""
    taken = 0
    while budget.take(owner, size):
        taken += size
    return taken


def test_one_owner_takes_half_and_the_next_one_half_of_the_rest():
    budget = UploadBudget(1_000_000)
    assert held(budget, "a") == 500_000
    assert held(budget, "b") == 250_000
    budget.give_back("a", 500_000)
    assert held(budget, "b") == 250_000


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 400)), max_size=60))
def test_the_limit_holds_and_nothing_is_lost(takes):
    budget = UploadBudget(1000)
    taken = [(owner, size) for owner, size in takes if budget.take(owner, size)]
    assert sum(size for _, size in taken) <= 1000
    for owner, size in taken:
        budget.give_back(owner, size)
    assert held(budget, "new", 1) == 500


def upload(budget: UploadBudget, chunks: int, **options: Any) -> RequestBody:
    """A body whose ``chunks`` arrive and whose end does not."""
    messages = iter([{"type": "http.request", "body": b" " * CHUNK, "more_body": True}] * chunks)

    async def receive() -> Any:
        message = next(messages, None)
        return message if message is not None else await asyncio.Event().wait()

    return RequestBody(receive, [(b"content-length", b"9999999")], "1.1", budget, **options)


async def test_a_body_over_the_share_ends_early_and_its_memory_is_free_again():
    budget = UploadBudget(4 * CHUNK)
    body = upload(budget, 9)
    assert [(await body.receive())["more_body"] for _ in range(3)] == [True, True, False]
    assert body.refused
    assert not body.over
    assert (await body.receive())["body"] == b""  # what comes later is dropped
    assert held(budget, "other", CHUNK) == 2 * CHUNK


async def test_small_bodies_need_no_share():
    budget = UploadBudget(2 * CHUNK)
    assert held(budget, "", CHUNK)
    messages = iter([b" " * FREE, b""])

    async def receive() -> Any:
        return {"type": "http.request", "body": next(messages), "more_body": True}

    body = RequestBody(receive, [(b"content-length", b"9999999")], "1.1", budget)
    assert (await body.receive())["more_body"]
    assert not body.refused


@pytest.mark.parametrize("end", ["whole", "released"])
async def test_a_body_that_is_over_gives_its_part_back(end):
    budget = UploadBudget(4 * CHUNK)
    body = upload(budget, 2)
    for _ in range(2):
        await body.receive()
    assert not budget.take("", CHUNK)
    if end == "released":
        body.release()
    else:
        body._receive = lambda: asyncio.sleep(0, {"type": "http.request", "body": b" ", "more_body": False})
        await body.receive()
    assert budget.take("", 2 * CHUNK)


async def test_a_body_that_no_route_reads_is_not_kept():
    budget = UploadBudget(0)
    body = upload(budget, 3, is_read=False)
    for _ in range(3):
        message = await body.receive()
        assert (message["body"], message["more_body"]) == (b"", True)
    assert not body.refused
