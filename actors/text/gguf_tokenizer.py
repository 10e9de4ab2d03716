"""Builds the tokenizer of a GGUF file from its vocabulary and the settings that its names imply.

Three kinds are supported. ``gpt2`` is byte-level BPE. ``tokenizer.ggml.pre`` names its pre-tokenization pattern; the
patterns are those of the models' own tokenizer.json files. ``llama`` is SentencePiece's BPE: every pair of tokens that
forms another token merges, the best score first. ``gemma4`` is the same with merges that the file lists.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

__all__ = ["GgufTokenizerError", "build_tokenizer", "tokenizer_settings"]

_REMEDY = "set --tokenizer-path to a directory with the model's tokenizer.json"
_MERGES_PER_TOKEN = 32
"""Limit of merges, as a multiple of the vocabulary: the vocabularies of Llama 2 and Gemma have two or three a token."""
_MAX_TOKEN_CHARS = 1024
"""The longest token that is split into pairs, which takes time quadratic in its length."""
_UNKNOWN, _CONTROL, _USER = 2, 3, 4
_STRIPPING: Mapping[tuple[str, str], tuple[str, ...]] = {("phi3", "llama"): ("<unk>", "<s>", "<|endoftext|>")}
"""Tokenizers whose added tokens strip the whitespace after them, by ``general.architecture`` and
``tokenizer.ggml.model``, and the tokens that do not. It is in tokenizer.json; no key of a GGUF file says so."""

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _WORDS + r"\p{N}{1,3}" + _REST
_QWEN2 = _WORDS + r"\p{N}" + _REST
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"


def _cased(upper: str, lower: str, digits: str, ends: str) -> str:
    """Words that end where a capital follows a small letter, with an English ending."""
    head = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{head}[{upper}]*[{lower}]+{_SUFFIX}|{head}[{upper}]+[{lower}]*{_SUFFIX}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+{ends}|\s*[\r\n]+|\s+(?!\S)|\s+"


_GPT4O = _cased(_UPPER, _LOWER, r"\p{N}{1,3}", r"[\r\n/]*")
_NO_HAN = r"&&[^\p{Han}]"
_KIMI = r"[\p{Han}]+|" + _cased(_UPPER + _NO_HAN, _LOWER + _NO_HAN, r"\p{N}{1,3}", r"[\r\n]*")
_DEEPSEEK = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_AFMOE = (
    r"(?<!\p{N})\p{N}{1,2}(?=(?:\p{N}{3})*+(?!\p{N}))|\p{N}{3}",  # groups of three digits from the right
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
    "\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+",
    _DEEPSEEK[2],
)
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_SEED = _WORDS + r"\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_EXAONE_MOE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)

_PATTERNS: Mapping[str, str | tuple[str, ...] | None] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), _LLAMA3),  # dbrx: Phi-4's too
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan", "grok-2", "solar-open"), _QWEN2),
    "qwen35": _QWEN35,
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), _GPT4O),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), (r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O)),
    "kimi-k2": _KIMI,
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK),
    **dict.fromkeys(("bailingmoe", "bailingmoe2"), _LING),
    "afmoe": _AFMOE,
    "seed-coder": _SEED,
    "exaone-moe": _EXAONE_MOE,
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "exaone4"), None),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "exaone"), None),
}
"""Patterns by ``tokenizer.ggml.pre``, of several each for the pieces of the one before; None: that of GPT-2, which is
built into the library."""

_DIGITS = ("smollm", "starcoder", "refact", "command-r", "exaone")
"""Vocabularies whose texts are first split at every digit."""

_NORMALIZED = ("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "qwen35", "olmo")
"""Vocabularies whose texts are normalized to composed characters (NFC)."""

_STARTING = ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2", "tekken")
"""Vocabularies whose texts start with the BOS token."""

_WHOLE = (*_STARTING, "glm4")
"""Vocabularies whose whole words need no merges."""

_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


class GgufTokenizerError(ValueError):
    """The file's tokenizer cannot be used; the message says what to do instead."""


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build the tokenizer of a file's metadata. Raises GgufTokenizerError."""
    model = metadata.get("tokenizer.ggml.model")
    tokens = _list(metadata, "tokens", str)
    if len(set(tokens)) != len(tokens):
        raise GgufTokenizerError(f"the GGUF file's vocabulary contains a token twice; {_REMEDY}")
    try:
        if model == "gpt2":
            tokenizer, starts = _byte_level(metadata, tokens)
        elif model == "llama":
            tokenizer, starts = _sentence_pieces(metadata, tokens), True
        elif model == "gemma4":
            merges = [tuple(merge.split(" ", 1)) for merge in _list(metadata, "merges", str)]
            tokenizer, starts = _with_visible_spaces(metadata, tokens, merges, prefix=False), True
        else:
            raise GgufTokenizerError(
                f"the GGUF file's tokenizer is {model!r}; supported are gpt2, llama and gemma4: {_REMEDY}"
            )
    except GgufTokenizerError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise GgufTokenizerError(f"the GGUF file's tokenizer cannot be built ({error}); {_REMEDY}") from error
    _add_tokens(tokenizer, metadata, tokens)
    _frame(tokenizer, metadata, tokens, starts)
    return tokenizer


