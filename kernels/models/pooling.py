"""Reads the pooling of a model that generates no text from its files. No torch: the engine's process reads it too.

Embedding models are saved by sentence-transformers: ``modules.json`` lists the modules behind the transformer, and the
directory of a pooling module (``1_Pooling``) has its configuration. Models that classify and reward models have an
architecture of their own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from kernels.contract.errors import ConfigError
from kernels.contract.pooling import DenseConfig, Mode, PoolingConfig
from kernels.models.registry import BIDIRECTIONAL, HEADS, Entry, base_architecture, find_encoder, is_decoder
from kernels.weights.wrapped import language_model

__all__ = ["read_pooling"]

_MODES: Mapping[str, Literal["cls", "mean", "last"]] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "cls": "cls",
    "mean": "mean",
    "lasttoken": "last",
}
"""Modes of sentence-transformers that are run."""

_MAX_LABELS = 65_536


_MODULES = ("Transformer", "Pooling", "Dense", "Normalize")
"""Modules of sentence-transformers that are run, in their order."""

_DENSE_ACTIVATIONS: Mapping[str, Literal["none", "tanh", "relu", "gelu", "sigmoid", "silu"]] = {
    "Identity": "none",
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "Sigmoid": "sigmoid",
    "SiLU": "silu",
}

_MAX_DENSE = 65_536


def read_pooling(directory: Path, config: Mapping[str, Any], is_embedding: bool = False) -> PoolingConfig | None:
    """The pooling of the model in ``directory``, whose config.json is ``config``; None for a model that generates text.

    is_embedding: whether a model that could generate text makes vectors of its last tokens instead. Raises ConfigError.
    """
    names = config.get("architectures") or []
    name = str(names[0]) if isinstance(names, list) and names else ""
    entry = find_encoder(name)
    encoder = entry is not None
    if entry is not None:
        config = language_model(config)
    both_ways = not encoder and _attends_both_ways(config)
    if both_ways and (name.endswith(HEADS) or base_architecture(name) not in BIDIRECTIONAL):
        raise ConfigError(
            f"config.json: the tokens of {name} attend to those after them (is_causal, use_bidirectional_attention), "
            f"which is run for embeddings of {', '.join(BIDIRECTIONAL)}; use another model"
        )
    if name.endswith(HEADS):
        return _classifier(name, config, entry)
    modules, dense = _modules(directory)
    headless = name.endswith("Model") and not name.endswith("LMHeadModel") and not is_decoder(name)
    if not (modules or encoder or headless or is_embedding):
        if both_ways:
            raise ConfigError(
                f"config.json: the tokens of {name} attend to those after them, so it generates no text; serve it with "
                "--is-embedding"
            )
        return None
    mode: Mode = "cls" if encoder else "mean" if both_ways else "last"
    if "Pooling" in modules:
        mode = _mode(directory / modules["Pooling"])
    end_token = projected = 0
    if entry is not None and entry.end:
        if "Pooling" in modules:
            raise ConfigError(
                f"{directory / modules['Pooling']}: the vectors of {name} are those of the token that ends a text, and "
                "no other pooling is run; remove the module"
            )
        mode, end_token = _end(config)
        projected = _projected(directory, config) if entry.end == "projection" else 0
    if not encoder and not both_ways and mode != "last":
        raise ConfigError(
            f"the pooling of {name} takes {mode}, and a decoder's vectors are those of the last token; use a "
            "model that was trained for that"
        )
    prompts, default = _prompts(directory)
    if mode == "mean" and any(prompts.values()) and "Pooling" in modules:
        pooling = directory / modules["Pooling"] / "config.json"
        if _read(pooling).get("include_prompt") is False:
            raise ConfigError(
                f"{pooling}: include_prompt false leaves the tokens of a prompt out of the mean, and they are not left "
                "out here; use another model"
            )
    limits = [] if entry is None else [_positions(entry, config)]
    transformer = _transformer(directory)
    given = transformer.get("max_seq_length")
    if type(given) is int and given > 0:
        limits.append(given)
    return PoolingConfig(
        task="embed",
        mode=mode,
        normalize="Normalize" in modules or not modules,
        encoder=encoder or both_ways,
        max_tokens=min(limits, default=0),
        prompts=prompts,
        default_prompt=default,
        lowercase=transformer.get("do_lower_case") is True,
        dense=_dense(directory, dense, projected or config.get("hidden_size")),
        end_token=end_token,
        projected=projected,
    )


def _end(config: Mapping[str, Any]) -> tuple[Mode, int]:
    """Where an input ends: at its first token ``eos_token_id``. CLIP's older files have 2 there, which means the token
    with the largest id."""
    token = config.get("eos_token_id", 49407)
    if type(token) is not int or token < 0:
        raise ConfigError(f"config.json: eos_token_id must be a token id, and is {str(token)[:80]!r}")
    return ("largest", 0) if token == 2 else ("end", token)


def _projected(directory: Path, config: Mapping[str, Any]) -> int:
    return _features(directory / "config.json", {"projection_dim": 512} | dict(config), "projection_dim")


def _attends_both_ways(config: Mapping[str, Any]) -> bool:
    """Whether a decoder's tokens attend to those after them."""
    return config.get("is_causal") is False or config.get("use_bidirectional_attention") is True


