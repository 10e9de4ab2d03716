"""The names under which clients find the model."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from actors.options import ArgumentError, Arguments
from actors.text.model_files import model_names
from app.cli.arguments import load_arguments
from kernels.contract.errors import GgufError
from kernels.weights.gguf.header import read_text

BODY = {"prompt": "hi", "max_tokens": 2}


async def test_every_served_name_is_listed_and_answers_carry_it(make_application):
    client = make_application(served_model_name=("first", "second")).test_client()
    cards = (await (await client.get("/v1/models")).get_json())["data"]
    assert [card["id"] for card in cards] == ["first", "second"]
    for name in ("first", "second"):
        assert (await (await client.get(f"/v1/models/{name}")).get_json())["id"] == name
        for path, body in (
            ("/v1/completions", BODY),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ):
            answer = await client.post(path, json={**body, "model": name})
            assert (await answer.get_json())["model"] == name
            streamed = await (await client.post(path, json={**body, "model": name, "stream": True})).get_data()
            assert f'"model":"{name}"'.encode() in streamed
    refused = await client.post("/v1/completions", json={**BODY, "model": "third"})
    assert (await refused.get_json())["error"]["message"].endswith("this server has 'first', 'second'.")
    assert (await (await client.post("/v1/completions", json=BODY)).get_json())["model"] == "first"


async def test_the_root_of_a_named_model_is_no_path(make_application):
    client = make_application(model_path="/secret/place/model", served_model_name=("nice",)).test_client()
    assert b"secret" not in await (await client.get("/v1/models")).get_data()


@pytest.mark.parametrize(
    "words",
    [
        ["m", "--served-model-name", "a", "b"],
        ["m", "--served-model-name=a,b"],
        ["m", "--served-model-name", '["a", "b"]'],
    ],
)
def test_served_names_are_read_from_the_command_line(words):
    assert load_arguments(words, {}).model_names == ("a", "b")


def test_a_model_behind_the_served_names_is_not_taken_for_a_name(tmp_path):
    with pytest.raises(ArgumentError, match="give the model before it"):
        load_arguments(["--served-model-name", "a", str(tmp_path)], {})


def gguf(path: Path, *pairs: tuple[str, str]) -> str:
    """The head of a GGUF file with these texts."""

    def text(value: str) -> bytes:
        return len(value.encode()).to_bytes(8, "little") + value.encode()

    head = b"GGUF" + (3).to_bytes(4, "little") + (0).to_bytes(8, "little") + len(pairs).to_bytes(8, "little")
    path.write_bytes(head + b"".join(text(key) + (8).to_bytes(4, "little") + text(value) for key, value in pairs))
    return str(path)


@pytest.mark.parametrize(
    ("named", "expected"),
    [("Tiny Model", "Tiny Model"), ("  ", "stories-q8"), ("x\x1b[2J", "stories-q8"), ("n" * 257, "stories-q8")],
)
def test_a_gguf_file_is_known_by_its_name_not_its_path(tmp_path, named, expected):
    path = gguf(tmp_path / "stories-q8.gguf", ("general.architecture", "llama"), ("general.name", named))
    assert model_names(Arguments(model_path=path)) == (expected,)
    assert model_names(Arguments(model_path=path, served_model_name=("own",))) == ("own",)


def test_a_gguf_file_without_a_name_is_known_by_its_stem(tmp_path):
    assert model_names(Arguments(model_path=gguf(tmp_path / "stem.gguf", ("general.architecture", "llama")))) == (
        "stem",
    )
    assert model_names(Arguments(model_path=str(tmp_path / "absent.gguf"))) == ("absent",)


def test_a_text_of_a_damaged_gguf_file_is_refused(tmp_path):
    path = Path(gguf(tmp_path / "cut.gguf", ("general.architecture", "llama"), ("general.name", "x" * 100)))
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(GgufError, match="cut short"):
        read_text(path, "general.name")


@pytest.mark.parametrize(
    ("matched", "ids", "reason"), [(".", None, "."), (7, [7, 8], 7), (2, None, None), (2, [7], None)]
)
async def test_stop_reason_is_null_for_an_end_token(application, engine, matched, ids, reason):
    engine.matched_stop = matched
    client = application.test_client()
    for path, body in (
        ("/v1/completions", {"prompt": "hi", "stop_token_ids": ids}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "stop_token_ids": ids}),
    ):
        choice = (await (await client.post(path, json=body)).get_json())["choices"][0]
        assert (choice["matched_stop"], choice["stop_reason"]) == (matched, reason)
        events = (await (await client.post(path, json={**body, "stream": True})).get_data()).decode().split("\n\n")
        last = msgspec.json.decode(events[-3].removeprefix("data: "))["choices"][0]
        assert (last["matched_stop"], last["stop_reason"]) == (matched, reason)
