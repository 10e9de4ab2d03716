"""Files in one directory, under names of our own: their bytes, and a small JSON file each that describes them."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from actors.options import ArgumentError
from actors.requests.admission import most_for_one

__all__ = ["FileStore", "FileWriter", "StorageFull", "StoredFile", "is_id", "read_record", "write_record"]

MAX_FILES = 20_000
_ID = re.compile(r"(file-|batch_)[0-9a-f]{32}")

Record = TypeVar("Record", bound=msgspec.Struct)


class StorageFull(Exception):
    """The directory, or the share of one key, has no room for more."""


class StoredFile(msgspec.Struct, kw_only=True):
    """``filename``: the client's name, which is never used as one here. Times in seconds since 1970."""

    id: str
    owner: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    expires_at: int | None = None


def is_id(text: str) -> bool:
    """Whether this is the form of the ids made here: nothing else becomes part of a path."""
    return _ID.fullmatch(text) is not None


def read_record(path: Path, kind: type[Record]) -> Record | None:
    """The record in a file; None if it is not there or not whole."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        with os.fdopen(descriptor, "rb") as file:
            return msgspec.json.decode(file.read(), type=kind)
    except (OSError, msgspec.MsgspecError):
        return None


def write_record(path: Path, record: msgspec.Struct) -> None:
    """Replace the record in a file, at once."""
    part = path.with_suffix(".new")
    part.write_bytes(msgspec.json.encode(record))
    os.replace(part, path)


class FileStore:
    """``limit``: bytes of all files together; with several ``tenants`` half of it is kept for them in equal parts.

    Only one server uses a directory at a time. Raises ArgumentError.
    """

    def __init__(self, folder: Path, limit: int, tenants: int = 1) -> None:
        self.limit = limit
        self._share = most_for_one(limit, tenants)
        self._files: dict[str, StoredFile] = {}
        self._held: dict[str, int] = {}  # bytes by owner, with those that are being written
        self.batches = folder / "batches"
        self._folder = folder / "files"
        try:
            for made in (folder, self._folder, self.batches):
                made.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise ArgumentError(f"--file-storage-path {folder}: cannot be used: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise ArgumentError(f"--file-storage-path {folder}: another server uses it; give each its own") from None
        self._load()

    def _load(self) -> None:
        for path in self._folder.glob("*.part"):
            path.unlink()
        for path in sorted(self._folder.glob("file-*.json")):
            file = read_record(path, StoredFile)
            if file is None or file.id != path.stem or not is_id(file.id) or not self.path(file.id).is_file():
                continue
            self._files[file.id] = file
            self.hold(file.owner, file.bytes)

    def close(self) -> None:
        """Let another server use the directory."""
        os.close(self._lock)

    def path(self, file_id: str) -> Path:
        """Where the bytes of a file are. ``file_id``: of a file that :meth:`get` returned, or a new one."""
        if not is_id(file_id):
            raise ValueError(file_id)
        return self._folder / f"{file_id}.bin"

    def get(self, file_id: str) -> StoredFile | None:
        """The file, unless it has expired."""
        self.expire()
        return self._files.get(file_id)

    def newest_first(self) -> list[StoredFile]:
        self.expire()
        return sorted(self._files.values(), key=lambda file: (file.created_at, file.id), reverse=True)

    def delete(self, file_id: str) -> None:
        file = self._files.pop(file_id)
        self.hold(file.owner, -file.bytes)
        for path in (self._folder / f"{file.id}.json", self.path(file.id)):
            path.unlink(missing_ok=True)

    def expire(self) -> None:
        """Delete the files whose time has come."""
        now = time.time()
        for file in [file for file in self._files.values() if file.expires_at is not None and file.expires_at <= now]:
            self.delete(file.id)

    def reserve(self, owner: str, size: int) -> None:
        """Hold ``size`` bytes more for ``owner`` (less, if it is negative). Raises StorageFull."""
        if size > 0 and (sum(self._held.values()) + size > self.limit or self._held.get(owner, 0) + size > self._share):
            raise StorageFull
        self.hold(owner, size)

    def hold(self, owner: str, size: int) -> None:
        """Count ``size`` bytes more, or less, whether there is room or not."""
        self._held[owner] = self._held.get(owner, 0) + size
        if not self._held[owner]:
            del self._held[owner]

    @contextlib.contextmanager
    def writing(self, owner: str) -> Iterator[FileWriter]:
        """A new file, which is deleted unless it is finished. Raises StorageFull."""
        if len(self._files) >= MAX_FILES:
            self.expire()
            if len(self._files) >= MAX_FILES:
                raise StorageFull
        part = self._folder / f"{secrets.token_hex(16)}.part"
        with part.open("xb") as file:
            os.chmod(part, 0o600)
            writer = FileWriter(self, owner, file)
            try:
                yield writer
            finally:
                if not writer.finished:
                    part.unlink(missing_ok=True)
                    self.reserve(owner, -writer.size)

    def adopt(
        self, part: Path, owner: str, *, size: int, filename: str, purpose: str, seconds: int | None
    ) -> StoredFile:
        """Make a finished file of bytes in ``part``, a file of this directory whose ``size`` is reserved already."""
        now = int(time.time())
        file = StoredFile(
            id=f"file-{secrets.token_hex(16)}",
            owner=owner,
            bytes=size,
            created_at=now,
            filename=filename,
            purpose=purpose,
            expires_at=None if seconds is None else now + seconds,
        )
        os.replace(part, self.path(file.id))
        write_record(self._folder / f"{file.id}.json", file)
        self._files[file.id] = file
        return file


class FileWriter:
    """Writes one new file."""

    def __init__(self, store: FileStore, owner: str, file: BinaryIO) -> None:
        self.size = 0
        self.finished = False
        self._store = store
        self._owner = owner
        self._file = file

    async def write(self, data: bytes) -> None:
        """Raises StorageFull."""
        self._store.reserve(self._owner, len(data))
        self.size += len(data)
        await asyncio.to_thread(self._file.write, data)

    async def finish(self, *, filename: str, purpose: str, seconds: int | None = None) -> StoredFile:
        """``seconds``: until it expires."""
        await asyncio.to_thread(self._sync)
        self.finished = True
        part = Path(self._file.name)
        return self._store.adopt(part, self._owner, size=self.size, filename=filename, purpose=purpose, seconds=seconds)

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
