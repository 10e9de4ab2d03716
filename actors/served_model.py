"""The model an engine serves, as the engine's process knows it: tokenizer, template, limits and sampling defaults."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from actors.arguments import Arguments
from actors.model_files import ModelFiles, resolve_model_path
from actors.requests import InvalidRequest
from actors.speculation import speculation
from actors.text_codec import TextCodec
from kernels.step import ModelInfo

__all__ = ["ServedModel", "open_model"]

_PATIENCE = 1.0
"""Seconds that a cancelled opening waits for its thread: enough for files that are here, not for a download."""


async def open_model(arguments: Arguments) -> ServedModel:
    """Open the model in a thread. Raises what :class:`ServedModel` raises.

    A download cannot be interrupted: a caller that is cancelled leaves it behind, and the interpreter does not wait
    for it at its end.
    """
    loop = asyncio.get_running_loop()
    opened: asyncio.Future[ServedModel] = loop.create_future()

    def tell(model: ServedModel | None, error: BaseException | None) -> None:
        if opened.done():
            return
        if model is not None:
            opened.set_result(model)
        elif error is not None:
            opened.set_exception(error)

    def work() -> None:
        model: ServedModel | None = None
        failure: BaseException | None = None
        try:
            model = ServedModel(arguments)
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(tell, model, failure)

    thread = threading.Thread(target=work, name="troupe-open", daemon=True)
    thread.start()
    try:
        await asyncio.wait({opened})
    except asyncio.CancelledError:
        await asyncio.wait({opened}, timeout=_PATIENCE)
        if not opened.cancel():
            opened.exception()  # seen
        raise
    return opened.result()


class ServedModel:
    """Small files, read before the worker has loaded the large ones; the worker's word on limits comes later.

    ``codec`` is None with --skip-tokenizer-init. ``context_length`` is in tokens.
    """

    def __init__(self, arguments: Arguments) -> None:
        """Open the model's directory, downloading it first if it is a hub id: blocks. Raises ModelPathError, or
        ArgumentError for what the files of model and draft do not allow.
        """
        a = arguments
        assert a.model_path is not None
        path = resolve_model_path(a.model_path, revision=a.revision, download_dir=a.download_dir)
        tokenizer_path: Path | None = None
        if a.tokenizer_path is not None:
            tokenizer_path = resolve_model_path(
                a.tokenizer_path, download_dir=a.download_dir, weights=False, argument="--tokenizer-path"
            )
        self.files = ModelFiles(path, overrides=a.json_model_override_args, tokenizer_path=tokenizer_path)
        self.speculation = speculation(a, self.files)
        self.codec: TextCodec | None = None
        if not a.skip_tokenizer_init:
            self.codec = TextCodec(self.files, mode=a.tokenizer_mode, chat_template=a.chat_template)
        self.info: ModelInfo | None = None
        self.vocab_size = self.files.vocab_size
        self.context_length = a.context_length or self.files.context_length
        self.eos_ids = self.files.eos_token_ids() or (self.codec.eos_from_tokenizer() if self.codec else ())
        self.generation_defaults = self._generation_defaults(a)

    def _generation_defaults(self, arguments: Arguments) -> dict[str, Any]:
        defaults = dict(self.files.generation_config) if arguments.sampling_defaults == "model" else {}
        if "temperature" in arguments.preferred_sampling_params:
            defaults.pop("do_sample", None)  # the server's temperature overrules the model's greediness
        return defaults | arguments.preferred_sampling_params

    def loaded(self, info: ModelInfo) -> None:
        """A worker has loaded the weights: its limits count."""
        self.info = info
        self.context_length = info.context_length
        self.vocab_size = info.vocab_size

    def require_codec(self) -> TextCodec:
        if self.codec is None:
            raise InvalidRequest(
                "This server runs without a tokenizer (--skip-tokenizer-init): send token ids.", param="prompt"
            )
        return self.codec

    def check_ids(self, ids: Sequence[int]) -> None:
        """Raise InvalidRequest for a token id outside the vocabulary."""
        for token in (min(ids), max(ids)):
            if not 0 <= token < self.vocab_size:
                raise InvalidRequest(
                    f"prompt holds token id {token}; this model's ids are 0 to {self.vocab_size - 1}.", param="prompt"
                )

    def too_long(self, length: int, max_tokens: int | None) -> InvalidRequest:
        """The error for a prompt of ``length`` tokens that leaves no room, or not enough for ``max_tokens``."""
        room = self.context_length - length
        if max_tokens is None or room < 1:
            return InvalidRequest(
                f"The prompt has {length} tokens; this model's maximum context length is {self.context_length} tokens, "
                "and at least one must be left for the answer. Shorten the prompt.",
                param="prompt",
                code="context_length_exceeded",
            )
        return InvalidRequest(
            f"max_tokens {max_tokens} does not fit behind {length} prompt tokens; this model's maximum context length "
            f"is {self.context_length} tokens. Ask for at most {room} tokens, or leave it out for what fits.",
            param="max_tokens",
            code="context_length_exceeded",
        )
