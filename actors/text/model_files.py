"""Configuration, templates and defaults of a Hugging Face model directory or a GGUF file, read without torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from actors.options import Arguments
from actors.text.gguf_tokenizer import tokenizer_settings
from kernels.contract.adapters import ADAPTER_FILES
from kernels.contract.errors import GgufError
from kernels.contract.model_files import (
    LENGTH_KEYS,
    GgufHeader,
    gguf_config,
    gguf_generation_config,
    merge_objects,
    read_gguf_header,
    read_gguf_text,
)

__all__ = [
    "ModelDownloadError",
    "ModelFiles",
    "ModelPathError",
    "adapter_source",
    "model_names",
    "resolve_adapter_path",
    "resolve_model_file",
    "resolve_model_path",
]

_WEIGHT_PATTERNS = ["*.safetensors", "*.safetensors.index.json"]
_LONGEST_NAME = 256  # characters
_CODE_PATTERNS = ["*.py"]
_OTHER_PATTERNS = ["*.json", "*.jinja", "*.model", "*.txt", "tokenizer*"]

_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_LLAMA_3 = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    "{{ message.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
_TEMPLATES = {"chatml": _CHATML, "llama-3-instruct": _LLAMA_3}
"""Built-in templates by SGLang's names, for models without one. Each is the training format of its models."""

_MAX_NUMBER = 1 << 31


class ModelPathError(ValueError):
    """The model cannot be found or read; the message says what to do instead."""


class ModelDownloadError(ModelPathError):
    """The hub did not respond; a later start may succeed."""


_HEALING_STATUSES = (408, 429)


def resolve_model_path(
    model: str,
    *,
    revision: str | None = None,
    download_dir: str | None = None,
    weights: bool = True,
    code: bool = False,
    argument: str = "--model-path",
) -> Path:
    """The path of ``model``: a local directory or .gguf file, or the snapshot of the hub repository of that name.

    ``code``: whether Python files are downloaded, too. ``argument``: its name in error messages.
    Raises :class:`ModelPathError`. Blocks while it downloads:
    call it in a thread.
    """
    path = Path(model).expanduser()
    if revision is not None and path.exists():
        raise ModelPathError(
            f"{argument} {model} is local, and {_revision_of(argument)} is for hub repositories. Leave it out."
        )
    if path.is_dir():
        return path.resolve()
    if path.is_file():
        if path.suffix.lower() == ".gguf":
            return path.resolve()
        raise ModelPathError(
            f"{argument} {model} is a file. Give the directory that holds config.json, or a .gguf file."
        )
    if path.is_absolute() or model.startswith(".") or model.count("/") != 1 or path.suffix.lower() == ".gguf":
        raise ModelPathError(
            f"{argument} {model} does not exist. Give a directory with config.json, a .gguf file, or a hub id such as "
            "owner/name."
        )
    from huggingface_hub import snapshot_download

    patterns = _OTHER_PATTERNS + _WEIGHT_PATTERNS * weights + _CODE_PATTERNS * code
    with _downloading(
        f"{argument} {model} is no local directory",
        "Check the name, --revision, the network and HF_TOKEN, or download it first and give the directory.",
    ):
        return Path(snapshot_download(model, revision=revision, cache_dir=download_dir, allow_patterns=patterns))


def _revision_of(argument: str) -> str:
    return argument.removesuffix("-path") + "-revision" if "draft" in argument else "--revision"


def resolve_model_file(name: str, *, download_dir: str | None = None, argument: str) -> Path:
    """The path of a local file or of one in a hub repository (``owner/name/file``). Raises :class:`ModelPathError`.
    Blocks."""
    path = Path(name).expanduser()
    if path.is_file():
        return path.resolve()
    parts = name.split("/")
    if path.is_absolute() or name.startswith(".") or len(parts) < 3 or not all(parts):
        raise ModelPathError(
            f"{argument} {name} is not a local file. Give the path of a file, or owner/name/file of one on the hub."
        )
    from huggingface_hub import hf_hub_download

    with _downloading(
        f"{argument} {name} is no local file",
        "Check the name, the network and HF_TOKEN, or give the path of a file.",
    ):
        return Path(hf_hub_download("/".join(parts[:2]), "/".join(parts[2:]), cache_dir=download_dir))


