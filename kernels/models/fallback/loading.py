"""Builds transformers' modules: without weights for the probe, and with those of a directory.

transformers reads safetensors only, tensor by tensor into place, under the names that it gave them in any version.
Pickled weights are never read, and code of a checkpoint runs with ``trust_remote_code`` alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from kernels.contract.errors import ConfigError, LoadError
from kernels.models.fallback.sizes import CodeModel

__all__ = ["architecture_of", "build_empty", "load", "read_config"]


@contextmanager
def _library() -> Iterator[Any]:
    """transformers. It imports torch_npu wherever that is installed, which fails without CANN, so torch_npu is hidden
    meanwhile and no longer, unlike by ``hide_broken_npu``. Workers of an NPU have imported it before."""
    hidden = "torch_npu" not in sys.modules
    if hidden:
        sys.modules["torch_npu"] = None  # type: ignore[assignment]
    try:
        import transformers

        transformers.utils.logging.disable_progress_bar()
        yield transformers
    finally:
        if hidden:
            del sys.modules["torch_npu"]


def read_config(path: str | Path, raw: Mapping[str, Any], trusted: bool) -> Any:
    """transformers' configuration of the object ``raw``, which is config.json with overrides. Raises ConfigError."""
    directory = Path(path)
    if not directory.is_dir():
        raise ConfigError("transformers' modeling code is run for directories of safetensors alone, not for GGUF files")
    if "AutoConfig" in (raw.get("auto_map") or {}) and trusted:
        with _library() as library:
            kind = type(library.AutoConfig.from_pretrained(directory, trust_remote_code=True, local_files_only=True))
    else:
        with _library() as library:
            known = library.models.auto.configuration_auto.CONFIG_MAPPING
            if raw.get("model_type") not in known:
                code = bool(raw.get("auto_map"))
                raise ConfigError(
                    f"transformers {library.__version__} has no model_type {raw.get('model_type')!r}"
                    + ("; the checkpoint brings code of its own, which --trust-remote-code would run" if code else "")
                )
            kind = known[raw["model_type"]]
    try:
        config = kind.from_dict(_floats(dict(raw)))
    except Exception as error:
        raise ConfigError(f"config.json does not fit transformers' {kind.__name__}: {error}") from error
    config.name_or_path = str(directory)
    return config


def _floats(value: Any) -> Any:
    """``value`` with the numbers that JSON lacks, as transformers writes them."""
    if isinstance(value, dict):
        if set(value) == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
            return float(value["__float__"])
        return {key: _floats(part) for key, part in value.items()}
    return [_floats(part) for part in value] if isinstance(value, list) else value


def architecture_of(config: Any, raw: Mapping[str, Any], trusted: bool) -> str:
    """The class that transformers builds for a causal language model of ``config``. Raises ConfigError."""
    if trusted and "AutoModelForCausalLM" in (raw.get("auto_map") or {}):
        return str(raw["auto_map"]["AutoModelForCausalLM"]).rpartition(".")[2]
    with _library() as library:
        mapping = library.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        result = mapping.get(config.model_type)
    names = raw.get("architectures") or []
    if result is None:
        raise ConfigError(f"transformers builds no causal language model of model_type {config.model_type!r}")
    name = result if isinstance(result, str) else result[0]
    if names and name not in names:
        raise ConfigError(
            f"transformers builds {name} of model_type {config.model_type!r}, and config.json names {names}"
        )
    return name


def build_empty(config: Any, attention: str, trusted: bool) -> Any:
    """The model without weights, on the meta device. Raises ConfigError."""
    with _library() as library, torch.device("meta"):
        try:
            build = library.AutoModelForCausalLM.from_config
            return build(config, attn_implementation=attention, trust_remote_code=trusted)
        except Exception as error:
            raise ConfigError(
                f"transformers cannot build a model of model_type {config.model_type!r} with another attention "
                f"({type(error).__name__}: {error})"
            ) from error


def load(model: CodeModel, attention: str, dtype: torch.dtype) -> Any:
    """The model with its weights, on the host. Raises LoadError that names missing, extra and misshapen tensors."""
    with _library() as library:
        if model.dummy:
            torch.manual_seed(model.seed)
            made = library.AutoModelForCausalLM.from_config(
                model.config, attn_implementation=attention, dtype=dtype, trust_remote_code=model.trusted
            )
            return made.eval()
        try:
            made, report = library.AutoModelForCausalLM.from_pretrained(
                model.path,
                config=model.config,
                attn_implementation=attention,
                dtype=dtype,
                use_safetensors=True,
                local_files_only=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                trust_remote_code=model.trusted,
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise LoadError(f"transformers cannot load the weights in {model.path}: {error}") from error
    wrong = [f"{name} is missing" for name in sorted(report["missing_keys"])]
    wrong += [
        f"{name} has shape {list(stored)}, config.json asks for {list(asked)}"
        for name, stored, asked in sorted(report["mismatched_keys"])
    ]
    wrong += [f"{name} is in the checkpoint and not in the model" for name in sorted(report["unexpected_keys"])]
    wrong += [str(message) for message in report.get("error_msgs") or ()]
    if wrong:
        more = f"; and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise LoadError(
            f"the weights in {model.path} do not fit its config.json: {'; '.join(wrong[:8])}{more}. "
            "Check that both come from one model and that the download is whole"
        )
    return made.eval()
