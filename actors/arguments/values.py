"""The values of all arguments: what the engine and the server read."""

from __future__ import annotations

from typing import Any, Literal, Self

import msgspec

from actors.arguments.errors import ArgumentError
from actors.arguments.table import ARGUMENTS

__all__ = ["Arguments"]


class Arguments(msgspec.Struct, frozen=True, kw_only=True):
    """Every argument's value. Field names are the long names with underscores; help, units and bounds are in the table.

    A value that is out of bounds, or contradicts another, raises ArgumentError wherever the struct is made. Use
    :meth:`from_keywords` for values and names as users write them.
    """

    model_path: str | None = None
    tokenizer_path: str | None = None
    tokenizer_mode: Literal["auto", "slow"] = "auto"
    tokenizer_worker_num: int = 1
    skip_tokenizer_init: bool = False
    load_format: Literal["auto", "safetensors", "dummy"] = "auto"
    model_loader_extra_config: dict[str, Any] = {}
    context_length: int | None = None
    revision: str | None = None
    download_dir: str | None = None
    model_impl: Literal["auto", "troupe"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    json_model_override_args: dict[str, Any] = {}
    preferred_sampling_params: dict[str, Any] = {}

    host: str = "127.0.0.1"
    port: int = 8000
    fastapi_root_path: str = ""
    skip_server_warmup: bool = False
    warmups: tuple[Literal["generate", "long-prompt", "batch"], ...] = ("generate",)
    sse_keep_alive_interval: float = 15.0
    shutdown_timeout: float = 30.0
    request_timeout: float | None = None

    api_key: str | None = None
    admin_api_key: str | None = None
    served_model_name: str | None = None
    weight_version: str = "default"
    chat_template: str | None = None
    completion_template: str | None = None
    enable_cache_report: bool = False
    sampling_defaults: Literal["model", "openai"] = "model"
    stream_interval: int = 1
    stream_output: bool = False

    log_level: Literal["debug", "info", "warning", "error", "critical"] = "info"
    log_level_http: Literal["debug", "info", "warning", "error", "critical"] | None = None
    config: str | None = None

    mem_fraction_static: float | None = None
    max_total_tokens: int | None = None
    page_size: int = 16
    max_running_requests: int = 256
    max_queued_requests: int = 2048
    max_queued_tokens: int | None = None
    prefill_max_requests: int | None = None
    chunked_prefill_size: int = 512
    max_prefill_tokens: int = 16384
    schedule_policy: Literal["lpm", "fcfs"] = "fcfs"
    enable_priority_scheduling: bool = False
    schedule_low_priority_values_first: bool = False
    priority_scheduling_preemption_threshold: int = 10
    abort_on_priority_when_disabled: bool = False
    schedule_conservativeness: float = 1.0
    disable_radix_cache: bool = False
    radix_eviction_policy: Literal["lru"] = "lru"
    disable_overlap_schedule: bool = False

    enable_dynamic_batch_tokenizer: bool = False
    dynamic_batch_tokenizer_batch_size: int = 32
    dynamic_batch_tokenizer_batch_timeout: float = 0.002
    enable_tokenizer_batch_encode: bool = True
    allow_auto_truncate: bool = False

    device: Literal["auto", "cpu"] = "auto"
    cpu_threads: int | None = None
    random_seed: int | None = None

    def __post_init__(self) -> None:
        problems = []
        for argument in ARGUMENTS:
            try:
                argument.check(getattr(self, argument.field))
            except ArgumentError as error:
                problems.append(f"{argument.field}: {error}")
        if problems or (problems := self._contradictions()):
            raise ArgumentError(problems)

    def _contradictions(self) -> list[str]:
        found = []
        if not self.enable_priority_scheduling:
            if self.schedule_low_priority_values_first:
                found.append("schedule_low_priority_values_first needs enable_priority_scheduling")
            if self.priority_scheduling_preemption_threshold != 10:
                found.append("priority_scheduling_preemption_threshold needs enable_priority_scheduling")
        elif self.abort_on_priority_when_disabled:
            found.append("abort_on_priority_when_disabled contradicts enable_priority_scheduling: leave one out")
        if not self.enable_dynamic_batch_tokenizer:
            if self.dynamic_batch_tokenizer_batch_size != 32:
                found.append("dynamic_batch_tokenizer_batch_size needs enable_dynamic_batch_tokenizer")
            if self.dynamic_batch_tokenizer_batch_timeout != 0.002:
                found.append("dynamic_batch_tokenizer_batch_timeout needs enable_dynamic_batch_tokenizer")
        if self.skip_tokenizer_init:
            given = (self.tokenizer_path, self.chat_template, self.completion_template)
            if any(value is not None for value in given):
                found.append(
                    "skip_tokenizer_init loads no tokenizer: leave out tokenizer_path, chat_template "
                    "and completion_template"
                )
        if self.max_total_tokens is not None and self.max_total_tokens < self.page_size:
            found.append(
                f"max_total_tokens ({self.max_total_tokens}) is less than one page: give at least {self.page_size}"
            )
        root = self.fastapi_root_path
        if root and (not root.startswith("/") or root.endswith("/")):
            found.append(f"fastapi_root_path must begin with a slash and not end with one, such as /llm, not {root!r}")
        if unknown := self.model_loader_extra_config.keys() - {"enable_multithread_load", "num_threads"}:
            found.append(f"model_loader_extra_config: unknown {', '.join(sorted(unknown))}")
        return found

    @classmethod
    def from_keywords(cls, **keywords: object) -> Self:
        """Arguments from Python values by any of their names, as in ``Engine(model=..., max_num_seqs=64)``.

        Raises ArgumentError for an unknown name (with the nearest known one), a feature that is not built, a value out
        of bounds, and two names of one argument with different values.
        """
        from actors.arguments.resolving import Given, resolve

        layer = [Given(name=name, value=value, spelling=name) for name, value in keywords.items()]
        if keywords.get("config") is not None:
            raise ArgumentError("config: a file is read by the command line only; give its arguments as keywords")
        return cls(**resolve([layer]))

    @property
    def model_name(self) -> str:
        """The model's name in the API; empty when neither a name nor a model was given."""
        return self.served_model_name or self.model_path or ""

    def describe(self) -> dict[str, Any]:
        """Every value by field name, as JSON-ready types, the keys of the API hidden: for ``/server_info`` and logs."""
        values: dict[str, Any] = msgspec.to_builtins(self)
        for argument in ARGUMENTS:
            if argument.secret and values[argument.field] is not None:
                values[argument.field] = "***"
        return values

    def __repr__(self) -> str:
        changed = {
            argument.field: "***" if argument.secret else getattr(self, argument.field)
            for argument in ARGUMENTS
            if getattr(self, argument.field) != argument.default
        }
        return f"Arguments({', '.join(f'{field}={value!r}' for field, value in changed.items())})"
