"""Responses and conversations that were stored: in SQLite, in memory or in a file, with a bound and a time to live."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from actors.options import ArgumentError
from actors.requests.admission import most_for_one
from app.apis.responses.answers import ResponseAnswer

__all__ = ["MAX_CONVERSATION", "ResponseStore", "StoredResponse", "TooLong"]

Item = dict[str, Any]

MAX_TURNS = 1000
"""Responses of one conversation."""

MAX_CONVERSATION = 32 << 20
"""Stored bytes of one conversation."""

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

_encode = msgspec.json.encode


class TooLong(Exception):
    """A conversation has more turns or bytes than can go on."""


class StoredResponse(msgspec.Struct):
    """A response with its own input items. ``events``: of its stream, if it was made in the background."""

    owner: str
    response: ResponseAnswer
    input: list[Item]
    events: bytes | None = None


class ResponseStore:
    """``limit``: bytes of everything stored; the least recently used go first. With several ``tenants`` half of it is
    kept for them in equal parts. ``seconds``: until something that is not used is deleted. ``path``: None keeps it in
    memory.

    Every method takes the ``owner``: other owners' things do not exist for it; None sees all. Raises ArgumentError.
    """

    def __init__(self, path: Path | None, limit: int, seconds: float, tenants: int = 1) -> None:
        self.limit = limit
        self._share = most_for_one(limit, tenants)
        self._seconds = seconds
        try:
            self._db = sqlite3.connect(":memory:" if path is None else path, isolation_level=None)
            if path is not None:
                path.chmod(0o600)
                self._db.execute("PRAGMA journal_mode = WAL")
                self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.execute("PRAGMA foreign_keys = ON")
            self._db.execute("PRAGMA secure_delete = ON")
            self._db.executescript(_SCHEMA)
        except (sqlite3.Error, OSError) as error:
            raise ArgumentError(f"{path}: cannot keep responses: {error}") from None
        self._fail_interrupted()
        self._held: dict[str, int] = dict(
            self._db.execute("SELECT owner, sum(bytes) FROM things GROUP BY owner").fetchall()
        )

    def close(self) -> None:
        self._db.close()

    @property
    def used(self) -> int:
        """Bytes stored."""
        return sum(self._held.values())

    def _fail_interrupted(self) -> None:
        """Responses that an earlier server has not finished are failed."""
        rows = self._db.execute("SELECT id, data FROM things WHERE status IN ('queued', 'in_progress')").fetchall()
        for thing, data in rows:
            response = msgspec.json.decode(data, type=ResponseAnswer)
            response.status = "failed"
            response.error = {"code": "server_error", "message": "The server stopped before the response was made."}
            self._db.execute("UPDATE things SET status = 'failed', data = ? WHERE id = ?", (_encode(response), thing))

    # -- responses

    def put(self, stored: StoredResponse) -> None:
        """Store a response, or replace it."""
        response = stored.response
        data, given = _encode(response), _encode(stored.input)
        parts = [(item["id"], _encode(item)) for item in response.output]
        size = len(data) * 2 + len(given) + len(stored.events or b"")
        previous = response.previous_response_id
        row = (response.id, stored.owner, time.time(), size, previous, response.status, data, given, stored.events)
        with self._db:
            self._db.execute("BEGIN")
            self._remove("id = ?", response.id)
            self._db.execute("INSERT INTO things VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
            self._add_items(response.id, parts)
        self._hold(stored.owner, size)
        self._make_room(stored.owner, keep=response.id)

    def get(self, response_id: str, owner: str | None) -> StoredResponse | None:
        row = self._find(response_id, owner)
        if row is None or not response_id.startswith("resp_"):
            return None
        return StoredResponse(
            row[1],
            msgspec.json.decode(row[6], type=ResponseAnswer),
            msgspec.json.decode(row[7]),
            row[8],
        )

    def delete(self, thing: str, owner: str | None) -> bool:
        if self._find(thing, owner) is None:
            return False
        self._remove("id = ?", thing)
        return True

    def turns(self, response_id: str, owner: str | None) -> list[Item] | None:
        """All items up to and with the output of a response, from the first of its conversation; None if one of the
        responses is missing. Raises TooLong."""
        count, size = self._db.execute(_CHAIN, (response_id, MAX_TURNS)).fetchone()
        if count > MAX_TURNS or size > MAX_CONVERSATION:
            raise TooLong
        turns: list[list[Item]] = []
        now: str | None = response_id
        while now is not None:
            stored = self.get(now, owner)
            if stored is None:
                return None
            turns.append([*stored.input, *stored.response.output])
            now = stored.response.previous_response_id
        return [item for turn in reversed(turns) for item in turn]

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
        row = (conversation, owner, time.time(), len(data), None, "completed", data, b"[]", None)
        self._db.execute("INSERT INTO things VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
        self._hold(owner, len(data))
        self._make_room(owner, keep=conversation)

    def conversation(self, conversation: str, owner: str | None) -> bytes | None:
        """The description of a conversation."""
        row = self._find(conversation, owner)
        return None if row is None or not conversation.startswith("conv_") else row[6]

    def update_conversation(self, conversation: str, data: bytes) -> None:
        self._db.execute("UPDATE things SET data = ?, used = ? WHERE id = ?", (data, time.time(), conversation))

    def is_full(self, conversation: str) -> bool:
        """Whether a conversation is too long to go on."""
        row = self._db.execute("SELECT bytes FROM things WHERE id = ?", (conversation,)).fetchone()
        return row is not None and row[0] > MAX_CONVERSATION

    def items(self, conversation: str) -> list[Item]:
        """The items of a conversation in their order."""
        rows = self._db.execute("SELECT data FROM items WHERE thing = ? ORDER BY place", (conversation,))
        return [msgspec.json.decode(row[0]) for row in rows]

    def extend(self, conversation: str, items: Sequence[Item]) -> None:
        """Append items to a conversation, if it is still there."""
        parts = [(item["id"], _encode(item)) for item in items]
        size = sum(len(data) for _, data in parts)
        with self._db:
            self._db.execute("BEGIN")
            if (of := self._grow(conversation, size)) is None:
                return
            self._add_items(conversation, parts)
        self._make_room(of, keep=conversation)

    def delete_item(self, conversation: str, item_id: str) -> bool:
        query = "DELETE FROM items WHERE thing = ? AND id = ? RETURNING length(data)"
        rows = self._db.execute(query, (conversation, item_id)).fetchall()
        if rows:
            self._grow(conversation, -sum(row[0] for row in rows))
        return bool(rows)

    def _grow(self, conversation: str, size: int) -> str | None:
        """Count ``size`` bytes more. Returns the owner of the conversation; None if it is gone."""
        query = "UPDATE things SET bytes = bytes + ?, used = ? WHERE id = ? RETURNING owner"
        rows = self._db.execute(query, (size, time.time(), conversation)).fetchall()
        if not rows:
            return None
        self._hold(rows[0][0], size)
        return str(rows[0][0])

    # -- room

    def _find(self, thing: str, owner: str | None) -> Any:
        """The row of a thing, which counts as used now."""
        row = self._db.execute("SELECT * FROM things WHERE id = ?", (thing,)).fetchone()
        now = time.time()
        if row is None or (owner is not None and row[1] != owner) or row[2] < now - self._seconds:
            return None
        self._db.execute("UPDATE things SET used = ? WHERE id = ?", (now, thing))
        return row

    def _add_items(self, thing: str, parts: Sequence[tuple[str, bytes]]) -> None:
        self._db.executemany(
            "INSERT INTO items (thing, id, data) VALUES (?, ?, ?)", [(thing, name, data) for name, data in parts]
        )

    def _hold(self, owner: str, size: int) -> None:
        self._held[owner] = self._held.get(owner, 0) + size
        if not self._held[owner]:
            del self._held[owner]

    def _remove(self, which: str, value: object) -> None:
        """Delete things. ``which``: a condition of ours with one value."""
        query = f"DELETE FROM things WHERE {which} RETURNING owner, bytes"
        for owner, size in self._db.execute(query, (value,)).fetchall():
            self._hold(owner, -size)

    def _make_room(self, owner: str, keep: str) -> None:
        """Delete what has expired, then the least recently used: the owner's, until it has its share, then of the
        owner with most. ``keep`` goes last."""
        self._remove("used < ?", time.time() - self._seconds)
        held = self._held
        while held and (held.get(owner, 0) > self._share or self.used > self.limit):
            of = owner if held.get(owner, 0) > self._share else max(held, key=lambda name: held[name])
            query = "SELECT id FROM things WHERE owner = ? AND id != ? ORDER BY used LIMIT 1"
            row = self._db.execute(query, (of, keep)).fetchone()
            self._remove("id = ?", row[0] if row is not None else keep)