def resolve_adapter_path(adapter: str, *, download_dir: str | None = None) -> Path:
    """The directory of an adapter: a local one, which may be missing, or the snapshot of a hub repository
    ``owner/name`` or ``owner/name@revision``. Raises :class:`ModelPathError`. Blocks."""
    name, _, revision = adapter.partition("@")
    try:
        path = Path(adapter).expanduser()
        exists = path.exists()
    except (OSError, RuntimeError) as error:  # too long a name, no such user
        raise ModelPathError(f"{adapter} cannot be read ({error}); give the directory of an adapter") from error
    if exists or path.is_absolute() or adapter.startswith((".", "~")) or name.count("/") != 1:
        return path.absolute()
    from huggingface_hub import snapshot_download

    with _downloading(
        f"{adapter} is not a local directory",
        "Check the name, the network and HF_TOKEN, or give the directory of an adapter.",
    ):
        return Path(
            snapshot_download(
                name, revision=revision or None, cache_dir=download_dir, allow_patterns=list(ADAPTER_FILES)
            )
        )


def adapter_source(adapter: str, directory: Path) -> str:
    """Where another node finds the adapter that was resolved to this directory: the hub's repository at the revision
    that was downloaded, or empty for a local directory."""
    if Path(adapter).expanduser().absolute() == directory:
        return ""
    # The hub's cache names a snapshot by its commit: a branch may have moved when another node asks.
    return f"{adapter.partition('@')[0]}@{directory.name}" if directory.parent.name == "snapshots" else adapter


@contextmanager
def _downloading(failed: str, remedy: str) -> Iterator[None]:
    """Errors of the hub become a ModelPathError, or a ModelDownloadError where another try may succeed. It says
    ``failed``, the reason, and ``remedy``."""
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        yield
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        kind = ModelDownloadError if _may_heal(error) else ModelPathError
        raise kind(f"{failed}, and {_hub_reason(error)}. {remedy}") from error


def _hub_reason(error: Exception) -> str:
    """Why the hub gave nothing."""
    response = getattr(error, "response", None)
    if response is not None:
        status = int(response.status_code)
        missing = status in (401, 403, 404)  # the hub's answers for missing and private repositories
        return f"the hub has no such repository or file for you ({status})" if missing else f"the hub answers {status}"
    if isinstance(error, ValueError):
        return f"it is no name of the hub ({error})"
    return "the hub cannot be reached"


def _may_heal(error: Exception) -> bool:
    """Whether a retry may succeed. The hub returns 401, 403 or 404 for missing and private repositories."""
    response = getattr(error, "response", None)
    if response is not None:
        status = int(response.status_code)
        return status >= 500 or status in _HEALING_STATUSES
    return not isinstance(error, ValueError)


def model_names(arguments: Arguments) -> tuple[str, ...]:
    """The names of the model in the API: those of --served-model-name, or the model's path as given.

    A GGUF file is named by its general.name or its file name. An error of the file is reported when the model is
    opened.
    """
    path = Path(arguments.model_path or "").expanduser()
    if arguments.served_model_name or path.suffix.lower() != ".gguf":
        return arguments.model_names
    try:
        name = (read_gguf_text(path, "general.name") or "").strip()
    except GgufError:
        name = ""
    return (name if name.isprintable() and 0 < len(name) <= _LONGEST_NAME else path.stem,)


def _header(file: Path) -> GgufHeader:
    try:
        return read_gguf_header(file)
    except GgufError as error:
        raise ModelPathError(str(error)) from error


def _described(header: GgufHeader) -> dict[str, Any]:
    try:
        return gguf_config(header)
    except GgufError as error:
        raise ModelPathError(str(error)) from error


