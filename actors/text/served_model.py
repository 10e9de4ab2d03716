"""ServedModel: tokenizer, template, limits and sampling defaults of the model that an engine serves."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from actors.options import Arguments
from actors.protocol.requests import InvalidRequest
from actors.text.model_files import ModelFiles, ModelPathError, resolve_model_path
from actors.text.text_codec import TextCodec
from kernels.contract.errors import ConfigError
from kernels.contract.info import ModelInfo
from kernels.contract.model_files import read_pooling
from kernels.contract.pooling import PoolingConfig
from kernels.contract.tasks import Classify, Generate, Task, task_name

__all__ = ["ServedModel"]

_log = logging.getLogger("troupe.engine")


class ServedModel:
    """Read from small files before the worker has loaded the weights; :meth:`loaded` updates the limits afterwards.

    ``codec`` is None with --skip-tokenizer-init. ``context_length`` is in tokens. ``pooling``: of
    a model that generates no text.
    """

    def __init__(self, arguments: Arguments) -> None:
        """Open the model's directory, downloading it first if it is a hub id: blocks. Raises ModelPathError."""
        a = arguments
        assert a.model_path is not None
        path = resolve_model_path(
            a.model_path, revision=a.revision, download_dir=a.download_dir, code=a.trust_remote_code
        )
        tokenizer_path: Path | None = None
        if a.tokenizer_path is not None:
            tokenizer_path = resolve_model_path(
                a.tokenizer_path, download_dir=a.download_dir, weights=False, argument="--tokenizer-path"
            )
        self.files = ModelFiles(path, overrides=a.json_model_override_args, tokenizer_path=tokenizer_path)
        self.codec: TextCodec | None = None
        if not a.skip_tokenizer_init:
            self.codec = TextCodec(
                self.files, mode=a.tokenizer_mode, chat_template=a.chat_template, trusted=a.trust_remote_code
            )
        self._cuts = a.allow_auto_truncate
        self.info: ModelInfo | None = None
        self.vocab_size = self.files.vocab_size
        self.pooling = _pooling(self.files, a.is_embedding)
        own = self.pooling.max_tokens if self.pooling is not None else 0
        self.context_length = a.context_length or min(own or self.files.context_length, self.files.context_length)
        ends = self.files.eos_token_ids() or (self.codec.eos_from_tokenizer() if self.codec else ())
        self.eos_ids = _possible(ends, self.vocab_size)
        self.generation_defaults = self._generation_defaults(a)

    @property
    def max_prompt_tokens(self) -> int:
        """Tokens that a prompt may have: an encoder's fills the context, others leave room for a token after it."""
        return self.context_length - (not self.is_encoder)

    @property
    def is_encoder(self) -> bool:
        """Whether inputs run whole and nothing is kept of them."""
        return self.pooling is not None and self.pooling.encoder

    def _generation_defaults(self, arguments: Arguments) -> dict[str, Any]:
        defaults = dict(self.files.generation_config) if arguments.sampling_defaults == "model" else {}
        if "temperature" in arguments.preferred_sampling_params:
            defaults.pop("do_sample", None)  # the server's temperature overrides the model's greedy default
        return defaults | arguments.preferred_sampling_params

    def loaded(self, info: ModelInfo) -> None:
        """Take the limits of a worker that has loaded the weights."""
        self.info = info
        self.context_length = info.context_length
        self.vocab_size = info.vocab_size

    def require_task(self, task: Task) -> None:
        """Raise InvalidRequest for a task that the loaded model cannot do."""
        name, known = task_name(task), self.info.tasks if self.info is not None else ()
        if name not in known:
            reason = "it has no classification head" if isinstance(task, Classify) else "it makes no such output"
            if isinstance(task, Generate):
                reason = "it makes vectors of texts, or classifies them"
            raise InvalidRequest(
                f"This model cannot {name.replace('_', ' ')}: {reason}. Its tasks are {', '.join(known)}.",
                param="task",
                code="unsupported_task",
            )

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
                    f"prompt contains token id {token}; this model's ids are 0 to {self.vocab_size - 1}.",
                    param="prompt",
                )

    def truncation_limit(self, truncate: int | None) -> int | None:
        """The tokens that are kept of an input of a model's task. None: all, and too many are an error.

        ``truncate``: a number of them, or -1 for as many as the model takes, which is the default with
        --allow-auto-truncate. Raises InvalidRequest for other numbers.
        """
        if truncate is None:
            return self.max_prompt_tokens if self._cuts else None
        if truncate == -1:
            return self.max_prompt_tokens
        if not 1 <= truncate <= self.max_prompt_tokens:
            raise InvalidRequest(
                f"truncate_prompt_tokens: this model takes 1 to {self.max_prompt_tokens} tokens; send one of these "
                "numbers, or -1 for the most.",
                param="truncate_prompt_tokens",
            )
        return truncate

    def prompted(self, text: str, name: str | None) -> str:
        """The input of an embedding: ``text`` after the model's prompt of this name, or after its default one. Raises
        InvalidRequest for a name that the model does not have."""
        pooling = self.pooling
        prompts = {} if pooling is None else pooling.prompts
        if name is not None and name not in prompts:
            known = f"its names are {', '.join(sorted(prompts))}" if prompts else "it has none; leave prompt_name out"
            raise InvalidRequest(f"prompt_name: this model has no prompt {name[:80]!r}; {known}.", param="prompt_name")
        if pooling is None:
            return text
        whole = prompts.get(pooling.default_prompt if name is None else name, "") + text
        return whole.lower() if pooling.lowercase else whole

    def too_long(self, length: int, max_tokens: int | None) -> InvalidRequest:
        """The error for a prompt of ``length`` tokens that leaves too little room for output or ``max_tokens``."""
        room = self.context_length - length
        if max_tokens is None or room < 1:
            return InvalidRequest(
                f"The prompt has {length} tokens; this model's maximum context length is {self.context_length} tokens, "
                "and at least one must be left for the answer. Shorten the prompt.",
                param="prompt",
                code="context_length_exceeded",
            )
        return InvalidRequest(
            f"max_tokens {max_tokens} does not fit after {length} prompt tokens; this model's maximum context length "
            f"is {self.context_length} tokens. Request at most {room} tokens, or leave it out to use what fits.",
            param="max_tokens",
            code="context_length_exceeded",
        )


def _possible(ends: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
    """Those of the ids that end a sequence which the model can produce. ``vocab_size``: 0 if config.json has none."""
    result = tuple(token for token in ends if 0 <= token < (vocab_size or token + 1))
    if result != ends:
        _log.warning(
            "eos_token_id has ids that are no tokens of the model and are ignored: %s (vocab_size: %s)",
            ", ".join(str(token) for token in ends if token not in result),
            vocab_size or "unknown",
        )
    return result


def _pooling(files: ModelFiles, is_embedding: bool) -> PoolingConfig | None:
    try:
        return read_pooling(files.path, files.config, is_embedding)
    except ConfigError as error:
        raise ModelPathError(str(error)) from error
