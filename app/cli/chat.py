"""``troupe chat``: a conversation in the terminal with any server of OpenAI's chat API."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, TextIO

from app.cli.client import DEFAULT_URL, ApiClient, ClientError

__all__ = ["ChatSession", "chat"]

_OK, _FAILED, _USAGE = 0, 1, 2
_UNSAFE = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u202a-\\u202e\\u2066-\\u2069]")
"""Control characters, with which a model's text could write anywhere on the screen or turn the direction of writing."""

_HELP = """\
  /system TEXT   set the system message; without a text, remove it
  /model NAME    use another model; without a name, list them
  /clear         forget the conversation
  /save FILE     write the conversation as JSON
  /help          this list
  /quit          end, as Ctrl-D does
A line that ends in \\ goes on in the next one. Ctrl-C stops an answer."""


class ChatSession:
    """One conversation. ``read(prompt)`` returns a line, and raises EOFError at the end of the input. ``out``: where
    answers go. ``tools``: as in a chat request; the user types their results."""

    def __init__(
        self, client: ApiClient, model: str, read: Callable[[str], str], out: TextIO, options: dict[str, Any]
    ) -> None:
        self.model = model
        self.messages: list[dict[str, Any]] = []
        self.failed = False  # whether a turn ended with an error
        self.system: str | None = options.pop("system", None)
        self._client = client
        self._read = read
        self._out = out
        self._line_ended = True
        self._options = options
        self._colours = out.isatty() and not os.environ.get("NO_COLOR")

    def run(self) -> None:
        """Converse until the input ends."""
        while True:
            try:
                line = self._read_lines()
            except EOFError:
                return
            except KeyboardInterrupt:
                self._say("\n/quit or Ctrl-D ends the chat.")
                continue
            if line.startswith("/"):
                if self._command(*line[1:].partition(" ")[::2]):
                    return
            elif line:
                self.ask(line)

    def ask(self, text: str) -> None:
        """One turn: the user's text, the answer, and results of tools until there are no calls."""
        before = len(self.messages)
        self.messages.append({"role": "user", "content": text})
        try:
            while calls := self._answer():
                for call in calls:
                    result = self._read(f"result of {call['function']['name']}> ")
                    self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        except ClientError as error:
            del self.messages[before:]  # so that the next turn does not repeat the mistake
            self.failed = True
            self._say(("" if self._line_ended else "\n") + f"error: {error}")
        except (KeyboardInterrupt, EOFError):
            del self.messages[before:]
            self._say("\n(stopped; this turn is forgotten)")

    def _read_lines(self) -> str:
        lines = [self._read("> ").rstrip()]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(self._read("… ").rstrip())
        return "\n".join(lines).strip()

    # -- an answer

    def _answer(self) -> list[dict[str, Any]]:
        """Print an answer as it arrives, and keep it. Returns its tool calls."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        body = {"model": self.model, "messages": system + self.messages, "stream": True, **self._options}
        content: list[str] = []
        calls: list[dict[str, Any]] = []
        thinking, reason = False, None
        with contextlib.closing(self._chunks(body)) as chunks:
            try:
                for chunk in chunks:
                    delta, reason = chunk.get("delta") or {}, chunk.get("finish_reason") or reason
                    if thought := delta.get("reasoning_content") or delta.get("reasoning"):
                        thinking = True
                        self._write(thought, dim=True)
                    if text := delta.get("content"):
                        if thinking and not content:
                            self._write("\n\n")
                        content.append(text)
                        self._write(text)
                    for piece in delta.get("tool_calls") or ():
                        self._add_call(calls, piece)
            except KeyboardInterrupt:
                if not content:
                    raise
                reason, calls = "stopped", []
        self._say("" if reason not in ("length", "stopped") else f"\n({reason})")
        message: dict[str, Any] = {"role": "assistant", "content": "".join(content)}
        if calls:
            message["tool_calls"] = calls
        for call in calls:
            self._write(f"{call['function']['name']}({call['function']['arguments']})\n", dim=True)
        self.messages.append(message)
        return calls

    def _chunks(self, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        for event in self._client.events("/v1/chat/completions", json.dumps(body).encode()):
            yield from event.get("choices") or ()

    @staticmethod
    def _add_call(calls: list[dict[str, Any]], piece: dict[str, Any]) -> None:
        function = piece.get("function") or {}
        if piece.get("id") or not calls:
            name = function.get("name") or ""
            calls.append({"id": piece.get("id") or "", "type": "function", "function": {"name": name, "arguments": ""}})
        calls[-1]["function"]["arguments"] += function.get("arguments") or ""

    # -- commands

    def _command(self, name: str, rest: str) -> bool:
        """Run a command; returns whether the chat ends."""
        rest = rest.strip()
        match name:
            case "quit" | "exit" | "q":
                return True
            case "help":
                self._say(_HELP)
            case "clear":
                self.messages.clear()
                self._say("The conversation is empty.")
            case "system":
                self.system = rest or None
                self._say("The system message is set." if rest else "There is no system message.")
            case "model":
                self._model(rest)
            case "save":
                self._save(rest)
            case _:
                self._say(f"/{name}: there is no such command. /help lists them.")
        return False

    def _model(self, name: str) -> None:
        try:
            names = model_names(self._client)
        except ClientError as error:
            self._say(f"error: {error}")
            return
        if name and name in names:
            self.model = name
        elif name:
            self._say(f"{name}: is none of the server's models.")
        self._say("\n".join(f"{'*' if one == self.model else ' '} {one}" for one in names))

    def _save(self, path: str) -> None:
        if not path:
            self._say("/save needs the name of a file, which is not overwritten.")
            return
        system = [{"role": "system", "content": self.system}] if self.system else []
        text = json.dumps({"model": self.model, "messages": system + self.messages}, indent=2, ensure_ascii=False)
        try:
            with Path(path).expanduser().open("x", encoding="utf-8") as file:
                file.write(text + "\n")
        except OSError as error:
            self._say(f"{path}: cannot be written: {error.strerror}")
        else:
            self._say(f"{len(self.messages)} messages are in {path}.")

    # -- output

    def _write(self, text: str, *, dim: bool = False) -> None:
        text = _UNSAFE.sub("", text)
        self._line_ended = text.endswith("\n") if text else self._line_ended
        self._out.write(f"\x1b[2m{text}\x1b[22m" if dim and self._colours else text)
        self._out.flush()

    def _say(self, text: str) -> None:
        self._write(text + "\n")


def model_names(client: ApiClient) -> list[str]:
    """The models of a server. Raises ClientError."""
    data = client.get("/v1/models").get("data") or ()
    return [str(model.get("id")) for model in data if isinstance(model, dict)]


def chat(words: Sequence[str], out: TextIO | None = None) -> int:
    """Run ``troupe chat`` with these words; returns the exit status."""
    try:
        given = _parser().parse_args(words)
    except SystemExit as end:
        return int(end.code or 0)
    try:
        client = ApiClient(given.url, given.api_key)
        options = _options(given)
    except (ValueError, OSError) as error:
        print(f"troupe: {error}", file=sys.stderr)
        return _USAGE
    try:
        names = model_names(client)
    except ClientError as error:
        print(f"troupe: {error}", file=sys.stderr)
        if not error.status:
            print("Start a server with: troupe serve    or name another one: troupe chat --url URL", file=sys.stderr)
        return _FAILED
    if given.model is None and not names:
        print("troupe: the server has no model; name one: troupe chat --model NAME", file=sys.stderr)
        return _FAILED
    screen = sys.stdout if out is None else out
    session = ChatSession(client, given.model or names[0], _reader(screen), screen, options)
    if sys.stdin.isatty():
        print(f"{session.model} at {client.url}. /help lists the commands.", file=screen)
    session.run()
    return _FAILED if session.failed and not sys.stdin.isatty() else _OK


def _reader(screen: TextIO) -> Callable[[str], str]:
    """How lines are read: with history and editing at a terminal, without a prompt from a pipe."""
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):  # Python without readline has no history
            import readline  # noqa: F401 (its import changes input())
        return input

    def line(_: str) -> str:
        text = sys.stdin.readline()
        if not text:
            raise EOFError
        return text.rstrip("\n")

    return line


def _options(given: argparse.Namespace) -> dict[str, Any]:
    options = {name: getattr(given, name) for name in ("temperature", "max_tokens", "system")}
    options = {name: value for name, value in options.items() if value is not None}
    if given.tools is not None:
        tools = json.loads(Path(given.tools).expanduser().read_text(encoding="utf-8"))
        if not isinstance(tools, list):
            raise ValueError(f"{given.tools}: must hold a list of tools, as in a chat request")
        options["tools"] = tools
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="troupe chat", description="A conversation with a server of OpenAI's chat API.", allow_abbrev=False
    )
    parser.add_argument("--url", default=DEFAULT_URL, help="the server (default: %(default)s)")
    parser.add_argument("--api-key", help="its key (default: TROUPE_API_KEY, for a server on this machine)")
    parser.add_argument("--model", help="one of its models (default: the first)")
    parser.add_argument("--system", help="the system message")
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--max-tokens", type=int, help="tokens of an answer")
    parser.add_argument("--tools", metavar="FILE", help="JSON with tools; you type the results of their calls")
    return parser
