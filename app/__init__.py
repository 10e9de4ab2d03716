"""The server: the Quart application, its HTTP APIs, the command line and the live page.

``hypercorn app:asgi`` serves :func:`asgi`, which builds the application from the environment (``TROUPE_ARGS``) at its
first call. Importing this package loads nothing.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from app.application import Troupe

__all__ = ["asgi"]


@functools.cache
def _application() -> Troupe:
    import logging

    from app.application import create_app
    from app.cli.arguments import load_arguments
    from app.server.logs import set_up_logging

    arguments = load_arguments()
    if not logging.getLogger("troupe").hasHandlers():  # otherwise the embedding program has decided where records go
        set_up_logging(arguments, others=())  # the ASGI server has set up its own
    return create_app(arguments)


async def asgi(scope: Any, receive: Any, send: Any) -> None:
    """The ASGI application. Wrong arguments fail the start with a message that names them."""
    if scope["type"] == "lifespan":
        try:
            _application()
        except (ImportError, ValueError) as error:  # another package in place of ours, or wrong arguments
            if not isinstance(error, ImportError):
                from actors.options import ArgumentError

                if not isinstance(error, ArgumentError):
                    raise
            await receive()
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
    await _application()(scope, receive, send)
