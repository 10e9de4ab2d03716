"""Responses and conversations that were stored: in SQLite, in memory or in a file, with a bound and a time to live."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from actors.options import ArgumentError
from actors.protocol.requests import LIMITS
from actors.requests.admission import max_per_tenant
from app.apis.responses.answers import ResponseAnswer

__all__ = ["MAX_CONVERSATION", "MAX_ITEMS", "History", "ItemPage", "ResponseStore", "StoredResponse", "TooLong"]

Item = dict[str, Any]

MAX_TURNS = 1000
"""Responses of one conversation."""

MAX_CONVERSATION = 32 << 20
"""Stored bytes of one conversation."""

MAX_ITEMS = LIMITS.messages
"""Items of a conversation, with which it takes no more: a chat could not have them."""

_ROW = 300  # bytes that a row takes beside its contents
_VERSION = 1  # of the tables, and of what is in them
_SCHEMA = """
CREATE TABLE IF NOT EXISTS things (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, used REAL NOT NULL, bytes INTEGER NOT NULL,
    previous TEXT, status TEXT NOT NULL, data BLOB NOT NULL, input BLOB NOT NULL, events BLOB
);
CREATE INDEX IF NOT EXISTS things_owner ON things (owner, used);
CREATE INDEX IF NOT EXISTS things_used ON things (used);
CREATE TABLE IF NOT EXISTS items (
    place INTEGER PRIMARY KEY AUTOINCREMENT, thing TEXT NOT NULL REFERENCES things (id) ON DELETE CASCADE,
    id TEXT NOT NULL, data BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS items_thing ON items (thing, place);
CREATE UNIQUE INDEX IF NOT EXISTS items_name ON items (thing, id);
CREATE INDEX IF NOT EXISTS items_id ON items (id);
"""
# A thing is a response or a conversation. Items: of a conversation, or of the output of a response.

_CHAIN = """
WITH RECURSIVE chain (id, previous, bytes, place) AS (
    SELECT id, previous, bytes, 1 FROM things WHERE id = ?1
    UNION ALL
    SELECT things.id, things.previous, things.bytes, place + 1
    FROM things JOIN chain ON things.id = chain.previous WHERE place <= ?2
)
SELECT count(*), coalesce(sum(bytes), 0) FROM chain
"""

_INSERT = "INSERT INTO things VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"

_encode = msgspec.json.encode


class TooLong(Exception):
    """A conversation has more turns or bytes than can go on."""


class StoredResponse(msgspec.Struct):
    """A response with its own input items. ``events``: those of its stream after the first ones, if it was made in
    the background."""

    owner: str
    response: ResponseAnswer
    input: list[Item]
    events: bytes | None = None


class ItemPage(msgspec.Struct, frozen=True):
    """A part of the items of a conversation. ``more``: whether there are others after it."""

    items: list[Item]
    more: bool


class _Output(msgspec.Struct):
    """The part of a response that its conversation goes on with."""

    output: list[Item]


class History:
    """The items of a conversation, as they are stored. ``turns``: input and response of each, oldest first."""

    def __init__(self, items: Sequence[bytes] = (), turns: Sequence[tuple[bytes, bytes]] = ()) -> None:
        self._items = items
        self._turns = turns

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(map(len, self._items)) + sum(len(given) + len(made) for given, made in self._turns)

    def read(self) -> list[Item]:
        """The items. Any thread may call it: a large history takes a while."""
        items: list[Item] = [msgspec.json.decode(data) for data in self._items]
        for given, made in self._turns:
            items += msgspec.json.decode(given)
            items += msgspec.json.decode(made, type=_Output).output
        return items


class ResponseStore:
    """``limit``: bytes of everything stored; the least recently used go first. With several ``tenants`` half of it is
    kept for them in equal parts. ``seconds``: until something that is not used is deleted. ``path``: None keeps it in
    memory.

    Every method takes the ``owner``: other owners' things do not exist for it; None sees all. Raises ArgumentError.
    """

    def __init__(self, path: Path | None, limit: int, seconds: float, tenants: int = 1) -> None:
        self.limit = limit
        self._share = max_per_tenant(limit, tenants)
        self._seconds = seconds
        try:
            self._db = sqlite3.connect(":memory:" if path is None else path, isolation_level=None)
            if path is not None:
                path.chmod(0o600)
                self._db.execute("PRAGMA journal_mode = WAL")
                self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.execute("PRAGMA foreign_keys = ON")
            self._db.execute("PRAGMA secure_delete = ON")
            self._check_version(path)
            self._db.executescript(_SCHEMA)
            self._held: dict[str, int] = {}
            self._recount()
        except (sqlite3.Error, OSError) as error:
            raise ArgumentError(f"{path}: cannot keep responses: {error}") from None

    def close(self) -> None:
        self._db.close()

    @property
    def used(self) -> int:
        """Bytes stored."""
        return sum(self._held.values())

    def _check_version(self, path: Path | None) -> None:
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        tables = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if tables and version != _VERSION:
            raise ArgumentError(
                f"{path}: was written by another version of Troupe, and its responses cannot be read; delete the file, "
                "or choose another --file-storage-path"
            )
        self._db.execute(f"PRAGMA user_version = {_VERSION}")

    # -- responses

    def put(self, stored: StoredResponse) -> None:
        """Store a response, or replace it."""
        response = stored.response
        data, given = _encode(response), _encode(stored.input)
        parts = [(item["id"], _encode(item)) for item in response.output]
        size = len(data) * 2 + len(given) + len(stored.events or b"") + _ROW * (1 + len(parts))
        previous = response.previous_response_id
        row = (response.id, stored.owner, time.time(), size, previous, response.status, data, given, stored.events)
        with self._change() as more:
            self._delete(more, "id = ?", response.id)
            self._db.execute(_INSERT, row)
            self._add_items(response.id, parts)
            more[stored.owner] += size
        self._make_room(stored.owner, keep=response.id)

    def get(self, response_id: str, owner: str | None) -> StoredResponse | None:
        """A response. Ask for one of the background only when it is no longer made: one that has no end is failed."""
        row = self._find(response_id, owner)
        if row is None or not response_id.startswith("resp_"):
            return None
        response = msgspec.json.decode(row[6], type=ResponseAnswer)
        if response.status in ("queued", "in_progress"):
            response.status = "failed"
            response.error = {"code": "server_error", "message": "The server stopped before the response was stored."}
        return StoredResponse(row[1], response, msgspec.json.decode(row[7]), row[8])

    def delete(self, thing: str, owner: str | None) -> bool:
        if self._find(thing, owner) is None:
            return False
        return self._remove("id = ?", thing) > 0

    def turns(self, response_id: str, owner: str | None) -> History | None:
        """All items up to and with the output of a response, from the first of its conversation; None if one of the
        responses is missing. Raises TooLong."""
        count, size = self._db.execute(_CHAIN, (response_id, MAX_TURNS)).fetchone()
        if count > MAX_TURNS or size > MAX_CONVERSATION:
            raise TooLong
        turns: list[tuple[bytes, bytes]] = []
        now: str | None = response_id
        while now is not None:
            row = self._find(now, owner)
            if row is None or not now.startswith("resp_"):
                return None
            turns.append((row[7], row[6]))
            now = row[4]
        return History(turns=turns[::-1])

    def item(self, item_id: str, owner: str | None) -> Item | None:
        """An item by its id: of the output of a response, or of a conversation."""
        query = "SELECT items.data FROM items JOIN things ON items.thing = things.id WHERE items.id = ?"
        values: list[Any] = [item_id]
        if owner is not None:
            query += " AND things.owner = ?"
            values.append(owner)
        row = self._db.execute(query + " LIMIT 1", values).fetchone()
        return None if row is None else msgspec.json.decode(row[0])

    # -- conversations

    def put_conversation(self, conversation: str, owner: str, data: bytes) -> None:
        """Store a new conversation, without items. ``data``: its description."""
        size = len(data) + _ROW
        with self._change() as more:
            self._db.execute(_INSERT, (conversation, owner, time.time(), size, None, "completed", data, b"[]", None))
            more[owner] += size
        self._make_room(owner, keep=conversation)

    def conversation(self, conversation: str, owner: str | None) -> bytes | None:
        """The description of a conversation."""
        row = self._find(conversation, owner)
        return None if row is None or not conversation.startswith("conv_") else row[6]

    def update_conversation(self, conversation: str, data: bytes) -> None:
        """Replace the description of a conversation, if it is still there."""
        row = self._db.execute("SELECT length(data) FROM things WHERE id = ?", (conversation,)).fetchone()
        if row is None:
            return
        with self._change() as more:
            of = self._grow(more, conversation, len(data) - row[0])
            self._db.execute("UPDATE things SET data = ? WHERE id = ?", (data, conversation))
        self._make_room(of, keep=conversation)

    def is_full(self, conversation: str) -> bool:
        """Whether a conversation is too long to go on."""
        query = "SELECT bytes, (SELECT count(*) FROM items WHERE thing = ?1) FROM things WHERE id = ?1"
        row = self._db.execute(query, (conversation,)).fetchone()
        return row is not None and (row[0] > MAX_CONVERSATION or row[1] >= MAX_ITEMS)

    def items(self, conversation: str) -> History:
        """All items of a conversation in their order."""
        rows = self._db.execute("SELECT data FROM items WHERE thing = ? ORDER BY place", (conversation,))
        return History([row[0] for row in rows])

    def page(self, conversation: str, after: str | None, limit: int, *, oldest_first: bool) -> ItemPage | None:
        """Up to ``limit`` items of a conversation after the item ``after``; None if there is no such item."""
        way, order = (">", "ASC") if oldest_first else ("<", "DESC")
        query, values = "SELECT data FROM items WHERE thing = ?", [conversation, limit + 1]
        if after is not None:
            place = self._place(conversation, after)
            if place is None:
                return None
            query += f" AND place {way} ?"
            values.insert(1, place)
        rows = self._db.execute(f"{query} ORDER BY place {order} LIMIT ?", values).fetchall()
        return ItemPage([msgspec.json.decode(row[0]) for row in rows[:limit]], len(rows) > limit)

    def item_of(self, conversation: str, item_id: str) -> Item | None:
        """An item of a conversation by its id."""
        query = "SELECT data FROM items WHERE thing = ? AND id = ?"
        row = self._db.execute(query, (conversation, item_id)).fetchone()
        return None if row is None else msgspec.json.decode(row[0])

    def repeated(self, conversation: str, items: Sequence[Item]) -> str | None:
        """The id of one of these items that the conversation has already."""
        return next((item["id"] for item in items if self._place(conversation, item["id"]) is not None), None)

    def _place(self, conversation: str, item_id: str) -> int | None:
        query = "SELECT place FROM items WHERE thing = ? AND id = ?"
        row = self._db.execute(query, (conversation, item_id)).fetchone()
        return None if row is None else int(row[0])

    def extend(self, conversation: str, items: Sequence[Item]) -> None:
        """Append items to a conversation, if it is still there."""
        parts = [(item["id"], _encode(item)) for item in items]
        with self._change() as more:
            of = self._grow(more, conversation, sum(len(data) + _ROW for _, data in parts))
            if of is None:
                return
            self._add_items(conversation, parts)
        self._make_room(of, keep=conversation)

    def delete_item(self, conversation: str, item_id: str) -> bool:
        query = "DELETE FROM items WHERE thing = ? AND id = ? RETURNING length(data)"
        with self._change() as more:
            rows = self._db.execute(query, (conversation, item_id)).fetchall()
            self._grow(more, conversation, -sum(row[0] + _ROW for row in rows))
        return bool(rows)

    def _grow(self, more: Counter[str], conversation: str, size: int) -> str | None:
        """Count ``size`` bytes more. Returns the owner of the conversation; None if it is gone."""
        query = "UPDATE things SET bytes = bytes + ?, used = ? WHERE id = ? RETURNING owner"
        rows = self._db.execute(query, (size, time.time(), conversation)).fetchall()
        if not rows:
            return None
        more[rows[0][0]] += size
        return str(rows[0][0])

    # -- room

    def _find(self, thing: str, owner: str | None) -> Any:
        """The row of a thing, which counts as used now."""
        row = self._db.execute("SELECT * FROM things WHERE id = ?", (thing,)).fetchone()
        now = time.time()
        if row is None or (owner is not None and row[1] != owner) or row[2] < now - self._seconds:
            return None
        with contextlib.suppress(sqlite3.OperationalError):  # reading needs no room on the disk
            self._db.execute("UPDATE things SET used = ? WHERE id = ?", (now, thing))
        return row

    @contextlib.contextmanager
    def _change(self) -> Iterator[Counter[str]]:
        """One transaction. Bytes that it counts for an owner, more or less, are held when it is complete."""
        more: Counter[str] = Counter()
        with self._db:
            self._db.execute("BEGIN")
            yield more
        for owner, size in more.items():
            self._hold(owner, size)

    def _add_items(self, thing: str, parts: Sequence[tuple[str, bytes]]) -> None:
        self._db.executemany(
            "INSERT INTO items (thing, id, data) VALUES (?, ?, ?)", [(thing, name, data) for name, data in parts]
        )

    def _hold(self, owner: str, size: int) -> None:
        self._held[owner] = self._held.get(owner, 0) + size
        if not self._held[owner]:
            del self._held[owner]

    def _remove(self, which: str, *values: object) -> int:
        """Delete things, and return their number. ``which``: a condition of ours."""
        with self._change() as more:
            return self._delete(more, which, *values)

    def _delete(self, more: Counter[str], which: str, *values: object) -> int:
        rows = self._db.execute(f"DELETE FROM things WHERE {which} RETURNING owner, bytes", values).fetchall()
        for owner, size in rows:
            more[owner] -= size
        return len(rows)

    def _recount(self) -> None:
        query = "SELECT owner, sum(bytes) FROM things GROUP BY owner"
        self._held = dict(self._db.execute(query).fetchall())

    def _make_room(self, owner: str | None, keep: str) -> None:
        """Delete what has expired, then the least recently used: the owner's, until it has its share, then of the
        owner with most. ``keep`` goes last."""
        self._remove("used < ?", time.time() - self._seconds)
        if owner is None:
            return
        held = self._held
        while held and (held.get(owner, 0) > self._share or self.used > self.limit):
            of = owner if held.get(owner, 0) > self._share else max(held, key=lambda name: held[name])
            query = "SELECT id FROM things WHERE owner = ? AND id != ? ORDER BY used LIMIT 1"
            row = self._db.execute(query, (of, keep)).fetchone()
            if not self._remove("id = ? AND owner = ?", row[0] if row is not None else keep, of):
                self._recount()  # fewer bytes are there than were held
                return
