"""The store of responses: bounds, shares, and times."""

from __future__ import annotations

import sqlite3
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
    assert [item["id"] for item in turns.read()] == ["in_0", "msg_0", "in_1", "msg_1"]


def test_a_conversation_that_is_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    store = ResponseStore(None, 1 << 20, 60)
    for number in range(4):
        store.put(stored(number, previous=number - 1 if number else None))
    monkeypatch.setattr("app.apis.responses.store.MAX_TURNS", 3)
    turns = store.turns("resp_2", "a")
    assert turns is not None
    assert len(turns.read()) == 6
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
    assert store.used > 3 * 400
    assert store.delete_item("conv_1", "msg_1")
    assert [item["id"] for item in store.items("conv_1").read()] == ["msg_0", "msg_2"]
    assert 2 * 400 < store.used < 4 * 400
    store.extend("conv_gone", items)
    store.close()
    again = ResponseStore(tmp_path / "db", 1 << 20, 60)
    assert again.conversation("conv_1", "a") == b"{}"
    assert len(again.items("conv_1").read()) == 2
    again.close()


def test_what_a_failed_change_would_have_taken_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    store = ResponseStore(None, 20_000, 60)
    store.put(stored(0))
    store.put_conversation("conv_1", "a", b"{}")
    before = store.used

    def full(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(store, "_add_items", full)
        with pytest.raises(sqlite3.OperationalError):
            store.extend("conv_1", [{"id": "x"}])
        with pytest.raises(sqlite3.OperationalError):
            store.put(stored(0))
    assert store.used == before
    assert store.get("resp_0", "a") is not None


def test_wrong_counts_are_made_right_instead_of_waited_for() -> None:
    store = ResponseStore(None, 12_000, 60)
    store.put_conversation("conv_1", "a", b"{}")
    store._held = {"b": 1 << 30}
    store.put_conversation("conv_2", "a", b"{}")
    assert store.used == store._db.execute("SELECT sum(bytes) FROM things").fetchone()[0]
    assert store.conversation("conv_2", "a") is not None


def test_an_updated_conversation_counts_and_makes_room() -> None:
    store = ResponseStore(None, 5_000, 60)
    for number in (1, 2):
        store.put_conversation(f"conv_{number}", "a", b"{}")
    store.update_conversation("conv_1", b" " * 4500)
    assert 4500 < store.used <= 5_000
    assert store.conversation("conv_2", "a") is None
    store.update_conversation("conv_1", b" " * 10)
    assert store.used < 1000
    store.update_conversation("conv_gone", b"{}")


def test_rows_count_beside_what_they_hold() -> None:
    store = ResponseStore(None, 30_000, 60)
    for number in range(200):
        store.put_conversation(f"conv_{number}", "a", b"{}")
    assert store._db.execute("SELECT count(*) FROM things").fetchone()[0] <= 100


def test_pages_of_a_conversation() -> None:
    store = ResponseStore(None, 1 << 20, 60)
    store.put_conversation("conv_1", "a", b"{}")
    store.extend("conv_1", [{"id": f"msg_{n}"} for n in range(5)])

    def ids(after: str | None, limit: int, oldest_first: bool) -> tuple[list[str], bool]:
        page = store.page("conv_1", after, limit, oldest_first=oldest_first)
        assert page is not None
        return [item["id"] for item in page.items], page.more

    assert ids(None, 2, True) == (["msg_0", "msg_1"], True)
    assert ids("msg_1", 3, True) == (["msg_2", "msg_3", "msg_4"], False)
    assert ids("msg_1", 3, False) == (["msg_0"], False)
    assert ids(None, 1, False) == (["msg_4"], True)
    assert store.page("conv_1", "msg_9", 1, oldest_first=True) is None
    assert store.item_of("conv_1", "msg_3") == {"id": "msg_3"}
    assert store.item_of("conv_1", "msg_9") is None
    assert store.repeated("conv_1", [{"id": "msg_9"}, {"id": "msg_3"}]) == "msg_3"
    assert store.repeated("conv_1", [{"id": "msg_9"}]) is None


def test_items_of_a_conversation_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.apis.responses.store.MAX_ITEMS", 2)
    store = ResponseStore(None, 1 << 20, 60)
    store.put_conversation("conv_1", "a", b"{}")
    store.extend("conv_1", [{"id": "msg_0"}])
    assert not store.is_full("conv_1")
    store.extend("conv_1", [{"id": "msg_1"}])
    assert store.is_full("conv_1")


def test_a_response_that_nobody_makes_any_more_is_failed() -> None:
    store = ResponseStore(None, 1 << 20, 60)
    cut = stored(0)
    cut.response.status = "queued"
    store.put(cut)
    found = store.get("resp_0", "a")
    assert found is not None
    assert (found.response.status, found.response.error is not None) == ("failed", True)


def test_a_full_disk_can_be_read(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path / "db", 1 << 20, 60)
    store.put(stored(0))
    store._db.execute("PRAGMA query_only = ON")  # every write is an OperationalError
    assert store.get("resp_0", "a") is not None
    store.close()


def test_a_database_of_another_version_is_refused(tmp_path: Path) -> None:
    ResponseStore(tmp_path / "db", 1 << 20, 60).close()
    ResponseStore(tmp_path / "db", 1 << 20, 60).close()
    with sqlite3.connect(tmp_path / "db") as db:
        db.execute("PRAGMA user_version = 0")
    with pytest.raises(ArgumentError, match="another version"):
        ResponseStore(tmp_path / "db", 1 << 20, 60)


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "db"
    path.write_bytes(b"no database" * 100)
    with pytest.raises(ArgumentError, match="cannot keep responses"):
        ResponseStore(path, 1 << 20, 60)
