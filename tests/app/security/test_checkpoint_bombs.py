"""Files of a checkpoint that were made to hurt: each is refused with an error of ours, and none takes long or much."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from actors.text.model_files import ModelFiles, ModelPathError
from actors.text.text_codec import TextCodec, is_request_scoped
from kernels.contract.errors import ConfigError, LoadError
from kernels.models.config_loader import read_config
from kernels.weights.safetensors_checkpoint import SafetensorsCheckpoint

DEEP = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
JSON_BOMBS = {
    "deep": DEEP,
    "deep lists": b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "a giant number": b'{"max_position_embeddings":' + b"9" * 100_000 + b"}",
    "a list": b"[]",
    "no text": b"\xff\xfe\0" * 100,
}


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


@pytest.mark.parametrize("bomb", JSON_BOMBS)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"])
def test_json_that_was_made_to_hurt_is_refused_by_its_name(model: Path, name: str, bomb: str) -> None:
    (model / name).write_bytes(JSON_BOMBS[bomb])
    with pytest.raises(ModelPathError, match=name) as caught:
        TextCodec(ModelFiles(model))
    assert len(str(caught.value)) < 1000
    if name == "config.json":
        with pytest.raises(ConfigError):
            read_config(model)


@pytest.mark.parametrize("key", ["max_position_embeddings", "vocab_size"])
@pytest.mark.parametrize("value", ["x", [1], {"a": 1}, -5, 10**12, 1.5, True], ids=repr)
def test_a_size_that_is_none_is_refused(model: Path, key: str, value: object) -> None:
    change(model / "config.json", **{key: value})
    with pytest.raises(ModelPathError, match=r"config\.json"):
        ModelFiles(model)
    with pytest.raises(ConfigError, match=key):
        read_config(model)


@pytest.mark.parametrize("value", ["x", [[1]], {"a": 1}, 1.5], ids=repr)
def test_an_end_token_that_is_none_is_refused(model: Path, value: object) -> None:
    change(model / "generation_config.json", eos_token_id=value)
    with pytest.raises(ModelPathError, match="eos_token_id"):
        ModelFiles(model)


@pytest.mark.parametrize("value", [5, {"a": 1}, "Other", [[]]], ids=repr)
def test_an_architecture_that_is_none_is_refused(model: Path, value: object) -> None:
    change(model / "config.json", architectures=value)
    assert ModelFiles(model).architecture
    with pytest.raises(ConfigError, match="no supported architecture"):
        read_config(model)


@pytest.mark.parametrize("value", [5, [5], [{"name": "default"}], {"a": 1}], ids=repr)
def test_a_chat_template_that_is_none_is_left_out(model: Path, value: object) -> None:
    change(model / "tokenizer_config.json", chat_template=value)
    assert TextCodec(ModelFiles(model)).template is None


def header(tensors: object, body: bytes = bytes(64)) -> bytes:
    text = tensors if isinstance(tensors, bytes) else json.dumps(tensors).encode()
    return struct.pack("<Q", len(text)) + text + body


def tensor(shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        struct.pack("<Q", 1 << 63) + b"{}",
        struct.pack("<Q", 10**9) + b"{}",
        header({"a": tensor([4], 0, 16), "b": tensor([4], 0, 16)}),
        header({"a": tensor([-4], 0, 16)}),
        header({"a": tensor([4], -16, 16)}),
        header({"a": tensor([4], 16, 0)}),
        header({"a": tensor([1 << 62, 1 << 62], 0, 16)}),
        header({"a": tensor([10**6], 0, 4 * 10**6)}),
        header(DEEP),
    ],
    ids=lambda content: repr(content[8:60]),
)
def test_a_damaged_safetensors_header_is_refused(model: Path, content: bytes) -> None:
    (model / "model.safetensors").write_bytes(content)
    with pytest.raises(LoadError, match="is not a whole safetensors file"):
        SafetensorsCheckpoint(model)


@pytest.mark.parametrize(
    "content",
    [DEEP, b'{"weight_map":' * 100_000, b'{"weight_map":' + b"9" * 10_000 + b"}", b'{"weight_map":{"a":"../../x"}}'],
    ids=lambda content: repr(content[:40]),
)
def test_a_damaged_index_is_refused(model: Path, content: bytes) -> None:
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_bytes(content)
    with pytest.raises(LoadError, match=r"index\.json"):
        SafetensorsCheckpoint(model)


def test_a_pattern_that_backtracks_without_end_fails_its_request_alone(model: Path) -> None:
    pattern = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    change(model / "tokenizer.json", pre_tokenizer=pattern)
    codec = TextCodec(ModelFiles(model))
    with pytest.raises(BaseException, match="retry-limit") as caught:  # a panic is no Exception
        codec.encode("a" * 2000 + "b")
    assert is_request_scoped(caught.value)
    assert codec.decode(codec.encode("b"))


def replacing(pattern: dict[str, str], content: str, times: int) -> list[dict[str, Any]]:
    return [{"type": "Replace", "pattern": pattern, "content": content}] * times


def template(times: int) -> dict[str, Any]:
    """A prompt, so many times."""
    form = [{"Sequence": {"id": "A", "type_id": 0}}] * times
    return {"type": "TemplateProcessing", "single": form, "pair": form, "special_tokens": {}}


BLOW_UPS: dict[str, dict[str, Any]] = {
    "replace": {"normalizer": {"type": "Sequence", "normalizers": replacing({"String": "a"}, "aa", 40)}},
    "a long content": {"normalizer": replacing({"String": "a"}, "a" * 1000, 1)[0]},
    "regex": {"normalizer": {"type": "Sequence", "normalizers": replacing({"Regex": "[ab]"}, "aa", 40)}},
    "between": {"normalizer": {"type": "Sequence", "normalizers": replacing({"Regex": "(?<=a)"}, "a", 40)}},
    "nested": {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{"type": "Sequence", "normalizers": replacing({"String": "a"}, "aa", 4)}] * 10,
        }
    },
    "prepend": {"normalizer": {"type": "Prepend", "prepend": "a" * 1000}},
    "bytes": {
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
            ]
            * 40,
        }
    },
    "template": {"post_processor": {"type": "Sequence", "processors": [template(2)] * 40}},
    "decoder": {"decoder": {"type": "Sequence", "decoders": replacing({"String": "a"}, "aa", 40)}},
}


@pytest.mark.parametrize("bomb", BLOW_UPS)
def test_a_tokenizer_that_blows_texts_up_is_refused_by_its_name(model: Path, bomb: str) -> None:
    change(model / "tokenizer.json", **BLOW_UPS[bomb])
    with pytest.raises(ModelPathError, match=r"tokenizer\.json is refused: .* times as long"):
        TextCodec(ModelFiles(model))


def test_a_tokenizer_with_many_harmless_steps_is_accepted(model: Path) -> None:
    steps = [
        {"type": "Prepend", "prepend": "\u2581"},
        *replacing({"String": " "}, "\u2581", 30),
        *replacing({"Regex": " {2,}"}, " ", 30),
        *replacing({"String": "``"}, '"', 30),
        {"type": "NFKC"},
    ]
    change(model / "tokenizer.json", normalizer={"type": "Sequence", "normalizers": steps})
    assert TextCodec(ModelFiles(model)).encode("a")


def test_no_prompt_is_padded_to_the_length_that_a_file_asks_for(model: Path) -> None:
    unpadded = TextCodec(ModelFiles(model)).encode("a")
    padding = {"strategy": {"Fixed": 10**6}, "direction": "Right", "pad_to_multiple_of": None}
    change(model / "tokenizer.json", padding={**padding, "pad_id": 0, "pad_type_id": 0, "pad_token": "a"})
    assert TextCodec(ModelFiles(model)).encode("a") == unpadded
