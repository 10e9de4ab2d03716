"""Where an engine stands between its start and its end, and who waits for that."""

from __future__ import annotations

import asyncio
import logging
import time

from actors.model_files import ModelDownloadError
from actors.requests import EngineDraining, EngineFailed, EngineNotReady
from actors.status import EngineStatus, Phase

__all__ = ["Life"]

_log = logging.getLogger("troupe.engine")


class Life:
    """One engine's phase, the progress of its start, and the reason of its end.

    ``permanent``: what ended it ends every later start with the same arguments too.
    ``began``: seconds of ``time.monotonic``, None before the start. ``start_seconds``: from then until it was ready.
    ``settled`` is set when it is ready or over, ``stop`` when it is to end, ``broken`` when it cannot go on.
    """

    def __init__(self) -> None:
        self.phase: Phase = "starting"
        self.error: str | None = None
        self.permanent = False
        self.began: float | None = None
        self.start_seconds: float | None = None
        self.settled = asyncio.Event()
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
        """It is busy with ``stage``, of which ``fraction`` (0 .. 1) is done."""
        self._progress = (fraction, stage)

    def require_new(self) -> None:
        """Raises EngineFailed when it was closed before."""
        if self.began is not None:
            raise RuntimeError("This engine was started before. Make a new one.")
        if self.stop.is_set():
            raise EngineFailed("This engine was closed. Make a new one.")

    def begin(self) -> None:
        """From here on it runs."""
        self.began = time.monotonic()

    def ready(self) -> None:
        """The model is loaded, for the first time or again."""
        self._progress = (1.0, "ready")
        if self.start_seconds is None and self.began is not None:
            self.start_seconds = time.monotonic() - self.began
        if self.phase == "starting":
            self.phase = "ready"
        self.settled.set()

    def drain(self) -> None:
        if self.phase in ("starting", "ready"):
            self.phase = "draining"

    def give_up(self, reason: str, *, permanent: bool = False) -> None:
        """It cannot go on; the first reason counts."""
        if not self.error:
            self.error, self.permanent = reason, permanent
        self.broken.set()

    def failed(self, error: BaseException) -> None:
        """It has ended because of ``error``."""
        self.phase = "failed"
        self.error = str(error) or type(error).__name__
        expected = isinstance(error, (ValueError, EngineFailed))
        if isinstance(error, ValueError) and not isinstance(error, ModelDownloadError):
            self.permanent = True
        _log.error("The engine failed: %s", self.error, exc_info=None if expected else error)

    def stopped(self) -> None:
        """It has ended, or is about to, because it was closed; a failure stays one."""
        if self.phase != "failed":
            self.phase = "stopped"

    def require_admitting(self) -> None:
        """Raise what refuses a new request, if anything does."""
        if self.phase == "draining":
            raise EngineDraining("The engine is shutting down and takes no new requests.")
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
        """What is said to who comes before the model is loaded."""
        fraction, stage = self._progress
        return EngineNotReady(f"The engine is starting ({stage}, {fraction:.0%}). Try again soon.")
