"""Rendering: sends conversations to the renderers, and handles one that kills its renderer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from actors.protocol import Render, RendererConfig, RendererProtocol
from actors.protocol.requests import LIMITS, Chat, EngineFailed, InvalidRequest, RequestFailed
from actors.runtime import ActorDied, ActorRef, ActorSystem, AskTimeout, Backoff, ChildCrash, Strategy, Supervision
from actors.text.fair_pool import FairPool
from actors.text.renderer import TIME_IS_UP

__all__ = ["Rendering"]

PROCESSOR_SECONDS = 5.0
"""CPU seconds of one rendering. A usual template takes about one for the largest request body."""

MEMORY = 512 << 20

MAX_RENDERERS = 4
"""For any number of tokenizers: rendering is much faster than encoding, and each renderer is a process of 20 MiB."""

_PATIENCE_SECONDS = 60.0
_START_TIMEOUT_SECONDS = 60.0
_SILENCE_SECONDS = 60.0  # seconds without a heartbeat: it is stopped or swapped out, which no limit of CPU time ends


class Rendering:
    """The renderers of one engine: several for the model's template, and one for templates in requests.

    Tenants take turns: one tenant's requests delay another's by one rendering at most.
    """

    def __init__(
        self, renderers: Sequence[ActorRef[RendererProtocol]], guests: ActorRef[RendererProtocol] | None
    ) -> None:
        self._renderers = FairPool(renderers) if renderers else None
        self._guests = FairPool([guests]) if guests is not None else None

    @classmethod
    async def start(
        cls,
        system: ActorSystem,
        *,
        template: str | None,
        variables: dict[str, str],
        count: int,
        guests: bool,
        faults: str = "",
    ) -> Rendering:
        """Start ``count`` processes, at most :data:`MAX_RENDERERS`; they start while the worker loads.

        Without a template none is started for it.
        """

        async def spawn(name: str) -> ActorRef[RendererProtocol]:
            return await system.spawn_process(
                RendererProtocol,
                name=name,
                target="actors.text.renderer:Renderer",
                config=RendererConfig(
                    template=template or "",
                    variables=variables,
                    processor_seconds=PROCESSOR_SECONDS,
                    memory=MEMORY,
                    faults=faults,
                ),
                # Requests cause the deaths, so no number of them is a reason to give up.
                supervision=Supervision(Strategy.RESTART_ONE, max_restarts=1_000_000, backoff=Backoff(0.02, max=1.0)),
                start_timeout=_START_TIMEOUT_SECONDS,
                stop_timeout=1.0,
                heartbeat_timeout=_SILENCE_SECONDS,
                capacity=8192,
                window=1,  # a death loses one conversation only
                wait=False,
            )

        renderers = [await spawn(f"renderer-{n}") for n in range(min(count, MAX_RENDERERS))] if template else []
        return cls(renderers, await spawn("renderer-guests") if guests else None)

    async def render(self, chat: Chat, tenant: str = "") -> str:
        """Render a conversation.

        Raises InvalidRequest if it cannot be rendered, RequestFailed if the renderer died twice for another reason or
        is too busy, EngineFailed if it has stopped.
        """
        too_late = f"The chat template was not rendered within {_PATIENCE_SECONDS:g} s. Try again."
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS) as waiting, self._pool(chat).lend(tenant) as ref:
                waiting.reschedule(None)
                return await self._ask(ref, chat, too_late)
        except TimeoutError as error:
            raise RequestFailed(too_late) from error

    async def _ask(self, ref: ActorRef[RendererProtocol], chat: Chat, too_late: str) -> str:
        try:
            try:
                return await ref.ask(Render(chat=chat), timeout=_PATIENCE_SECONDS)
            except ActorDied as error:
                if _time_is_up(error):
                    raise
                # The death may have another cause: retry once with the next incarnation.
                return await ref.ask(Render(chat=chat), timeout=_PATIENCE_SECONDS)
        except ActorDied as error:
            if _time_is_up(error):
                field = "messages" if chat.template is None else "chat_template"
                raise InvalidRequest(
                    f"{field}: the chat template was stopped after {PROCESSOR_SECONDS:g} s of processor time. "
                    "Send less.",
                    param=field,
                    code="template_timeout",
                ) from None
            if not ref.is_alive():
                raise EngineFailed("The engine was stopped.") from error
            raise RequestFailed("The chat template's process ended on this request.") from error
        except AskTimeout as error:
            raise RequestFailed(too_late) from error
        except UnicodeEncodeError:
            raise InvalidRequest("messages contain a lone surrogate. Send UTF-8.", param="messages") from None
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise InvalidRequest(
                f"messages, tools and chat_template_kwargs must be plain JSON: {error}", param="messages"
            ) from None

    def _pool(self, chat: Chat) -> FairPool[ActorRef[RendererProtocol]]:
        if chat.template is not None:
            if self._guests is None:
                raise InvalidRequest(
                    "chat_template: templates from requests are not rendered; start the server with --chat-template, "
                    "or with --trust-request-chat-template.",
                    param="chat_template",
                    code="unsupported_parameter",
                )
            if len(chat.template) > LIMITS.template_chars:
                raise InvalidRequest(
                    f"chat_template has {len(chat.template)} characters; at most {LIMITS.template_chars} are allowed.",
                    param="chat_template",
                )
            return self._guests
        if self._renderers is None:
            raise InvalidRequest(
                "This model has no chat template. Use /v1/completions, or start the server with --chat-template FILE.",
                param="messages",
                code="no_chat_template",
            )
        return self._renderers


def _time_is_up(error: ActorDied) -> bool:
    return isinstance(error.cause, ChildCrash) and error.cause.returncode == -TIME_IS_UP
