"""Files in one directory, under names of our own: their bytes, and a small JSON file each that describes them."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from actors.options import ArgumentError
from actors.requests.admission import max_per_tenant

__all__ = [
    "FileStore",
    "FileWriter",
    "StorageFull",
    "StoredFile",
    "TooManyUploads",
    "is_id",
    "new_file_id",
    "read_record",
    "write_record",
]

log = logging.getLogger("troupe.batches")

MAX_FILES = 20_000
"""Files of one owner."""

MAX_UPLOADS = 16
"""Files of one owner that arrive together."""

_ID = re.compile(r"(file-|batch_)[0-9a-f]{32}")

Record = TypeVar("Record", bound=msgspec.Struct)


class StorageFull(Exception):
    """The directory, or the share of one key, has no room for more."""


class TooManyUploads(Exception):
    """So many files of one owner are arriving that the next one must wait."""


class StoredFile(msgspec.Struct, kw_only=True):
    """``filename``: the client's name, which is never used as one here. Times in seconds since 1970."""

    id: str
    owner: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    expires_at: int | None = None


def new_file_id() -> str:
    return f"file-{secrets.token_hex(16)}"


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
    ``uses``: set by the owner of this store; whether a file must stay, although its time has come.

    Only one server uses a directory at a time. Raises ArgumentError.
    """

    def __init__(self, folder: Path, limit: int, tenants: int = 1) -> None:
        self.limit = limit
        self._share = max_per_tenant(limit, tenants)
        self._files: dict[str, StoredFile] = {}
        self._held: dict[str, int] = {}  # bytes by owner, with those that are being written
        self._writing: Counter[str] = Counter()  # files by owner
        self.uses: Callable[[str], bool] = lambda file_id: False
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
        """Find the files, and delete what a server left that ended while it wrote or deleted one."""
        for path in [*self._folder.glob("*.part"), *self._folder.glob("*.new"), *self.batches.glob("*.new")]:
            path.unlink()
        for path in self._folder.glob("file-*.bin"):
            if not path.with_suffix(".json").exists():
                path.unlink()
        for path in sorted(self._folder.glob("file-*.json")):
            if not path.with_suffix(".bin").exists():
                path.unlink()
                continue
            file = read_record(path, StoredFile)
            if file is None or file.id != path.stem or not is_id(file.id) or not self.path(file.id).is_file():
                log.warning("%s cannot be read; its file takes space, but belongs to nobody", path)
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
        """Delete the files whose time has come, unless they are used."""
        now = time.time()
        for file in [file for file in self._files.values() if file.expires_at is not None and file.expires_at <= now]:
            if not self.uses(file.id):
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
        """A new file, which is deleted unless it is finished. Raises StorageFull and TooManyUploads."""
        if self._writing[owner] >= MAX_UPLOADS:
            raise TooManyUploads
        self.expire()
        if sum(file.owner == owner for file in self._files.values()) >= MAX_FILES:
            raise StorageFull
        part = self._folder / f"{secrets.token_hex(16)}.part"
        with part.open("xb") as file:
            os.chmod(part, 0o600)
            writer = FileWriter(self, owner, file)
            self._writing[owner] += 1
            try:
                yield writer
            finally:
                self._writing[owner] -= 1
                if not writer.finished:
                    part.unlink(missing_ok=True)
                    self.reserve(owner, -writer.size)

    def adopt(self, part: Path, file: StoredFile) -> None:
        """Make a file of the bytes in ``part``, a path of this directory. Their number is reserved already."""
        # The record goes first: a record without bytes is deleted at the next start, and ``part`` is still there.
        write_record(self._folder / f"{file.id}.json", file)
        os.replace(part, self.path(file.id))
        self._files[file.id] = file


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
        now = int(time.time())
        file = StoredFile(
            id=new_file_id(),
            owner=self._owner,
            bytes=self.size,
            created_at=now,
            filename=filename,
            purpose=purpose,
            expires_at=None if seconds is None else now + seconds,
        )
        self._store.adopt(Path(self._file.name), file)
        return file

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
