"""The Tokenizer actor: encodes concurrent requests together in one call to a thread, so that the loop stays free."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from actors.protocol import Decode, DecodeTokens, Encode, Encoded, TokenizerProtocol
from actors.protocol.requests import RequestFailed
from actors.runtime import Actor, Deferred, RequestError, handles
from actors.text.text_codec import TextCodec, is_request_scoped

__all__ = ["INLINE_CHARS", "Tokenizer"]

R = TypeVar("R")

INLINE_CHARS = 1024
"""Plain texts up to this length are encoded in the loop: that is faster than a call to a thread."""

_INLINE_TOKENS = 4096
"""Up to this many tokens are decoded in the loop, more in the thread."""

_MAX_BATCH = 256


class Tokenizer(Actor[TokenizerProtocol]):
    """Encodes and decodes.

    Prompts that arrive while the thread is busy are encoded together in its next call, at most ``batch_size`` at once.
    With ``batch_timeout`` (seconds) above 0, the dynamic batch tokenizer, each call first waits this long for more
    prompts, unless the batch is full. ``batch_encode=False`` encodes one prompt a call.
    """

    def __init__(
        self, codec: TextCodec, *, batch_size: int = _MAX_BATCH, batch_timeout: float = 0.0, batch_encode: bool = True
    ) -> None:
        self._codec = codec
        self._batch_size = batch_size if batch_encode else 1
        self._batch_timeout = batch_timeout
        self._waiting: deque[tuple[Encode, asyncio.Future[Encoded]]] = deque()
        self._arrived = asyncio.Event()
        self._full = asyncio.Event()
        self._thread: ThreadPoolExecutor | None = None
        self.trips = 0

    async def started(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="troupe-tokenizer")
        self.context.start_soon(self._encode_batches, name="encode batches")

    async def stopping(self) -> None:
        self.close()

    def close(self) -> None:
        """End the thread; called at the end of each incarnation, also after a crash."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    @handles
    def encode(self, message: Encode) -> Encoded | Deferred[Encoded]:
        prompt = message.prompt
        if len(prompt) + len(message.pair or "") <= INLINE_CHARS and not self._waiting and not self._batch_timeout:
            return self._encode(message)
        future: asyncio.Future[Encoded] = asyncio.get_running_loop().create_future()
        self._waiting.append((message, future))
        self._arrived.set()
        if len(self._waiting) >= self._batch_size:
            self._full.set()
        return future

    async def _encode_batches(self) -> None:
        loop = asyncio.get_running_loop()
        assert self._thread is not None
        try:
            while True:
                await self._arrived.wait()
                if self._batch_timeout and len(self._waiting) < self._batch_size:
                    self._full.clear()
                    try:
                        async with asyncio.timeout(self._batch_timeout):
                            await self._full.wait()
                    except TimeoutError:
                        pass
                batch = [self._waiting.popleft() for _ in range(min(self._batch_size, len(self._waiting)))]
                if not self._waiting:
                    self._arrived.clear()
                batch = [(message, future) for message, future in batch if not future.done()]
                if not batch:
                    continue
                self.trips += 1
                results = await loop.run_in_executor(self._thread, self._encode_all, [m for m, _ in batch])
                for (_, future), result in zip(batch, results, strict=True):
                    if future.done():
                        continue
                    if isinstance(result, RequestError):
                        future.set_exception(result)
                    else:
                        future.set_result(result)
        finally:
            self.close()

    def _encode_all(self, messages: list[Encode]) -> list[Encoded | RequestError]:
        # One by one: the library's batch call would start threads that cannot be stopped.
        results: list[Encoded | RequestError] = []
        for message in messages:
            try:
                results.append(self._encode(message))
            except RequestError as error:
                results.append(error)
        return results

    def _encode(self, message: Encode) -> Encoded:
        prompt, pair, add, max_tokens = message.prompt, message.pair, message.add_special_tokens, message.max_tokens
        began = time.monotonic()
        if pair is not None:
            both, second = self._try(lambda: self._codec.encode_pair(prompt, pair, max_tokens))
            return Encoded(token_ids=both, second=second, seconds=time.monotonic() - began)
        ids = self._try(lambda: self._codec.encode(prompt, add_special_tokens=add, max_tokens=max_tokens))
        return Encoded(token_ids=ids, seconds=time.monotonic() - began)

    def _try(self, work: Callable[[], R]) -> R:
        """Call ``work``; raises RequestError only, so that one request's text does not affect others."""
        try:
            return work()
        except RequestError:
            raise
        except BaseException as error:
            if not is_request_scoped(error):
                raise
            self.context.log.exception("The tokenizer failed on a request")
            raise RequestFailed(f"The tokenizer failed on this request: {type(error).__name__}.") from error

    @handles
    def decode(self, message: Decode) -> str | Deferred[str]:
        ids, skip = message.token_ids, message.skip_special_tokens
        return self._inline_or_not(len(ids), lambda: self._codec.decode(ids, skip_special_tokens=skip))

    @handles
    def decode_tokens(self, message: DecodeTokens) -> list[str] | Deferred[list[str]]:
        ids = message.token_ids
        return self._inline_or_not(len(ids), lambda: [self._codec.token_text(token) for token in ids])

    def _inline_or_not(self, tokens: int, work: Callable[[], R]) -> R | Deferred[R]:
        if tokens <= _INLINE_TOKENS:
            return self._try(work)
        assert self._thread is not None
        return asyncio.wrap_future(self._thread.submit(self._try, work))
