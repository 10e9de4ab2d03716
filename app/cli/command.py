"""The command ``troupe``, also as ``python -m app``.

Only this module handles signals, sets up logging and decides the exit status: the engine and the application leave all
three to the program that embeds them.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from actors.options import ArgumentError, Arguments
from app.cli.arguments import load_arguments, with_spelled_names
from app.cli.help import overview, serve_help

if TYPE_CHECKING:
    from actors.workers.early_workers import EarlyWorkers

__all__ = ["main"]

log = logging.getLogger("troupe")

OK, USAGE, FAILED = 0, 2, 3

COMMANDS = ("serve", "chat", "batch", "dashboards", "help", "version")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with these words (default: the process's) and return the exit status.

    0 after an orderly stop; 2 for errors that a restart does not solve (wrong arguments, a missing or unsuitable model,
    an address in use); 3 when the engine failed otherwise.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    match words:
        case [] | ["help" | "-h" | "--help"]:
            print(overview(), end="")
            return OK
        case ["version" | "--version" | "-V"]:
            print(f"troupe {_version()}")
            return OK
        case ["serve", *rest]:
            return _serve(rest)
        case ["chat", *rest]:
            from app.cli.chat import chat

            return chat(rest)
        case ["batch", *rest]:
            from app.cli.batch import batch

            return batch(rest)
        case ["dashboards", *rest]:
            return _dashboards(rest)
        case [first, *_] if first.startswith("--") or Path(first).is_dir():
            return _serve(words)
        case [first, *_]:
            near = get_close_matches(first, COMMANDS, n=1)
            hint = f"Did you mean: troupe {near[0]}?" if near else f"To serve a model: troupe serve {first}"
            return _usage_error([f"there is no command {first!r}"], hint)
    return USAGE


def _serve(words: Sequence[str]) -> int:
    if "--help" in words or "-h" in words:
        print(serve_help(), end="")
        return OK
    if "--help-all" in words:
        print(serve_help(refused=True), end="")
        return OK
    try:
        arguments = load_arguments(words)
    except ArgumentError as error:
        return _usage_error(error.problems, "All arguments: troupe serve --help")
    return _run(arguments)


def _dashboards(words: Sequence[str]) -> int:
    if len(words) != 1 or words[0].startswith("-"):
        hint = "For example: troupe dashboards telemetry && docker compose -f telemetry/compose.yaml up"
        return _usage_error(["dashboards takes the one folder to put the files in"], hint)
    from telemetry.dashboards import copy_files

    try:
        for path in copy_files(Path(words[0])):
            print(path)
    except OSError as error:
        return _usage_error([str(error)], "All commands: troupe help")
    return OK


def _run(arguments: Arguments) -> int:
    # Here and not at the top: help and wrong arguments must not wait for the web framework.
    from actors.workers.early_workers import EarlyWorkers

    if arguments.node_rank:
        return _run_node(arguments)
    early = EarlyWorkers(arguments)
    try:
        return _run_with(arguments, early)
    finally:
        early.close()


def _run_with(arguments: Arguments, early: EarlyWorkers) -> int:
    import uvloop

    from app.application import create_app
    from app.server.garbage_collection import IDLE_REQUESTS, IdleGarbageCollector
    from app.server.hypercorn import configuration, listen, serve
    from app.server.startup_lines import exposure, url_of

    _configure_logging(arguments)
    config = configuration(arguments)
    try:
        sockets = listen(config)
    except OSError as error:
        where = f"{arguments.host}:{arguments.port}"
        return _usage_error(
            [f"cannot listen on {where}: {error.strerror or error}"], "Choose another --port or --host."
        )

    bound = sockets.insecure_sockets[0]
    if warning := exposure(arguments, bound):
        log.warning(warning)

    async def run() -> tuple[int, str]:
        app = create_app(arguments, early=early)
        app.url = url_of(bound)
        app.open_grpc()
        with IdleGarbageCollector(lambda: len(app.service.live) <= IDLE_REQUESTS).running():
            await serve(app, app, config, sockets)
        return app.exit_code, app.engine.status.error or ""

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            status, reason = runner.run(run())
    except ArgumentError as error:  # known only to the engine, such as an extra that is not installed
        return _wrong_arguments(error)
    if status == USAGE:
        for handler in log.handlers:
            handler.flush()  # the reason comes last
        return _usage_error([reason], "All arguments: troupe serve --help")
    if status == OK:
        log.info("The server has stopped in order.")
    return status


def _run_node(arguments: Arguments) -> int:
    """Run the workers of a node other than 0 until node 0 ends or a signal comes."""
    import uvloop

    from actors.engine.nodes import run_node
    from actors.text.model_files import ModelDownloadError
    from actors.workers.nodes.agent import NodeError

    _configure_logging(arguments)

    async def run() -> bool:
        node = asyncio.ensure_future(run_node(arguments))
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, node.cancel)
        try:
            return await node
        except asyncio.CancelledError:
            return True

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            in_order = runner.run(run())
    except ModelDownloadError as error:
        log.error("%s", error)
        return FAILED
    except ArgumentError as error:
        return _wrong_arguments(error)
    except ValueError as error:  # no model
        return _usage_error([str(error)], "All arguments: troupe serve --help")
    except NodeError as error:
        log.error("%s", error)
        return USAGE if error.permanent else FAILED
    log.info("Node %d has stopped%s.", arguments.node_rank, " in order" if in_order else ": node 0 failed")
    return OK if in_order else FAILED


def _configure_logging(arguments: Arguments) -> None:
    """Send the records of Troupe and its server, and Python's warnings, to standard error."""
    from app.server.logs import set_up_logging

    logging.captureWarnings(True)
    set_up_logging(arguments)


def _wrong_arguments(error: ArgumentError) -> int:
    problems = [with_spelled_names(problem) for problem in error.problems]
    return _usage_error(problems, "All arguments: troupe serve --help")


def _usage_error(problems: Sequence[str], hint: str) -> int:
    for problem in problems:
        print(f"troupe: {problem}", file=sys.stderr)
    print(hint, file=sys.stderr)
    return USAGE


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("troupe-llm")
    except PackageNotFoundError:
        return "(not installed: run from its source)"
