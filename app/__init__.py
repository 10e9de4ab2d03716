"""The front door: the Quart application, its HTTP APIs, the command line and the page.

``hypercorn app:asgi`` builds the application from the environment (``TROUPE_ARGS``) at first use; importing this
package alone loads nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from app.application import Troupe, create_app

    asgi: Troupe

__all__ = ["asgi", "create_app"]


def __getattr__(name: str) -> object:
    if name == "asgi":
        from app.application import create_app
        from app.arguments import load_arguments

        globals()["asgi"] = application = create_app(load_arguments())
        return application
    if name == "create_app":
        from app.application import create_app

        return create_app
    raise AttributeError(f"module 'app' has no attribute {name!r}")
