"""Lifecycle: the phase of an engine between its start and its end."""

from __future__ import annotations

import asyncio
import logging
import time

from actors.engine.status import EngineStatus, Phase
from actors.protocol.requests import EngineDraining, EngineFailed, EngineNotReady
from actors.text.model_files import ModelDownloadError

__all__ = ["Lifecycle"]

_log = logging.getLogger("troupe.engine")


class Lifecycle:
    """One engine's phase, the progress of its start, and the reason of its end.

    ``permanent``: whether every later start with the same arguments fails too. ``began``: seconds of
    ``time.monotonic``, None before the start. ``start_seconds``: from then until it was ready. ``start_over`` is set
    when the engine is ready or has failed, ``stop`` when it must end, ``broken`` when it cannot continue.
    """

    def __init__(self) -> None:
        self.phase: Phase = "starting"
        self.error: str | None = None
        self.permanent = False
        self.began: float | None = None
        self.start_seconds: float | None = None
        self.start_over = asyncio.Event()
        self.stop = asyncio.Event()
        self.broken = asyncio.Event()
        self._progress = (0.0, "waiting")

    @property
    def status(self) -> EngineStatus:
        progress, stage = self._progress
        return EngineStatus(
            phase=self.phase, progress=progress, stage=stage, error=self.error, permanent=self.permanent
        )

    def progress(self, stage: str, fraction: float) -> None:
        """Report that ``fraction`` (0 .. 1) of the start is done, and ``stage`` comes next."""
        self._progress = (fraction, stage)

    def require_new(self) -> None:
        """Raise EngineFailed if it was closed, RuntimeError if it was started."""
        if self.began is not None:
            raise RuntimeError("This engine was already started. Create a new one.")
        if self.stop.is_set():
            raise EngineFailed("This engine was closed. Create a new one.")

    def begin(self) -> None:
        """Record the begin of the start."""
        self.began = time.monotonic()

    def ready(self) -> None:
        """Record that the model is loaded, for the first time or again."""
        self._progress = (1.0, "ready")
        if self.start_seconds is None and self.began is not None:
            self.start_seconds = time.monotonic() - self.began
        if self.phase == "starting":
            self.phase = "ready"
        self.start_over.set()

    def drain(self) -> None:
        if self.phase in ("starting", "ready"):
            self.phase = "draining"

    def give_up(self, reason: str, *, permanent: bool = False) -> None:
        """Record that the engine cannot continue; the first reason counts."""
        if not self.error:
            self.error, self.permanent = reason, permanent
        self.broken.set()

    def failed(self, error: BaseException) -> None:
        """Record that the engine has ended because of ``error``."""
        self.phase = "failed"
        self.error = str(error) or type(error).__name__
        expected = isinstance(error, (ValueError, EngineFailed))
        if isinstance(error, ValueError) and not isinstance(error, ModelDownloadError):
            self.permanent = True
        _log.error("The engine failed: %s", self.error, exc_info=None if expected else error)

    def stopped(self) -> None:
        """Record that the engine was closed, unless it has failed."""
        if self.phase != "failed":
            self.phase = "stopped"

    def require_admitting(self) -> None:
        """Raise EngineDraining, or as :meth:`require_running`, if new requests must be refused."""
        if self.phase == "draining":
            raise EngineDraining("The engine is shutting down and accepts no new requests.")
        self.require_running()

    def require_running(self) -> None:
        """Raise EngineFailed after the end and EngineNotReady before the start."""
        if self.phase == "failed":
            raise EngineFailed(self.error or "The engine failed.")
        if self.phase == "stopped":
            raise EngineFailed("The engine was closed.")
        if self.began is None:
            raise EngineNotReady("The engine was not started. Use `async with engine`, or await engine.start().")

    def not_ready(self) -> EngineNotReady:
        """The error of a request that arrives before the model is loaded."""
        fraction, stage = self._progress
        return EngineNotReady(f"The engine is starting ({stage}, {fraction:.0%}). Try again soon.")
