"""Adapters: the LoRA adapters of an engine, by name. They outlive workers, which load them again."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from actors.options import Arguments
from actors.options.lora import is_adapter_name
from actors.protocol import LoadAdapter, NumberedAdapter, UnloadAdapter, WorkerProtocol
from actors.protocol.requests import InvalidRequest, RequestFailed
from actors.runtime import ActorDied, ActorRef, AskTimeout, MailboxFull
from actors.text.model_files import ModelPathError, adapter_source, resolve_adapter_path
from kernels.contract.adapters import ALL_TARGETS, AdapterInfo, AdapterSettings, read_adapter_info
from kernels.contract.errors import ConfigError

__all__ = ["Adapter", "Adapters", "adapter_settings", "read_adapters"]

_log = logging.getLogger("troupe.engine")

_LOAD_SECONDS = 300.0
_UNLOAD_SECONDS = 60.0
_RETRY_SECONDS = 0.1


class Adapter(msgspec.Struct, frozen=True):
    """A loaded adapter. ``index`` is never used twice, so that nothing of an earlier adapter of this name is taken for
    its own. ``created``: in Unix seconds. ``source``: see NumberedAdapter.
    """

    index: int
    name: str
    path: str
    pinned: bool
    info: AdapterInfo
    created: int
    source: str = ""

    @property
    def salt(self) -> bytes:
        """What separates its cached prefixes from all others: no client's salt, which is UTF-8, begins so."""
        return b"\xff" + self.index.to_bytes(8, "big")

    @property
    def numbered(self) -> NumberedAdapter:
        return NumberedAdapter(self.index, self.name, self.path, self.source)


def read_adapters(arguments: Arguments, base: Mapping[str, Any]) -> tuple[AdapterInfo, ...]:
    """What the adapters of --lora-paths are, after those of the hub have been downloaded. Raises a ConfigError with the
    reasons of all that are wrong, or ModelPathError."""
    found: list[AdapterInfo] = []
    wrong: list[ConfigError] = []
    for each in arguments.adapter_paths:
        try:
            found.append(_read(each.path, arguments, base))
        except ConfigError as error:
            wrong.append(error)
    if wrong:
        raise ConfigError("; ".join(str(error).removesuffix(".") for error in wrong))
    return tuple(found)


def adapter_settings(arguments: Arguments, infos: Sequence[AdapterInfo]) -> AdapterSettings | None:
    """The room that the workers make; None: no adapters. What is not given is that of the first adapters.

    The engine limits how many are loaded: a worker forgets one a step after its last request.
    """
    if not arguments.has_adapters:
        return None
    rank = arguments.max_lora_rank or max((info.rank for info in infos), default=16)
    targets = arguments.lora_target_modules or tuple(sorted({name for info in infos for name in info.targets}))
    plain = arguments.lora_backend in ("torch", "torch_native")
    return AdapterSettings(rank, arguments.max_loras_per_batch, targets or (ALL_TARGETS,), plain=plain)


def _read(
    path: str, arguments: Arguments, base: Mapping[str, Any], settings: AdapterSettings | None = None
) -> AdapterInfo:
    """What an adapter of a directory or of the hub is. Blocks. Raises ConfigError or ModelPathError."""
    directory = resolve_adapter_path(path, download_dir=arguments.download_dir)
    return read_adapter_info(str(directory), base, settings)


