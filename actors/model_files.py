"""A Hugging Face model directory, or a GGUF file, as the engine's process reads it: configuration, templates, defaults.

No torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from actors.gguf_tokenizer import tokenizer_settings
from kernels.gguf.description import describe, generation_defaults
from kernels.gguf.header import GgufError, GgufHeader, read_header

__all__ = ["ModelFiles", "ModelPathError", "resolve_model_file", "resolve_model_path"]

_WEIGHT_PATTERNS = ["*.safetensors", "*.safetensors.index.json"]
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
"""Built in, for models that bring none; by SGLang's names. Each is the format that its models were trained in."""

_MOST = 1 << 31


class ModelPathError(ValueError):
    """The model cannot be found or read; the message says what to do."""


def resolve_model_path(
    model: str,
    *,
    revision: str | None = None,
    download_dir: str | None = None,
    weights: bool = True,
    argument: str = "--model-path",
) -> Path:
    """The directory of ``model``: itself when it is one, or a .gguf file, else a snapshot of the hub's repository of
    that name.

    ``argument`` names what the model was given by in messages. Raises :class:`ModelPathError`. Blocks while it
    downloads: call it in a thread.
    """
    path = Path(model).expanduser()
    if revision is not None and path.exists():
        raise ModelPathError(
            f"{argument} {model} is here, and {_revision_of(argument)} is for repositories of the hub. Leave it out."
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
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        found = snapshot_download(
            model,
            revision=revision,
            cache_dir=download_dir,
            allow_patterns=_OTHER_PATTERNS + (_WEIGHT_PATTERNS if weights else []),
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise ModelPathError(
            f"{argument} {model} is neither a directory here nor a repository that can be downloaded "
            f"({type(error).__name__}). Check the name, --revision, the network and HF_TOKEN, or download it first "
            "and give the directory."
        ) from error
    return Path(found)


def _revision_of(argument: str) -> str:
    return argument.removesuffix("-path") + "-revision" if "draft" in argument else "--revision"


def resolve_model_file(name: str, *, download_dir: str | None = None, argument: str) -> Path:
    """A file that is here, or one of a hub repository: ``owner/name/file``. Raises :class:`ModelPathError`. Blocks."""
    path = Path(name).expanduser()
    if path.is_file():
        return path.resolve()
    parts = name.split("/")
    if path.is_absolute() or name.startswith(".") or len(parts) < 3 or not all(parts):
        raise ModelPathError(
            f"{argument} {name} is no file here. Give the path of a file, or owner/name/file of one on the hub."
        )
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download("/".join(parts[:2]), "/".join(parts[2:]), cache_dir=download_dir))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise ModelPathError(
            f"{argument} {name} is neither a file here nor one of a repository that can be downloaded "
            f"({type(error).__name__}). Check the name, the network and HF_TOKEN, or give the path of a file."
        ) from error


def _header(file: Path) -> GgufHeader:
    try:
        return read_header(file)
    except GgufError as error:
        raise ModelPathError(str(error)) from error


def _described(header: GgufHeader) -> dict[str, Any]:
    try:
        found: dict[str, Any] = describe(header)
        return found
    except GgufError as error:
        raise ModelPathError(str(error)) from error


class ModelFiles:
    """The small files of a model directory, read once; of a GGUF file, what its metadata says instead.

    ``tokenizer_path`` is a directory, or the GGUF file that holds the tokenizer.
    """

    def __init__(
        self, path: Path, *, overrides: dict[str, Any] | None = None, tokenizer_path: Path | None = None
    ) -> None:
        self.path = path
        self.tokenizer_path = tokenizer_path or path
        header = _header(path) if path.is_file() else None
        if header is not None:
            self.config, self.generation_config = _described(header), generation_defaults(header)
        else:
            self.config = self._read("config.json", required=True)
            self.generation_config = self._read("generation_config.json")
        self.config.update(overrides or {})
        if self.tokenizer_path.is_file():
            own = header if header is not None and self.tokenizer_path == path else _header(self.tokenizer_path)
            self.tokenizer_config = tokenizer_settings(own.metadata)
        else:
            self.tokenizer_config = self._read("tokenizer_config.json", base=self.tokenizer_path)
        for number in (self.context_length, self.vocab_size):
            if number > _MOST:
                raise ModelPathError(f"config.json: a size of {number} is beyond {_MOST}; is the file damaged?")
        self.eos_token_ids()

    def _read(self, name: str, *, required: bool = False, base: Path | None = None) -> dict[str, Any]:
        file = (base or self.path) / name
        if not file.is_file():
            if required:
                raise ModelPathError(
                    f"{file} is missing: a model directory in Hugging Face's layout has one. Give such a directory, or "
                    "a .gguf file."
                )
            return {}
        try:
            return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
        except (msgspec.DecodeError, OSError, RecursionError) as error:
            raise ModelPathError(f"{file} cannot be read as a JSON object: {error}") from error

    @property
    def context_length(self) -> int:
        """Tokens a sequence may have, by config.json."""
        return self._number("max_position_embeddings") or 2048

    @property
    def vocab_size(self) -> int:
        return self._number("vocab_size")

    @property
    def architecture(self) -> str:
        names = self.config.get("architectures") or ["unknown"]
        return str(names[0] if isinstance(names, list) else names)

    def _number(self, key: str) -> int:
        """A size that config.json states, 0 where it does not."""
        value = self.config.get(key)
        if value is None:
            return 0
        if type(value) is not int or value < 0:
            raise ModelPathError(f"config.json: {key} must be a whole number, and is {str(value)[:80]!r}")
        return value

    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a sequence: generation_config.json's, else config.json's."""
        value = self.generation_config.get("eos_token_id", self.config.get("eos_token_id"))
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        if not all(type(number) is int for number in ids):
            raise ModelPathError(f"eos_token_id must be a token id or a list of them, and is {str(value)[:80]!r}")
        return tuple(ids)

    def chat_template(self, override: str | None) -> str | None:
        """The template's text: ``override`` (a file, the name of one of the model's or of ours, or Jinja text), the
        model's, or None."""
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
            f"--chat-template {override[:200]} is no file, and no template of that name is built in. Leave it out for "
            f"the model's own template, or give one of {', '.join(sorted({*named, *_TEMPLATES}))}, the path of a Jinja "
            "file, or Jinja text."
        )
