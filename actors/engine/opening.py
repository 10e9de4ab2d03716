"""Opens a model and its draft: downloads them if they are hub ids, and reads their small files."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from pathlib import Path

import msgspec

from actors.engine.speculation import speculation
from actors.options import ArgumentError, Arguments
from actors.requests.adapters import adapter_settings, read_adapters
from actors.text.fingerprint import fingerprint
from actors.text.model_files import ModelDownloadError, ModelPathError
from actors.text.served_model import ServedModel
from kernels.contract.adapters import AdapterInfo, AdapterSettings
from kernels.contract.divisions import check_divisions
from kernels.contract.errors import ConfigError
from kernels.contract.model_files import has_family
from kernels.contract.speculation import SpeculativeSettings

__all__ = ["OpenedModel", "open_model", "read_model"]

_PATIENCE_SECONDS = 1.0
"""Seconds that a cancelled call waits for its thread: enough for local files, not for a download."""


class OpenedModel(msgspec.Struct, frozen=True):
    """A model and its settings. ``speculation``: None without --speculative-algorithm. ``adapters``: those of
    --lora-paths, and the room for them."""

    served: ServedModel
    speculation: SpeculativeSettings | None
    adapters: tuple[AdapterInfo, ...] = ()
    adapter_settings: AdapterSettings | None = None

    def fingerprint(self, arguments: Arguments) -> dict[str, str]:
        """What must be equal on all nodes. Blocks."""
        weights = arguments.load_format != "dummy"
        parts = fingerprint(self.served.files.path, weights=weights)
        if self.speculation is not None and self.speculation.draft_model_path:
            parts |= fingerprint(Path(self.speculation.draft_model_path), weights=weights, prefix="draft's ")
        return parts


def read_model(arguments: Arguments) -> OpenedModel:
    """Open the model, its draft and its adapters. Blocks. Raises ModelPathError, or ArgumentError if arguments conflict
    with the files."""
    served = ServedModel(arguments)
    _check_divisions(arguments, served)
    try:
        adapters = read_adapters(arguments, served.files.config)
    except (ConfigError, ModelPathError) as error:
        if isinstance(error, ModelDownloadError):
            raise
        raise ArgumentError([f"--lora-paths: {error}"]) from error
    settings = adapter_settings(arguments, adapters)
    return OpenedModel(served, speculation(arguments, served.files), adapters, settings)


def _check_divisions(a: Arguments, served: ServedModel) -> None:
    """Refuse sizes here where config.json alone shows that they do not fit: workers take long to start."""
    if served.is_encoder:  # workers refuse all divisions of it
        return
    files, ranks = served.files, a.tensor_parallel_size // (a.data_parallel_size if a.enable_dp_attention else 1)
    by_plan = a.model_impl == "transformers" or not has_family(files.config)  # which may leave attention whole
    whole = a.enable_nsa_prefill_context_parallel or by_plan
    try:
        check_divisions(files.config, files.architecture, stages=a.pipeline_parallel_size, ranks=1 if whole else ranks)
    except ConfigError as error:
        raise ArgumentError([str(error)]) from error


async def open_model(arguments: Arguments) -> OpenedModel:
    """:func:`read_model` in a thread, with the same errors.

    A download cannot be interrupted: it continues after the caller is cancelled, and the interpreter does not wait for
    it when it exits.
    """
    loop = asyncio.get_running_loop()
    opened: asyncio.Future[OpenedModel] = loop.create_future()

    def finish(model: OpenedModel | None, error: BaseException | None) -> None:
        if opened.done():
            return
        if model is not None:
            opened.set_result(model)
        elif error is not None:
            opened.set_exception(error)

    def work() -> None:
        model: OpenedModel | None = None
        failure: BaseException | None = None
        try:
            model = read_model(arguments)
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed, and no task waits
            loop.call_soon_threadsafe(finish, model, failure)

    thread = threading.Thread(target=work, name="troupe-open", daemon=True)
    thread.start()
    try:
        await asyncio.wait({opened})
    except asyncio.CancelledError:
        await asyncio.wait({opened}, timeout=_PATIENCE_SECONDS)
        if not opened.cancel():
            opened.exception()  # mark it as retrieved
        raise
    return opened.result()
