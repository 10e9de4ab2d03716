"""Arguments from the command line, the environment variable TROUPE_ARGS and a configuration file.

The command line (or a mapping in its place) wins over TROUPE_ARGS, that over the file, and the file over the defaults.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from actors.options import ArgumentError, Arguments
from actors.options.argument import Argument
from actors.options.keys import with_keys
from actors.options.lora import adapter_path
from actors.options.resolving import RawArgument, canonical, find, resolve
from actors.options.table import ARGUMENTS
from app.understudy import MODEL_DIR
from app.understudy.adapters import adapter_names, included_adapter, is_included_model
from app.understudy.drafts import draft_arguments

__all__ = ["ENVIRONMENT_NAME", "load_arguments", "with_spelled_names"]

ENVIRONMENT_NAME = "TROUPE_ARGS"
MAX_FILE_BYTES = 1 << 20
_SIZES = (
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "speculative_dflash_block_size",
)


def load_arguments(
    argv: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
    mapping: Mapping[str, object] | None = None,
) -> Arguments:
    """The arguments of a server.

    ``argv``: the words after ``troupe serve``; None without a command line (``hypercorn app:asgi``). ``environ``
    (default: the process's) may have TROUPE_ARGS, which is split as a shell would, and keys. ``mapping``: names and
    values in place of a command line. Without a model the included one is served. Raises ArgumentError with every
    problem found.
    """
    environ = os.environ if environ is None else environ
    problems: list[str] = []
    layers = []
    try:
        layers.append(_read_words(shlex.split(environ.get(ENVIRONMENT_NAME, "")), f" in {ENVIRONMENT_NAME}", problems))
    except ValueError as error:
        problems.append(f"{ENVIRONMENT_NAME}: {error}; quote its values as for a shell")
    if argv is not None:
        layers.append(_read_words(argv, "", problems))
    layers.append([RawArgument(name=name, value=value, spelling=name) for name, value in (mapping or {}).items()])
    files = [given for layer in layers for given in layer if canonical(given.name) == "config"]
    if files:
        try:
            layers.insert(0, _read_file(str(files[-1].value)))
        except ArgumentError as error:
            problems.extend(error.problems)
    values: dict[str, Any] = {}
    try:
        values = with_keys(resolve(layers), environ, _spelled)
    except ArgumentError as error:
        problems.extend(error.problems)
    if argv is None:
        problems.extend(
            f"{field}: without a command line the ASGI server decides where to listen; use its own options (hypercorn "
            "--bind, Ray Serve's http_options), or troupe serve"
            for field in ("host", "port")
            if field in values
        )
    names: tuple[str, ...] = values.get("served_model_name") or ()
    if values.get("model_path") is None and any(Path(name).expanduser().exists() for name in names[1:]):
        problems.append(f"--served-model-name takes several names and took {names[-1]}; give the model before it")
    if problems:
        raise ArgumentError(problems)
    if values.get("model_path") is None:
        values["model_path"] = str(MODEL_DIR)
        values.setdefault("served_model_name", ("understudy",))
    try:
        return Arguments(**_with_adapters(_with_draft(values)))
    except ArgumentError as error:
        raise ArgumentError([with_spelled_names(problem) for problem in error.problems]) from None


def _spelled(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def with_spelled_names(problem: str) -> str:
    """The sentence, whose fields of Arguments are spelled as options: ``--nccl-port`` for ``nccl_port``.

    Only ``nnodes``, names of several words, and one that begins the sentence are replaced: others may be plain words.
    """
    names = {argument.field for argument in ARGUMENTS}
    names |= {name.replace("-", "_") for argument in ARGUMENTS for name in argument.opposites}
    first = problem.partition(" ")[0]
    begin = _spelled(first) + problem[len(first) :] if first in names else problem
    long = "|".join(sorted((name for name in names if "_" in name or name == "nnodes"), key=len, reverse=True))
    return re.sub(rf"(?<![\w/.\-])(?:{long})(?![\w/\-])", lambda found: _spelled(found[0]), begin)


def _with_draft(values: dict[str, Any]) -> dict[str, Any]:
    """Add the included draft and its settings, if the included model is served with draft tokens and no draft was
    given.

    A given size of the draft replaces all suggested sizes. A token map of ``none`` disables the list of frequent
    tokens.
    """
    algorithm = values.get("speculative_algorithm")
    if algorithm is None or values.get("speculative_draft_model_path") is not None:
        return values
    if not is_included_model(str(values["model_path"])):
        return values
    suits = draft_arguments(str(algorithm))
    sized = any(values.get(name) is not None for name in _SIZES)
    return {name: value for name, value in suits.items() if not sized or name not in _SIZES} | {
        name: value for name, value in values.items() if name != "speculative_draft_model_path"
    }


def _with_adapters(values: dict[str, Any]) -> dict[str, Any]:
    """Replace the names of included adapters by their directories, if the included model is served.

    A directory of that name is taken instead. Raises ArgumentError for a name that is neither.
    """
    words: tuple[str, ...] = values.get("lora_paths") or ()
    if not words or not is_included_model(str(values["model_path"])):
        return values
    found, problems = [], []
    for word in words:
        try:
            adapter = adapter_path(word)
        except ArgumentError:
            found.append(word)  # refused with all other arguments
            continue
        included = included_adapter(adapter.path)
        if included is not None:
            adapter = msgspec.structs.replace(adapter, path=included)
            word = msgspec.json.encode(adapter).decode()
        elif os.sep not in adapter.path and not Path(adapter.path).expanduser().exists():
            names = ", ".join(adapter_names())
            problems.append(
                f"--lora-paths: {adapter.path[:128]!r} is neither a directory nor an included adapter ({names}); give "
                "one of these, a directory in PEFT's format, or owner/name of the hub"
            )
        found.append(word)
    if problems:
        raise ArgumentError(problems)
    return values | {"lora_paths": tuple(found)}


def _read_words(words: Sequence[str], source: str, problems: list[str]) -> list[RawArgument]:
    """Names and values from the words of a command line. Unreadable words are added to ``problems``."""
    given: list[RawArgument] = []
    rest = list(reversed(words))
    positional = False  # after "--" nothing is a name
    model_seen = False
    while rest:
        word = rest.pop()
        if word == "--" and not positional:
            positional = True
        elif positional or not word.startswith("-") or word == "-":
            if model_seen:
                problems.append(f"{word}{source}: unexpected; only one model can be given")
            model_seen = True
            given.append(RawArgument(name="model", value=word, spelling=f"the model {word}{source}"))
        else:
            name, equals, value = word.partition("=")
            spelling = name + source
            try:
                found = find(name)
            except ArgumentError as error:
                problems.extend(f"{spelling}: {problem}" for problem in error.problems)
                _take_values(rest, equals)
                continue
            if found.entry.is_flag:
                # otherwise "--enable-metrics false" would name a model and turn the flag into its opposite
                has_value = not equals and rest and rest[-1].lower() in ("true", "false")
                flag: object = value if equals else rest.pop() if has_value else True
                given.append(RawArgument(name=name, value=flag, spelling=spelling))
            elif found.entry.takes_many:
                values = [value] if equals else _take_values(rest, equals)
                if not values:
                    problems.append(f"{spelling}: needs one or more values")
                    continue
                given.append(RawArgument(name=name, value=" ".join(values), spelling=spelling))
            elif equals:
                given.append(RawArgument(name=name, value=value, spelling=spelling))
            elif rest and not rest[-1].startswith("--"):
                given.append(RawArgument(name=name, value=rest.pop(), spelling=spelling))
            else:
                bounds = f": {found.entry.bounds}" if isinstance(found.entry, Argument) else ""
                problems.append(f"{spelling}: needs a value{bounds}")
    return given


def _take_values(rest: list[str], equals: str) -> list[str]:
    """Remove the words up to the next name from the end of ``rest`` (which is reversed)."""
    taken: list[str] = []
    while not equals and rest and not rest[-1].startswith("-"):
        taken.append(rest.pop())
    return taken


def _read_file(path: str) -> list[RawArgument]:
    """The arguments of a YAML file. Raises ArgumentError with the file, and the place that is not YAML."""
    import yaml

    try:
        file = Path(path).expanduser()
        if file.stat().st_size > MAX_FILE_BYTES:
            raise ArgumentError(f"{path}: is larger than {MAX_FILE_BYTES} bytes; a file of arguments is small")
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArgumentError(f"--config {path}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ArgumentError(f"--config {path}: is not YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return []
    if not isinstance(content, dict):
        raise ArgumentError(f"--config {path}: must hold names and values, such as 'max-running-requests: 64'")
    problems = [f"{key!r} in {path}: a name must be text" for key in content if not isinstance(key, str)]
    problems += [f"{key} in {path}: a file cannot name another" for key in content if canonical(str(key)) == "config"]
    if problems:
        raise ArgumentError(problems)
    return [RawArgument(name=key, value=value, spelling=f"{key} in {path}") for key, value in content.items()]
