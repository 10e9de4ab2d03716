"""Renderer: renders chat templates in a child process, which may be killed.

A template can loop forever or fill the memory, and no sandbox for Python code prevents that. Kernel limits do: on the
CPU time of each rendering and on the memory of the process. Too much CPU time ends the process; its supervisor starts
the next one, and only that request fails. The process imports neither torch nor a tokenizer.
"""

from __future__ import annotations

import resource
import signal
from collections import OrderedDict

from actors.faults import FaultInjector
from actors.protocol import Render, RendererConfig, RendererProtocol
from actors.protocol.requests import InvalidRequest
from actors.runtime import Actor, handles
from actors.text.chat_template import ChatTemplate

__all__ = ["TIME_IS_UP", "Renderer"]

TIME_IS_UP = signal.SIGPROF
"""The signal that ends a renderer at its limit of CPU time. It has no handler that could delay it."""

_COMPILED = 8  # compiled templates kept, including the model's


class Renderer(Actor[RendererProtocol]):
    """Renders one conversation at a time, with the model's template or the conversation's own."""

    def __init__(self, config: RendererConfig) -> None:
        self._config = config
        self._faults = FaultInjector(config.faults) if config.faults else None
        self._compiled: OrderedDict[str, ChatTemplate] = OrderedDict()

    async def started(self) -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (self._config.memory, self._config.memory))

    @handles
    def render(self, message: Render) -> str:
        signal.setitimer(signal.ITIMER_PROF, self._config.processor_seconds)
        try:
            if self._faults is not None:
                self._faults.strike("render")
            return self._template(message.chat.template).render(message.chat)
        except MemoryError:
            self._compiled.clear()
            raise InvalidRequest(
                f"messages need more than {self._config.memory >> 20} MiB to be rendered. Shorten them.",
                param="messages",
            ) from None
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    def _template(self, own: str | None) -> ChatTemplate:
        """Get or compile a template. Compiled on first use, so one that takes too long fails only its request."""
        source = self._config.template if own is None else own
        template = self._compiled.pop(source, None)
        if template is None:
            try:
                template = ChatTemplate(source, self._config.variables)
            except ValueError as error:
                raise InvalidRequest(str(error), param="messages" if own is None else "chat_template") from None
            while len(self._compiled) >= _COMPILED:
                self._compiled.popitem(last=False)
        self._compiled[source] = template
        return template