def tokenizer_settings(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The equivalent of tokenizer_config.json: special tokens by name, and chat templates."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    tokens = tokens if isinstance(tokens, list) else []
    result: dict[str, Any] = {}
    for name, key in _NAMED.items():
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if type(index) is int and 0 <= index < len(tokens) and isinstance(tokens[index], str):
            result[name] = tokens[index]
    prefix = "tokenizer.chat_template"
    default = metadata.get(prefix)
    more = [
        {"name": key.removeprefix(f"{prefix}."), "template": text}
        for key, text in metadata.items()
        if key.startswith(f"{prefix}.") and isinstance(text, str)
    ]
    if isinstance(default, str):
        result["chat_template"] = [{"name": "default", "template": default}, *more] if more else default
    elif more:
        result["chat_template"] = more
    return result


def _list(metadata: Mapping[str, Any], name: str, kind: type) -> list[Any]:
    result = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(result, list) or not result or not all(isinstance(one, kind) for one in result):
        raise GgufTokenizerError(f"the GGUF file has no list tokenizer.ggml.{name}; {_REMEDY}")
    return result


def _byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> tuple[Tokenizer, bool]:
    pre = metadata.get("tokenizer.ggml.pre")
    if not isinstance(pre, str) or pre not in _PATTERNS:
        raise GgufTokenizerError(
            f"the GGUF file's pre-tokenizer is {pre!r} (tokenizer.ggml.pre); supported are "
            f"{', '.join(_PATTERNS)}: {_REMEDY}"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in _list(metadata, "merges", str)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    model = BPE(vocab=vocabulary, merges=merges, fuse_unk=False, byte_fallback=False, ignore_merges=pre in _WHOLE)
    tokenizer = Tokenizer(model)
    pattern = _PATTERNS[pre]
    steps: list[Any] = []
    if pre in _DIGITS:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    for one in (pattern,) if isinstance(pattern, str) else pattern or ():
        steps.append(pre_tokenizers.Split(Regex(one), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if pre in _NORMALIZED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre in _STARTING


def _sentence_pieces(metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    scores = _list(metadata, "scores", float)
    if len(scores) != len(tokens):
        raise GgufTokenizerError(f"the GGUF file has {len(tokens)} tokens and {len(scores)} scores; {_REMEDY}")
    index = {token: place for place, token in enumerate(tokens)}
    kinds = _kinds(metadata, tokens)
    plain = {token for token, kind in zip(tokens, kinds, strict=True) if kind not in (_UNKNOWN, _CONTROL)}
    room = _MERGES_PER_TOKEN * len(tokens)
    result: list[tuple[float, int, tuple[str, str]]] = []
    for token in plain:
        if len(token) > _MAX_TOKEN_CHARS:
            raise GgufTokenizerError(
                f"the GGUF file's vocabulary has a token of {len(token)} characters; at most {_MAX_TOKEN_CHARS} are "
                f"read: {_REMEDY}"
            )
        pairs = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        place = index[token]
        result.extend((-scores[place], place, pair) for pair in pairs if pair[0] in plain and pair[1] in plain)
        if len(result) > room:
            raise GgufTokenizerError(
                f"the tokens of the GGUF file's vocabulary form more than {room} pairs, {_MERGES_PER_TOKEN} a token; "
                f"usual are two or three: {_REMEDY}"
            )
    result.sort()
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    return _with_visible_spaces(metadata, tokens, [pair for _, _, pair in result], prefix)


def _with_visible_spaces(metadata: Mapping[str, Any], tokens: list[str], merges: list[Any], prefix: bool) -> Tokenizer:
    """BPE of a whole text whose spaces are visible characters. ``prefix``: whether it begins with one."""
    index = {token: place for place, token in enumerate(tokens)}
    kinds = _kinds(metadata, tokens)
    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == _UNKNOWN), None)
    tokenizer = Tokenizer(BPE(vocab=index, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    mark = "\u2581"  # SentencePiece's visible space
    replace = normalizers.Replace(" ", mark)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(mark), replace]) if prefix else replace
    steps: list[Any] = [decoders.Replace(mark, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(content=" ", left=1, right=0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _kinds(metadata: Mapping[str, Any], tokens: list[str]) -> list[int]:
    if "tokenizer.ggml.token_type" not in metadata:
        return [1] * len(tokens)
    kinds = _list(metadata, "token_type", int)
    if len(kinds) != len(tokens):
        raise GgufTokenizerError(f"the GGUF file has {len(tokens)} tokens and {len(kinds)} types of them; {_REMEDY}")
    return kinds


def _add_tokens(tokenizer: Tokenizer, metadata: Mapping[str, Any], tokens: list[str]) -> None:
    """Add tokens that are matched before pre-tokenization: control tokens and user-defined ones."""
    keeping = _STRIPPING.get((str(metadata.get("general.architecture")), str(metadata.get("tokenizer.ggml.model"))))
    added = [
        AddedToken(
            token,
            special=kind in (_CONTROL, _UNKNOWN),
            normalized=False,
            rstrip=keeping is not None and token not in keeping,
        )
        for token, kind in zip(tokens, _kinds(metadata, tokens), strict=True)
        if kind in (_CONTROL, _UNKNOWN, _USER) and token
    ]
    tokenizer.add_tokens(added)


def _frame(tokenizer: Tokenizer, metadata: Mapping[str, Any], tokens: list[str], starts: bool) -> None:
    """Add the tokens at the start and end of every text."""
    ends = {"bos": starts, "eos": False}
    parts = {"bos": "", "eos": ""}
    special: list[tuple[str, int]] = []
    for name, default in ends.items():
        index = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if not metadata.get(f"tokenizer.ggml.add_{name}_token", default):
            continue
        if type(index) is int and 0 <= index < len(tokens):
            parts[name] = tokens[index]
            special.append((tokens[index], index))
    if special:
        single = [part for part in (parts["bos"], "$A", parts["eos"]) if part]
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