def _features(file: Path, config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if type(value) is not int or not 0 < value <= _MAX_DENSE:
        raise ConfigError(f"{file}: {name} must be 1 to {_MAX_DENSE}, and is {value!r}")
    return value


def _dense(directory: Path, paths: list[str], size: Any) -> tuple[DenseConfig, ...]:
    """The Dense modules in these directories. ``size``: numbers of a hidden state. Raises ConfigError."""
    result: list[DenseConfig] = []
    for path in paths:
        file = directory / path / "config.json"
        config = _read(file)
        inputs, outputs = _features(file, config, "in_features"), _features(file, config, "out_features")
        if type(size) is int and inputs != size:
            raise ConfigError(f"{file}: in_features is {inputs}, and the vectors before it have {size} numbers")
        function = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
        kind = _DENSE_ACTIVATIONS.get(function.rpartition(".")[2])
        if kind is None or not function.startswith("torch.nn.modules."):
            raise ConfigError(
                f"{file}: the activation_function {function[:80]!r} is not run; {', '.join(_DENSE_ACTIVATIONS)} of "
                "torch.nn are"
            )
        for name in ("module_input_name", "module_output_name"):
            if config.get(name) not in (None, "sentence_embedding"):
                raise ConfigError(f"{file}: {name} {str(config[name])[:80]!r} is not run; sentence_embedding is")
        result.append(DenseConfig(path, inputs, outputs, config.get("bias", True) is not False, kind))
        size = outputs
    return tuple(result)


def _prompts(directory: Path) -> tuple[dict[str, str], str]:
    """The prompts of config_sentence_transformers.json, and the name of the default one or an empty text."""
    file = directory / "config_sentence_transformers.json"
    config = _read(file)
    prompts, default = config.get("prompts") or {}, config.get("default_prompt_name") or ""
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ConfigError(f"{file}: prompts must be an object of texts")
    if default and default not in prompts:
        raise ConfigError(f"{file}: default_prompt_name {str(default)[:80]!r} is none of prompts: {sorted(prompts)}")
    return prompts, default


def _transformer(directory: Path) -> dict[str, Any]:
    """The configuration of the module that runs the transformer; old ones are named for its family."""
    names = ("bert", "roberta", "xlm-roberta")
    files = [directory / f"sentence_{name}_config.json" for name in names]
    return _read(next((file for file in files if file.is_file()), files[0]))


def _classifier(name: str, config: Mapping[str, Any], encoder: Entry | None) -> PoolingConfig:
    labels = _labels(config, 1 if name.endswith("ForRewardModel") else 2)
    activation: Literal["softmax", "sigmoid", "none"] = "softmax" if len(labels) > 1 else "sigmoid"
    if name.endswith("ForRewardModel") or config.get("problem_type") == "regression":
        activation = "none"
    elif config.get("problem_type") == "multi_label_classification":
        activation = "sigmoid"
    trained = config.get("sentence_transformers")
    function = trained.get("activation_fn") if isinstance(trained, dict) else None
    function = function or config.get("sbert_ce_default_activation_function")
    if isinstance(function, str):
        activation = _activation(function)
    return PoolingConfig(
        task="classify",
        mode="last" if encoder is None else _classifier_mode(config),
        encoder=encoder is not None,
        labels=labels,
        activation=activation,
        max_tokens=0 if encoder is None else _positions(encoder, config),
    )


def _classifier_mode(config: Mapping[str, Any]) -> Literal["cls", "mean"]:
    """What an encoder's head reads: the first token's state, or as ModernBERT's ``classifier_pooling`` says."""
    match config.get("classifier_pooling", "cls"):
        case "cls":
            return "cls"
        case "mean":
            return "mean"
        case other:
            raise ConfigError(f"config.json: classifier_pooling must be cls or mean, and is {str(other)[:80]!r}")


def _activation(function: str) -> Literal["softmax", "sigmoid", "none"]:
    """The activation of a cross encoder, from the class that sentence-transformers names."""
    match function.rpartition(".")[2]:
        case "Identity":
            return "none"
        case "Sigmoid":
            return "sigmoid"
        case "Softmax":
            return "softmax"
    raise ConfigError(
        f"the activation {function[:80]!r} of config.json is not run; use Identity, Sigmoid or Softmax, by "
        "--json-model-override-args"
    )


def _labels(config: Mapping[str, Any], default: int) -> tuple[str, ...]:
    """``id2label``, or as many numbered ones as ``num_labels`` says."""
    given = config.get("id2label")
    if isinstance(given, dict) and given:
        try:
            return tuple(str(given[key]) for key in sorted(given, key=int))
        except ValueError:
            raise ConfigError("config.json: the keys of id2label must be numbers") from None
    count = config.get("num_labels", default)
    if type(count) is not int or not 0 < count <= _MAX_LABELS:
        raise ConfigError(f"config.json: num_labels must be 1 to {_MAX_LABELS}, and is {count!r}")
    return tuple(f"LABEL_{number}" for number in range(count))


def _positions(encoder: Entry, config: Mapping[str, Any]) -> int:
    """Tokens of an encoder's input."""
    count, padding = config.get("max_position_embeddings", encoder.positions), config.get("pad_token_id", 1)
    if type(count) is not int or count < 1:
        raise ConfigError(f"config.json: max_position_embeddings must be a whole number, and is {count!r}")
    offset = padding + 1 if encoder.padded_positions and type(padding) is int else 0
    if count <= offset:
        raise ConfigError(f"config.json: max_position_embeddings {count} leaves no position behind pad_token_id")
    return count - offset


def _modules(directory: Path) -> tuple[dict[str, str], list[str]]:
    """The modules of sentence-transformers and their directories, by class, and those of Dense modules, of which there
    may be several; empty without any. Raises ConfigError for modules that are not run."""
    file = directory / "modules.json"
    if not file.is_file():
        return ({"Pooling": "1_Pooling"} if (directory / "1_Pooling" / "config.json").is_file() else {}), []
    listed = _decode(file)
    if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
        raise ConfigError(f"{file} must be a list of modules; download it again")
    result: dict[str, str] = {}
    dense: list[str] = []
    order = -1
    for one in listed:
        kind, path = str(one.get("type", "")).rpartition(".")[2], str(one.get("path", ""))
        if kind not in _MODULES:
            raise ConfigError(
                f"{file} lists the module {kind[:80]}, which is not run: {', '.join(_MODULES)} are; use another model"
            )
        if path and (Path(path).name != path or path == ".."):
            raise ConfigError(f"{file} names a directory outside its own: {path[:80]!r}")
        place = _MODULES.index(kind)
        if place < order or (place == order and kind != "Dense"):
            raise ConfigError(f"{file}: modules are run in the order {', '.join(_MODULES)}; use another model")
        order = place
        if kind == "Dense":
            dense.append(path)
        else:
            result[kind] = path
    return result, dense


def _mode(directory: Path) -> Literal["cls", "mean", "last"]:
    """The mode of a pooling module. Raises ConfigError for one that is not run."""
    config = _read(directory / "config.json")
    chosen = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    if isinstance(named := config.get("pooling_mode"), str):
        chosen = [named]
    if len(chosen) != 1 or chosen[0] not in _MODES:
        raise ConfigError(
            f"{directory / 'config.json'}: the pooling {', '.join(chosen) or 'none'} is not run; one of the first "
            "token, the mean or the last token is"
        )
    return _MODES[chosen[0]]


def _read(file: Path) -> dict[str, Any]:
    """A JSON object; empty without the file."""
    result = _decode(file) if file.is_file() else {}
    if not isinstance(result, dict):
        raise ConfigError(f"{file} must be a JSON object; download it again")
    return result


def _decode(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read ({error}); download it again") from error
