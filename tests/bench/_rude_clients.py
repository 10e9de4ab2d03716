"""Clients of the soak: they stream, hang up, abort, read slowly or send bad requests, and check each answer."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import msgspec

KEYS = ("soak-one", "soak-two")
"""The server's API keys."""


class Unexpected(Exception):
    """An answer that the client's behaviour does not explain."""


@dataclass
class Ledger:
    """Outcomes of requests by client behaviour."""

    ended: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    kills: int = 0
    memory: list[tuple[float, float]] = field(default_factory=list)  # seconds, MiB of the server process


class Http:
    """One connection for one request, straight on a socket, so that it can break any rule."""

    def __init__(self, url: str, rng: random.Random) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._key = rng.choice(KEYS)
        self._writer: asyncio.StreamWriter | None = None
        self.reader = asyncio.StreamReader()

    async def __aenter__(self) -> Http:
        taken = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)  # a client that does not read is noticed soon
        taken.setblocking(False)
        await asyncio.get_running_loop().sock_connect(taken, (self._host, self._port))
        self.reader, self._writer = await asyncio.open_connection(sock=taken, limit=4096)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()

    def vanish(self) -> None:
        """Reset the connection, as a machine that loses its power does."""
        assert self._writer is not None
        self._writer.transport.abort()

    def send(self, path: str, body: object, *, label: str = "", cut: int | None = None) -> None:
        """Write a POST, or only its first ``cut`` bytes."""
        assert self._writer is not None
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {self._host}\r\nAuthorization: Bearer {self._key}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n"
        )
        if label:
            head += f"X-Request-Id: {label}\r\n"
        self._writer.write((head.encode() + b"\r\n" + data)[:cut])

    async def head(self) -> tuple[int, dict[str, str]]:
        """Status and headers of the answer."""
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines[1:] if ": " in line)
        return int(lines[0].split()[1]), {name.lower(): value for name, value in headers.items()}

    async def body(self, headers: dict[str, str]) -> bytes:
        """The rest of the answer."""
        return b"".join([piece async for piece in self.pieces(headers)])

    async def pieces(self, headers: dict[str, str]):  # type: ignore[no-untyped-def]
        """Chunks of the rest of the answer."""
        if headers.get("transfer-encoding") == "chunked":
            while size := int((await self.reader.readline()).split(b";")[0], 16):
                yield await self.reader.readexactly(size)
                await self.reader.readexactly(2)
        else:
            yield await self.reader.readexactly(int(headers.get("content-length", "0")))


