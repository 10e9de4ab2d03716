"""Frames of the feed: four a second, made once for all viewers, and only while there are viewers."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from actors.engine.report import adapter_requests
from app.live.feed.answers import (
    ActorView,
    AdapterView,
    CacheGroupView,
    CacheView,
    Frame,
    LoadView,
    ModelView,
    RequestView,
)
from app.live.feed.graph import edges, role_of
from app.live.feed.requests import RequestViews
from app.server.auth import sees_all
from app.server.exchange import Exchange

if TYPE_CHECKING:
    from actors.engine.engine import Engine
    from app.server.service import Service

__all__ = ["FRAME_SECONDS", "MAX_ADAPTERS", "MAX_VIEWERS", "Feed"]

FRAME_SECONDS = 0.25
MAX_VIEWERS = 32
MAX_ADAPTERS = 32

_MARGIN = 0.001  # seconds

_encode = msgspec.json.encode


class Feed:
    """The frames of one server.

    There is no task and no queue: a viewer that is ready waits for the next tick and takes its frame, which the first
    viewer makes. A slow viewer notices that it missed some and takes a whole frame.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self.requests = RequestViews(service.engine.timelines)
        self._viewers: set[Exchange] = set()
        self._frame: Frame | None = None
        self._encoded: dict[tuple[bool, str], bytes] = {}  # of the current frame: whole or changes, by tenant
        self._changed: dict[str, list[RequestView]] = {}  # of the current frame, by tenant
        self.drawn = 0

    @property
    def viewers(self) -> int:
        self._viewers = {exchange for exchange in self._viewers if not exchange.closed.is_set()}
        return len(self._viewers)

    def admit(self, exchange: Exchange) -> bool:
        """Admit a viewer until its exchange ends. Returns False if there are too many."""
        if self.viewers >= MAX_VIEWERS:
            return False
        self._viewers.add(exchange)
        return True

    async def next(self, seen: int, tenant: str = "") -> tuple[int, bytes]:
        """The next frame as JSON and its number, for a viewer whose last frame was ``seen`` (0: none).

        It has the requests that ``tenant`` may see, and the load of all.
        """
        frame = self._current()
        while frame.number == seen:  # timers may be a little early
            await asyncio.sleep(FRAME_SECONDS - time.monotonic() % FRAME_SECONDS + _MARGIN)
            frame = self._current()
        whole = not seen or seen != frame.number - 1
        audience = "" if sees_all(tenant) else tenant
        encoded = self._encoded.get((whole, audience))
        if encoded is None:
            changed = self._changed.get(audience)
            if changed is None:  # once a frame, even without a reader: the changes of the next frame begin here
                changed = self._changed[audience] = self.requests.changed(frame.at, audience)
            shown = self.requests.all(frame.at, audience) if whole else changed
            frame = msgspec.structs.replace(frame, whole=whole, requests=shown)
            encoded = self._encoded[whole, audience] = _encode(frame)
        return frame.number, encoded

    def _current(self) -> Frame:
        now = time.monotonic()
        frame = self._frame
        if frame is None or int(frame.at / FRAME_SECONDS) != int(now / FRAME_SECONDS):
            self.drawn += 1
            frame = self._draw(self.drawn, now)
            self._frame, self._encoded, self._changed = frame, {}, {}
        return frame

    def _draw(self, number: int, now: float) -> Frame:
        service, engine = self._service, self._service.engine
        actors = _actors(engine)
        return Frame(
            number=number,
            at=now,
            unix=time.time(),
            whole=False,
            viewers=self.viewers,
            http=sum(exchange not in self._viewers for exchange in service.live),
            restarts=sum(actor.restarts for actor in actors),
            model=_model(service),
            load=_load(engine, now),
            cache=_cache(engine),
            actors=actors,
            edges=edges(engine.actor_messages.flows, steps=engine.board.steps, tokens=engine.board.output_tokens),
            adapters=_adapters(engine),
            adapters_loaded=len(engine.adapters),
            live=len(engine.intake) if engine.intake is not None else 0,
            requests=[],
        )


def _model(service: Service) -> ModelView:
    status, info = service.status, service.engine.model_info
    view = ModelView(
        name=service.model_name, phase=status.phase, stage=status.stage, progress=round(status.progress, 3)
    )
    if info is not None:
        view.device = info.device
        view.dtype = info.dtype
        view.parameters = info.parameters
        view.context_length = info.context_length
    return view


def _load(engine: Engine, now: float) -> LoadView:
    board, intake = engine.board, engine.intake
    view = LoadView(
        steps=board.steps,
        step_seconds=round(board.step_run_seconds, 6),
        step_age=round(board.step_age(now), 4),
        output_tokens=board.output_tokens,
        refused=intake.admission.refused if intake is not None else 0,
    )
    load = board.scheduler
    if load is not None:
        view.running = load.running
        view.waiting = load.waiting
        view.waiting_tokens = load.waiting_tokens
        view.preemptions = load.preemptions
    return view


def _cache(engine: Engine) -> CacheView | None:
    usage = engine.board.cache()
    if usage is None:
        return None
    return CacheView(
        page_size=usage.page_size,
        total=usage.total,
        free=usage.free,
        evictable=usage.evictable,
        used=usage.used,
        queried_tokens=usage.queried_tokens,
        hit_tokens=usage.hit_tokens,
        groups=[CacheGroupView(name=name, total=g.total, used=g.used) for name, g in usage.groups().items()],
    )


def _adapters(engine: Engine) -> list[AdapterView]:
    if not len(engine.adapters):
        return []
    live = adapter_requests(engine.timelines)
    resident = Counter(engine.board.resident_adapters)
    views = [
        AdapterView(
            name=adapter.name,
            requests=engine.adapters.requests(adapter),
            live=sum(live.get(adapter.name, ())),
            resident=resident[adapter.index],
        )
        for adapter in engine.adapters
    ]
    return heapq.nlargest(MAX_ADAPTERS, views, key=lambda view: (view.resident > 0, view.requests))


def _actors(engine: Engine) -> list[ActorView]:
    views = {}
    for status in engine.actors():
        views[status.name] = ActorView(
            name=status.name,
            role=role_of(status.name),
            state=status.state,
            restarts=status.incarnation or 0,
            depth=sum(status.mailbox.values()),
            message=status.message,
            message_age=None if status.message_age is None else round(status.message_age, 3),
        )
    for (name, _), flow in engine.actor_messages.flows.items():
        view = views.get(name)
        if view is not None:
            view.handled += flow.count
            view.busy += flow.busy_seconds
            view.waited += flow.wait_seconds
    return list(views.values())
