from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from actors.protocol.requests import Chat
from actors.text.chat_template import ChatTemplate
from actors.text.model_files import ModelFiles, ModelPathError, resolve_model_path
from actors.text.text_codec import LONG_TEXT, TextCodec
from tests.kits.tiny_encoder import make_tiny_encoder
from tests.kits.tiny_model import make_tiny_model


def test_round_trip_and_chat(tiny_model: Path) -> None:
    codec = TextCodec(ModelFiles(tiny_model))
    text = "naïve café 東京 🎭 <tag>"
    assert codec.decode(codec.encode(text)) == text
    assert codec.template is not None
    rendered = ChatTemplate(codec.template, codec.special_tokens).render(
        Chat(messages=[{"role": "user", "content": "hi"}])
    )
    ids = codec.encode(rendered)
    assert codec.decode(ids, skip_special_tokens=False) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_token_bytes_join_to_the_text(tiny_model: Path) -> None:
    codec = TextCodec(ModelFiles(tiny_model))
    text = " 🎬 naïve"
    assert b"".join(codec.token_bytes(i) for i in codec.encode(text)) == text.encode()
    assert codec.token_text(2) == "<|im_end|>"
    assert codec.token_bytes(10_000) == b""


def test_a_model_may_have_no_template_but_not_a_broken_one(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert TextCodec(ModelFiles(tmp_path)).template is None
    (tmp_path / "chat_template.jinja").write_text("one\n{% if %}")
    with pytest.raises(ModelPathError, match="line 2"):
        TextCodec(ModelFiles(tmp_path))


def test_chat_template_from_a_file_and_a_wrong_name(tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("mine")
    codec = TextCodec(ModelFiles(tiny_model), chat_template=str(file))
    assert codec.template == "mine"
    with pytest.raises(ModelPathError, match="--chat-template"):
        TextCodec(ModelFiles(tiny_model), chat_template="no-such-template")


def test_a_built_in_template_is_chosen_by_its_name(tiny_model: Path) -> None:
    def text(name: str, **variables: str) -> str:
        template = TextCodec(ModelFiles(tiny_model), chat_template=name).template
        assert template is not None
        return ChatTemplate(template, variables).render(Chat(messages=[{"role": "user", "content": " hi"}]))

    assert text("chatml") == "<|im_start|>user\n hi<|im_end|>\n<|im_start|>assistant\n"
    assert text("llama-3-instruct", bos_token="<b>") == (
        "<b><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert text("{{ messages[0].content }}!") == " hi!"
    with pytest.raises(
        ModelPathError, match=r"gemma-it is neither a file .* one of chatml, llama-3-instruct, the path"
    ):
        TextCodec(ModelFiles(tiny_model), chat_template="gemma-it")


def test_a_slow_tokenizer_is_made_of_the_other_files(tmp_path: Path) -> None:
    """Its tokenizer.json and its other files say different things."""
    make_tiny_model(tmp_path)
    with pytest.raises(ModelPathError, match=r"tokenizer-mode slow .* has none of them"):
        TextCodec(ModelFiles(tmp_path), mode="slow")
    made = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "vocab.json").write_text(json.dumps(made["model"]["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(" ".join(pair) for pair in made["model"]["merges"]))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    text = "The quick brown fox"
    right = TextCodec(ModelFiles(tmp_path)).encode(text)
    made["model"]["merges"] = []
    (tmp_path / "tokenizer.json").write_text(json.dumps(made))
    assert len(TextCodec(ModelFiles(tmp_path)).encode(text)) == len(text)
    slow = TextCodec(ModelFiles(tmp_path), mode="slow")
    assert slow.encode(text) == right
    assert slow.decode(right) == text


def test_a_revision_of_a_model_that_is_here_is_refused(tiny_model: Path) -> None:
    with pytest.raises(ModelPathError, match="--revision is for hub repositories"):
        resolve_model_path(str(tiny_model), revision="main")


def test_overrides_and_generation_config(tiny_model: Path) -> None:
    files = ModelFiles(tiny_model, overrides={"max_position_embeddings": 99})
    assert files.context_length == 99
    assert files.eos_token_ids() == (2, 0)


def test_overrides_of_nested_objects_are_merged(tmp_path: Path) -> None:
    text = {"max_position_embeddings": 64, "vocab_size": 9}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": text}))
    files = ModelFiles(tmp_path, overrides={"text_config": {"max_position_embeddings": 99}})
    assert (files.context_length, files.vocab_size) == (99, 9)


def test_paths_that_are_no_model(tmp_path: Path) -> None:
    for nothing in (str(tmp_path / "nothing"), "models/nothing.gguf"):  # no name of a repository
        with pytest.raises(ModelPathError, match=r"does not exist.*\.gguf file"):
            resolve_model_path(nothing)
    with pytest.raises(ModelPathError, match=r"config\.json"):
        ModelFiles(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ModelPathError, match="JSON object"):
        ModelFiles(tmp_path)
    with pytest.raises(ModelPathError, match="is a file"):
        resolve_model_path(str(tmp_path / "config.json"))


def test_long_texts_encode_alike_and_are_bounded(tiny_model: Path) -> None:
    codec = TextCodec(ModelFiles(tiny_model))
    text = "the quick 東京 fox " * (LONG_TEXT // 8)
    assert len(text) > LONG_TEXT
    assert codec.encode(text) == codec.tokenizer.encode(text).ids
    assert codec.max_chars(len(codec.encode(text))) >= len(text)


def test_a_length_in_the_tokenizer_file_cuts_nothing(tmp_path: Path) -> None:
    """Embedding models are often saved with one."""
    make_tiny_model(tmp_path)
    text = "the quick brown fox " * 9
    whole = TextCodec(ModelFiles(tmp_path)).encode(text)
    made = json.loads((tmp_path / "tokenizer.json").read_text())
    made["truncation"] = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(made))
    assert TextCodec(ModelFiles(tmp_path)).encode(text) == whole


@pytest.mark.parametrize("max_tokens", [*range(3, 24), 64])
def test_texts_and_pairs_are_cut_as_the_tokenizer_cuts_them(tmp_path: Path, max_tokens: int) -> None:
    make_tiny_encoder(tmp_path)
    codec = TextCodec(ModelFiles(tmp_path))
    own = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    own.enable_truncation(max_tokens)
    long, short, word = "one two three four five six seven", "the capital of france", "paris"
    for text in (long, short, ""):
        assert codec.encode(text, max_tokens=max_tokens) == own.encode(text).ids
    for pair in ((long, short), (short, long), (long, word), (word, long), (long, long), (word, word)):
        expected = own.encode(*pair)
        ids, second = codec.encode_pair(*pair, max_tokens)
        assert ids == expected.ids
        assert second == expected.type_ids.index(1)
    assert codec.encode_pair(long, short) == codec.encode_pair(long, short, 64)
    assert (
        codec.encode(long, add_special_tokens=False, max_tokens=max_tokens)
        == codec.encode(long, add_special_tokens=False)[:max_tokens]
    )