class Client:
    """A client that picks a random behaviour for each request."""

    def __init__(self, url: str, number: int, seed: int, ledger: Ledger) -> None:
        self._url = url
        self._rng = random.Random(f"{seed}/{number}")
        self._number = number
        self._count = 0
        self._ledger = ledger

    async def live(self, until: float) -> None:
        """Send requests one after the other until a monotonic time."""
        kinds = {
            self._stream: 30,
            self._whole: 15,
            self._hang_up_early: 10,
            self._hang_up: 15,
            self._abort: 10,
            self._bad: 10,
            self._slow: 5,
        }
        while time.monotonic() < until:
            self._count += 1
            kind = self._rng.choices(list(kinds), list(kinds.values()))[0]
            if self._count == 1:  # so that everything happens, however few requests there is time for
                kind = list(kinds)[self._number % len(kinds)]
            name = kind.__name__.lstrip("_").replace("_", " ")
            try:
                async with asyncio.timeout(600), Http(self._url, self._rng) as http:
                    outcome = await kind(http)
                self._ledger.ended[f"{name}: {outcome}"] += 1
            except (Unexpected, OSError, EOFError, ValueError, KeyError, TimeoutError) as error:
                self._ledger.problems.append(f"{name}: {type(error).__name__}: {error}")
            await asyncio.sleep(self._rng.expovariate(20))

    def _request(self, *, stream: bool, length: int | None = None) -> tuple[str, dict[str, Any]]:
        """A valid request. Prompts repeat, so that prefixes are shared."""
        rng = self._rng
        length = length or rng.randint(1, 60)
        text = " ".join(["Tell me of the capital of country"] * rng.randint(1, 12)) + f" {rng.randrange(40)}."
        more: dict[str, Any] = {"max_tokens": length, "ignore_eos": True, "stream": stream}
        more |= {"temperature": rng.choice([0, 0.8]), "n": 1 if rng.random() < 0.8 else rng.randint(2, 3)}
        if stream:
            more["stream_options"] = {"include_usage": True}
        if rng.random() < 0.2:
            more["logprobs"] = 2
        if rng.random() < 0.2:
            more |= {"presence_penalty": 0.5, "stop": ["zzzz"]}
        if rng.random() < 0.5:
            return "/v1/completions", {"prompt": text, **more}
        if "logprobs" in more:
            more |= {"logprobs": True, "top_logprobs": 2}
        return "/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **more}

    async def _admitted(self, http: Http) -> dict[str, str] | None:
        """The headers of a 200, or None after a correct refusal."""
        status, headers = await http.head()
        if status == 200:
            return headers
        reported = await http.body(headers)
        if status != 429 or not 1 <= int(headers.get("retry-after", "0")) <= 120:
            raise Unexpected(f"status {status}: {reported[:300]!r}")
        return None

    async def _events(self, http: Http, headers: dict[str, str], body: dict[str, Any], pause: float = 0.0) -> str:
        """Read a stream to its end, which must come exactly once; the outcome."""
        finished: Counter[int] = Counter()
        reasons, text = set(), ""
        rest, done, error, usage = b"", 0, "", 0
        async for piece in http.pieces(headers):
            if pause and not finished:
                await asyncio.sleep(pause)
                pause = 0.0
            rest += piece
            *events, rest = rest.split(b"\n\n")
            for event in events:
                if not event.startswith(b"data:"):
                    continue  # a comment that keeps the connection alive
                if done:
                    raise Unexpected(f"after [DONE] came {event[:200]!r}")
                if event == b"data: [DONE]":
                    done += 1
                    continue
                record = msgspec.json.decode(event[5:])
                if "error" in record:
                    error = str(record["error"]["code"])
                for choice in record.get("choices", ()):
                    finished[choice["index"]] += choice["finish_reason"] is not None
                    reasons.add(choice["finish_reason"])
                    text += choice.get("text") or choice.get("delta", {}).get("content") or ""
                usage = (record.get("usage") or {}).get("completion_tokens", usage)
        if done != 1:
            raise Unexpected("the stream ended without [DONE]")
        if error:
            return error
        if any(finished[index] != 1 for index in range(body["n"])):
            raise Unexpected(f"finish reasons by choice: {dict(finished)} of {body['n']}")
        if usage != body["n"] * body["max_tokens"]:
            reported = f"{usage} tokens, not {body['n']} x {body['max_tokens']}"
            raise Unexpected(f"{reported}, for {reasons - {None}}, after {text[-200:]!r}; asked: {body}")
        return "complete"

    async def _stream(self, http: Http, pause: float = 0.0, length: int | None = None) -> str:
        path, body = self._request(stream=True, length=length)
        http.send(path, body)
        headers = await self._admitted(http)
        if headers is None:
            return "refused"
        outcome = await self._events(http, headers, body, pause)
        if outcome not in ("complete", "internal_error"):  # quarantined after two deaths of its worker
            raise Unexpected(f"the stream ended with {outcome}")
        return "quarantined" if outcome == "internal_error" else outcome

    async def _slow(self, http: Http) -> str:
        """Stop reading for a while, then read all."""
        return await self._stream(http, pause=self._rng.uniform(0.5, 3), length=200)

    async def _whole(self, http: Http) -> str:
        path, body = self._request(stream=False)
        http.send(path, body)
        status, headers = await http.head()
        reported = await http.body(headers)
        if status == 429:
            return "refused"
        if status == 500:
            return "quarantined"
        if status != 200:
            raise Unexpected(f"status {status}: {reported[:300]!r}")
        answer = msgspec.json.decode(reported)
        if (
            answer["usage"]["completion_tokens"] != body["n"] * body["max_tokens"]
            or len(answer["choices"]) != body["n"]
        ):
            raise Unexpected(f"{answer['usage']} for {body}")
        return "complete"

    async def _hang_up_early(self, http: Http) -> str:
        """Hang up before the answer starts, sometimes within the request."""
        path, body = self._request(stream=self._rng.random() < 0.5, length=200)
        http.send(path, body, cut=self._rng.randrange(20, 500) if self._rng.random() < 0.4 else None)
        await asyncio.sleep(self._rng.choice([0, 0.005, 0.05]))
        if self._rng.random() < 0.5:
            http.vanish()
        return "gone"

    async def _hang_up(self, http: Http) -> str:
        path, body = self._request(stream=True, length=200)
        http.send(path, body)
        headers = await self._admitted(http)
        if headers is None:
            return "refused"
        left = self._rng.randint(1, 20)
        async for _ in http.pieces(headers):
            left -= 1
            if not left:
                break
        if self._rng.random() < 0.5:
            http.vanish()
        return "gone"

    async def _abort(self, http: Http) -> str:
        label = f"soak-{self._number}-{self._count}"
        path, body = self._request(stream=True, length=200)
        http.send(path, body, label=label)

        async def abort() -> None:
            await asyncio.sleep(self._rng.uniform(0, 0.3))
            async with Http(self._url, self._rng) as other:
                other.send("/abort_request", {"rid": label})
                status, headers = await other.head()
                await other.body(headers)
                if status != 200:
                    raise Unexpected(f"/abort_request answered {status}")

        aborting = asyncio.create_task(abort())
        try:
            status, headers = await http.head()
            if status != 200:
                reported = await http.body(headers)
                if status not in (429, 499):
                    raise Unexpected(f"status {status}: {reported[:300]!r}")
                return "refused" if status == 429 else "aborted"
            outcome = await self._events(http, headers, body)
        finally:
            await aborting
        if outcome not in ("complete", "request_aborted", "internal_error"):
            raise Unexpected(f"the stream ended with {outcome}")
        return "aborted" if outcome == "request_aborted" else "complete or quarantined"

    async def _bad(self, http: Http) -> str:
        path, body = self._request(stream=self._rng.random() < 0.5)
        bad: object = self._rng.choice(
            [
                {**body, "temperature": -1},
                {**body, "max_tokens": 10**9},
                {**body, "n": 0},
                {**body, "stop": [""] * 20},
                {**body, "logit_bias": {"-7": 3}},
                {**body, "messages": 7, "prompt": {}},
                b'{"prompt": "half of',
                b"[" * 5000,
                b"\xff\xfe",
            ]
        )
        http.send(path, bad)
        status, headers = await http.head()
        reported = msgspec.json.decode(await http.body(headers))
        if status != 400 or not reported["error"]["message"]:
            raise Unexpected(f"status {status} for {str(bad)[:200]}: {reported}")
        return "refused with 400"