class Adapters:
    """The adapters that requests may name, and those that still have requests. ``workers``: of all replicas."""

    def __init__(self, arguments: Arguments, workers: Callable[[], Iterable[ActorRef[WorkerProtocol]]]) -> None:
        self.enabled = arguments.has_adapters
        self._arguments = arguments
        self._workers = workers
        self._names: dict[str, Adapter] = {}  # the one to unload first is first
        self._held: dict[int, Adapter] = {}  # that the workers hold
        self._lost: dict[str, str] = {}  # why those that workers could not load again are gone, by name
        self._loading: dict[int, str] = {}  # why a restarted worker lacks one that is being loaded; empty: none does
        self._users: Counter[int] = Counter()
        self._requests: Counter[int] = Counter()  # so far, by adapter
        self._unused: dict[int, asyncio.Event] = {}  # of those that are to be unloaded
        self._leaving: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count(1)
        self._changing = asyncio.Lock()
        self._settings: AdapterSettings | None = None
        self._base: Mapping[str, Any] = {}

    def begin(self, infos: Sequence[AdapterInfo], settings: AdapterSettings | None, base: Mapping[str, Any]) -> None:
        """Take the adapters of --lora-paths, which the workers load with the model. ``base``: its config.json."""
        self._settings, self._base = settings, base
        for each, info in zip(self._arguments.adapter_paths, infos, strict=True):
            self._hold(adapter := self._make(each.name, each.path, each.pinned, info))
            self._names[each.name] = adapter

    def _make(self, name: str, path: str, pinned: bool, info: AdapterInfo) -> Adapter:
        source = adapter_source(path, Path(info.path))
        return Adapter(next(self._numbers), name, info.path, pinned, info, int(time.time()), source)

    def _hold(self, adapter: Adapter) -> None:
        self._held[adapter.index] = adapter

    # -- requests

    def __iter__(self) -> Iterator[Adapter]:
        return iter(sorted(self._names.values(), key=lambda each: each.index))

    def find(self, name: str) -> Adapter | None:
        """The adapter of this name, if requests may use it."""
        return self._names.get(name)

    def numbered(self) -> tuple[NumberedAdapter, ...]:
        """What a worker loads with the model: also those whose last requests still run."""
        return tuple(each.numbered for each in self._held.values())

    def require(self, name: str) -> Adapter:
        """The adapter of this name. Raises InvalidRequest."""
        adapter = self._names.get(name)
        if adapter is None:
            raise InvalidRequest(
                self.loss(name) or f"The adapter {name[:128]!r} is not loaded here.",
                param="model",
                code="model_not_found",
            )
        return adapter

    def loss(self, name: str) -> str:
        """Why an adapter of this name is no longer loaded; empty: no worker has lost it."""
        reason = self._lost.get(name)
        if reason is None:
            return ""
        return (
            f"The adapter {name[:128]!r} is no longer loaded: restarted workers could not load it again ({reason}). "
            "Fix the cause, then load the adapter again."
        )

    def lose(self, lost: Mapping[int, str]) -> None:
        """Refuse further requests of adapters that a worker could not load again. ``lost``: the reasons by adapter
        number. Requests that run in replicas which still have the adapter end normally. The load of an
        adapter that is being loaded fails."""
        for index, reason in lost.items():
            if index in self._loading:
                self._loading[index] = reason
                continue
            adapter = self._held.get(index)
            if adapter is None or self._names.get(adapter.name) is not adapter:  # it is being unloaded
                continue
            _log.error("Adapter %s could not be loaded again; its requests fail: %s", adapter.name, reason)
            self._lost[adapter.name] = reason
            del self._names[adapter.name]
            self._forget(adapter)

    def use(self, adapter: Adapter) -> None:
        """Count a request of an adapter."""
        self._users[adapter.index] += 1
        self._requests[adapter.index] += 1
        if self._arguments.lora_eviction_policy == "lru" and self._names.get(adapter.name) is adapter:
            self._names[adapter.name] = self._names.pop(adapter.name)

    def requests(self, adapter: Adapter) -> int:
        """Requests of an adapter since it was loaded."""
        return self._requests[adapter.index]

    def __len__(self) -> int:
        return len(self._names)

    def leave(self, adapter: Adapter) -> None:
        """A request of an adapter has ended."""
        self._users[adapter.index] -= 1
        if not self._users[adapter.index]:
            del self._users[adapter.index]
            if adapter.index in self._unused:
                self._unused[adapter.index].set()

    # -- loading

    async def load(self, name: str, path: str, *, pinned: bool | None = None, replace: bool = False) -> Adapter:
        """Load a local directory, or a repository of the hub, in every worker, beside running steps. ``replace``: if
        an adapter of this name is loaded, its running requests end with it, and later ones have the new one.
        ``pinned``: never unload it to make room; None: as the one that it replaces. Raises InvalidRequest."""
        if "://" in path:
            raise InvalidRequest(
                "lora_path is a URL; give a directory of the server or owner/name of the hub.", param="lora_path"
            )
        if not is_adapter_name(name):
            raise InvalidRequest("lora_name: needs printable characters, of which one is no space.", param="lora_name")
        async with self._changing:
            if name in self._arguments.model_names:
                raise InvalidRequest(
                    f"lora_name: {name[:128]!r} is the name of the model. Take another name.", param="lora_name"
                )
            if name in self._names and not replace:
                raise InvalidRequest(
                    f"lora_name: {name[:128]!r} is loaded already. Unload it, or take another name.", param="lora_name"
                )
            try:
                info = await asyncio.to_thread(_read, path, self._arguments, self._base, self._settings)
            except (ConfigError, ModelPathError) as error:
                raise InvalidRequest(f"lora_path: {str(error).removesuffix('.')}.", param="lora_path") from None
            self._leaving_for(name)
            if pinned is None:
                pinned = name in self._names and self._names[name].pinned
            adapter = self._make(name, path, pinned, info)
            self._hold(adapter)  # a worker that starts meanwhile loads it with the model
            self._loading[adapter.index] = ""
            try:
                asked = [self._ask(each, adapter) for each in self._workers()]
                answers = await asyncio.gather(*asked, return_exceptions=True)  # none loads it later
                if failed := next((each for each in answers if isinstance(each, BaseException)), None):
                    raise failed
                if wrong := self._loading[adapter.index] or next(filter(None, answers), ""):
                    raise InvalidRequest(f"lora_path: {wrong}.", param="lora_path")
            except BaseException as error:
                task = self._forget(adapter)
                if isinstance(error, Exception):
                    await asyncio.shield(task)
                raise
            finally:
                del self._loading[adapter.index]
            if (evicted := self._leaving_for(name)) is not None:
                del self._names[evicted.name]
                self._forget(evicted)  # when its requests have ended
            self._names[name] = adapter
            self._lost.pop(name, None)
            return adapter

    def _leaving_for(self, name: str) -> Adapter | None:
        """The adapter that leaves for one of this name; None: there is room. Raises InvalidRequest where all are
        pinned."""
        if (same := self._names.get(name)) is not None:
            return same
        most = self._arguments.max_loaded_loras
        if most is None or len(self._names) < most:
            return None
        first = next((each for each in self._names.values() if not each.pinned), None)
        if first is None:
            raise InvalidRequest(
                f"lora_name: {len(self._names)} adapters are loaded and pinned, and --max-loaded-loras is {most}. "
                "Unload one.",
                param="lora_name",
            )
        return first

    async def _ask(self, worker: ActorRef[WorkerProtocol], adapter: Adapter) -> str:
        """A worker that dies meanwhile loads it with the model; it is asked again, for its answer."""
        until = time.monotonic() + _LOAD_SECONDS
        while True:
            try:
                return await worker.ask(LoadAdapter(adapter.numbered), timeout=_LOAD_SECONDS)
            except (ActorDied, MailboxFull):
                if not worker.is_alive() or time.monotonic() > until:
                    raise RequestFailed("The adapter was not loaded: a worker has died.") from None
                await asyncio.sleep(_RETRY_SECONDS)
            except AskTimeout:
                raise RequestFailed(f"The adapter was not loaded within {_LOAD_SECONDS:g} s.") from None

    async def unload(self, name: str) -> None:
        """Take no more requests of an adapter, and forget it when those that run have ended. Raises InvalidRequest.

        It is forgotten even if the caller does not wait for it. One that workers have lost is forgotten already.
        """
        adapter = self._names.pop(name, None)
        if adapter is None and self._lost.pop(name, None) is not None:
            return
        if adapter is None:
            loaded = ", ".join(repr(each) for each in list(self._names)[:8]) or "none"
            raise InvalidRequest(
                f"lora_name: no adapter {name[:128]!r} is loaded. Loaded (at most 8 are listed): {loaded}.",
                param="lora_name",
            )
        await asyncio.shield(self._forget(adapter))

    def _forget(self, adapter: Adapter) -> asyncio.Task[None]:
        task = asyncio.create_task(self._when_unused(adapter), name=f"troupe-unload-{adapter.index}")
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)
        return task

    async def _when_unused(self, adapter: Adapter) -> None:
        if self._users[adapter.index]:
            self._unused[adapter.index] = asyncio.Event()
            await self._unused[adapter.index].wait()
            del self._unused[adapter.index]
        del self._held[adapter.index]
        self._requests.pop(adapter.index, None)
        for worker in self._workers():
            await self._unload_from(worker, adapter)

    async def _unload_from(self, worker: ActorRef[WorkerProtocol], adapter: Adapter) -> None:
        until = time.monotonic() + _UNLOAD_SECONDS
        while time.monotonic() < until:
            with contextlib.suppress(MailboxFull):
                with contextlib.suppress(ActorDied, AskTimeout):  # one that dies forgets it by that
                    await worker.ask(UnloadAdapter(adapter.index), timeout=_UNLOAD_SECONDS)
                return
            await asyncio.sleep(_RETRY_SECONDS)

    def close(self) -> None:
        """Stop waiting for requests: the engine ends."""
        for task in self._leaving:
            task.cancel()