class ModelFiles:
    """The small files of a model directory, or their equivalent in the metadata of a GGUF file, read once.

    ``tokenizer_path``: a directory, or the GGUF file with the tokenizer.
    """

    def __init__(
        self, path: Path, *, overrides: dict[str, Any] | None = None, tokenizer_path: Path | None = None
    ) -> None:
        self.path = path
        self.tokenizer_path = tokenizer_path or path
        header = _header(path) if path.is_file() else None
        if header is not None:
            self.config, self.generation_config = _described(header), gguf_generation_config(header)
        else:
            self.config = self._read("config.json", required=True)
            self.generation_config = self._read("generation_config.json")
        self.config = merge_objects(self.config, overrides or {})
        if self.tokenizer_path.is_file():
            own = header if header is not None and self.tokenizer_path == path else _header(self.tokenizer_path)
            self.tokenizer_config = tokenizer_settings(own.metadata)
        else:
            self.tokenizer_config = self._read("tokenizer_config.json", base=self.tokenizer_path)
        for number in (self.context_length, self.vocab_size):
            if number > _MAX_NUMBER:
                raise ModelPathError(f"config.json: a size of {number} is beyond {_MAX_NUMBER}; is the file damaged?")
        self.eos_token_ids()

    def _read(self, name: str, *, required: bool = False, base: Path | None = None) -> dict[str, Any]:
        file = (base or self.path) / name
        if not file.is_file():
            if required:
                raise ModelPathError(
                    f"{file} is missing: model directories in Hugging Face's layout have one. Give such a directory or "
                    "a .gguf file."
                )
            return {}
        try:
            return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
        except (msgspec.DecodeError, OSError, RecursionError) as error:
            raise ModelPathError(f"{file} cannot be read as a JSON object: {error}") from error

    @property
    def context_length(self) -> int:
        """Most tokens of a sequence, by config.json."""
        return next((result for name in LENGTH_KEYS if (result := self._number(name))), 2048)

    @property
    def vocab_size(self) -> int:
        return self._number("vocab_size")

    @property
    def architecture(self) -> str:
        names = self.config.get("architectures") or ["unknown"]
        return str(names[0] if isinstance(names, list) else names)

    def _number(self, key: str) -> int:
        """A size in config.json; 0 if it is missing."""
        value = self.config.get(key)
        if value is None:
            text = self.config.get("text_config")  # of a model with more than a language model
            value = text.get(key) if isinstance(text, dict) else None
        if value is None:
            return 0
        if type(value) is not int or value < 0:
            raise ModelPathError(f"config.json: {key} must be an integer, not {str(value)[:80]!r}")
        return value

    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a sequence, from generation_config.json or else config.json."""
        text = self.config.get("text_config")
        own = text.get("eos_token_id") if isinstance(text, dict) else None
        value = self.generation_config.get("eos_token_id", self.config.get("eos_token_id", own))
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        if not all(type(number) is int for number in ids):
            raise ModelPathError(f"eos_token_id must be a token id or a list of them, not {str(value)[:80]!r}")
        return tuple(ids)

    def chat_template(self, override: str | None) -> str | None:
        """The text of the template: ``override`` (a file, the name of a template of the model or a built-in one, or
        Jinja text), that of the model, or None."""
        named: dict[str, str] = {}
        template = self.tokenizer_config.get("chat_template")
        if isinstance(template, list):
            named = {
                str(t["name"]): str(t["template"])
                for t in template
                if isinstance(t, dict) and {"name", "template"} <= t.keys()
            }
            template = named.get("default")
        file = self.tokenizer_path / "chat_template.jinja"
        if file.is_file():
            template = file.read_text(encoding="utf-8")
        for extra in sorted((self.tokenizer_path / "additional_chat_templates").glob("*.jinja")):
            named[extra.stem] = extra.read_text(encoding="utf-8")
        if override is None:
            return template if isinstance(template, str) else None
        if override in named:
            return named[override]
        if "{%" in override or "{{" in override:
            return override
        path = Path(override).expanduser()
        if path.is_file():
            return path.read_text(encoding="utf-8")
        if override in _TEMPLATES:
            return _TEMPLATES[override]
        raise ModelPathError(
            f"--chat-template {override[:200]} is neither a file nor the name of a known template. Leave it out for "
            f"the model's own template, or give one of {', '.join(sorted({*named, *_TEMPLATES}))}, the path of a Jinja "
            "file, or Jinja text."
        )
