"""The store of responses: bounds, shares, and times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from actors.options import ArgumentError
from app.apis.responses.answers import ResponseAnswer
from app.apis.responses.store import ResponseStore, StoredResponse, TooLong


def stored(number: int, owner: str = "a", previous: int | None = None, size: int = 1000) -> StoredResponse:
    response = ResponseAnswer(
        id=f"resp_{number}", created_at=0, status="completed", background=False, metadata={}, model="m",
        parallel_tool_calls=True, reasoning={}, store=True, text={}, tool_choice="auto", tools=[], top_logprobs=0,
        truncation="disabled", previous_response_id=None if previous is None else f"resp_{previous}",
        output=[{"id": f"msg_{number}", "type": "message"}],
    )  # fmt: skip
    return StoredResponse(owner, response, [{"id": f"in_{number}", "text": "x" * size}])


def present(store: ResponseStore, count: int, owner: str = "a") -> list[int]:
    """The numbers that are there, without using them."""
    rows = store._db.execute("SELECT id FROM things WHERE owner = ?", (owner,)).fetchall()
    return sorted(int(row[0].removeprefix("resp_")) for row in rows)


def test_the_least_recently_used_goes_first() -> None:
    store = ResponseStore(None, 12_000, 60)
    for number in range(4):
        store.put(stored(number))
    each = store.used // 4
    assert store.get("resp_0", "a") is not None
    for number in range(4, 4 + (12_000 // each - 4) + 1):
        store.put(stored(number))
    assert 1 not in present(store, 9)
    assert {0, 2} <= set(present(store, 9))
    assert store.used <= 12_000


def test_using_a_conversation_keeps_all_its_turns() -> None:
    store = ResponseStore(None, 12_000, 60)
    store.put(stored(0))
    store.put(stored(1, previous=0))
    for number in range(2, 30):
        store.put(stored(number))
        assert store.turns("resp_1", "a") is not None
    turns = store.turns("resp_1", "a")
    assert turns is not None
    assert [item["id"] for item in turns] == ["in_0", "msg_0", "in_1", "msg_1"]


def test_a_conversation_that_is_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    store = ResponseStore(None, 1 << 20, 60)
    for number in range(4):
        store.put(stored(number, previous=number - 1 if number else None))
    monkeypatch.setattr("app.apis.responses.store.MAX_TURNS", 3)
    assert len(store.turns("resp_2", "a") or ()) == 6
    with pytest.raises(TooLong):
        store.turns("resp_3", "a")
    monkeypatch.setattr("app.apis.responses.store.MAX_CONVERSATION", 2000)
    with pytest.raises(TooLong):
        store.turns("resp_1", "a")


def test_an_owner_does_not_push_out_the_share_of_another() -> None:
    store = ResponseStore(None, 20_000, 60, tenants=2)
    store.put(stored(0, "b"))
    for number in range(1, 40):
        store.put(stored(number, "a"))
    assert present(store, 40, "b") == [0]
    assert store.used <= 20_000


def test_what_is_larger_than_the_store_is_not_kept() -> None:
    store = ResponseStore(None, 5_000, 60)
    store.put(stored(0, size=10_000))
    assert store.used == 0
    assert store.get("resp_0", "a") is None


def test_unused_things_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("app.apis.responses.store.time.time", lambda: now[0])
    store = ResponseStore(None, 1 << 20, 60)
    store.put(stored(0))
    store.put(stored(1))
    now[0] += 50
    assert store.get("resp_0", "a") is not None
    now[0] += 50
    assert store.get("resp_0", "a") is not None
    assert store.get("resp_1", "a") is None
    store.put(stored(2))
    assert present(store, 3) == [0, 2]


def test_items_go_with_their_response() -> None:
    store = ResponseStore(None, 1 << 20, 60)
    store.put(stored(0))
    assert store.item("msg_0", "a") == {"id": "msg_0", "type": "message"}
    assert store.item("msg_0", "b") is None
    store.put(stored(0))  # replaced
    assert store._db.execute("SELECT count(*) FROM items").fetchone() == (1,)
    assert store.delete("resp_0", "b") is False
    assert store.delete("resp_0", None) is True
    assert store.item("msg_0", "a") is None


def test_a_conversation_counts_its_items(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path / "db", 1 << 20, 60)
    store.put_conversation("conv_1", "a", b"{}")
    items: list[dict[str, Any]] = [{"id": f"msg_{n}", "text": "x" * 100} for n in range(3)]
    store.extend("conv_1", items)
    assert store.used > 300
    assert store.delete_item("conv_1", "msg_1")
    assert [item["id"] for item in store.items("conv_1")] == ["msg_0", "msg_2"]
    assert 200 < store.used < 300
    store.extend("conv_gone", items)
    store.close()
    again = ResponseStore(tmp_path / "db", 1 << 20, 60)
    assert again.conversation("conv_1", "a") == b"{}"
    assert len(again.items("conv_1")) == 2
    again.close()


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "db"
    path.write_bytes(b"no database" * 100)
    with pytest.raises(ArgumentError, match="cannot keep responses"):
        ResponseStore(path, 1 << 20, 60)
