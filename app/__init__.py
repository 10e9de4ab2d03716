"""The front door: the Quart application, its HTTP APIs, the command line and the page.

``hypercorn app:asgi`` serves :func:`asgi`, which builds the application from the environment (``TROUPE_ARGS``) at its
first call; importing this package alone loads nothing.
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
    from app.arguments import load_arguments
    from app.logs import set_up_logging

    arguments = load_arguments()
    if not logging.getLogger("troupe").hasHandlers():  # else somebody has decided already where records go
        set_up_logging(arguments, others=())  # the ASGI server has set its own up
    return create_app(arguments)


async def asgi(scope: Any, receive: Any, send: Any) -> None:
    """The ASGI application. Wrong arguments fail the server's start with a message that names them."""
    if scope["type"] == "lifespan":
        try:
            _application()
        except (ImportError, ValueError) as error:  # a package in the place of ours, wrong arguments
            if not isinstance(error, ImportError):
                from actors.arguments import ArgumentError

                if not isinstance(error, ArgumentError):
                    raise
            await receive()
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
    await _application()(scope, receive, send)
