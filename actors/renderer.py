"""The Renderer actor: chat templates in a process of their own, which may be killed.

A template from a checkpoint can loop for hours and fill the memory, and no sandbox for Python code prevents that. The
kernel does: one rendering has so much processor time, the process so much memory. Who uses up the time ends the
process; its supervisor starts the next, and nobody but that request notices. The process imports neither torch nor a
tokenizer.
"""

from __future__ import annotations

import resource
import signal
from collections import OrderedDict

from actors.chat_template import ChatTemplate
from actors.faults import FaultInjector
from actors.protocol import Render, RendererConfig, RendererProtocol
from actors.requests import InvalidRequest
from actors.runtime import Actor, handles

__all__ = ["TIME_IS_UP", "Renderer"]

TIME_IS_UP = signal.SIGPROF
"""What ends a renderer that has used up its processor time. No handler is set, so that nothing can delay it."""

_COMPILED = 8  # templates kept, the model's among them


class Renderer(Actor[RendererProtocol]):
    """Renders one conversation at a time, by the model's template or by the conversation's own."""

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
                f"messages need more than {self._config.memory >> 20} MiB to be rendered. Send less.", param="messages"
            ) from None
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    def _template(self, own: str | None) -> ChatTemplate:
        """Compiled when it is first used: a template that cannot be compiled in time is then its request's failure."""
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
