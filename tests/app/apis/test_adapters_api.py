"""LoRA adapters in the APIs: chosen by model or lora_path, listed, loaded and unloaded."""

from __future__ import annotations

import msgspec
import pytest

from actors.protocol.requests import InvalidRequest
from app.understudy import MODEL_DIR
from app.understudy.adapters import ADAPTERS
from kernels.contract.adapters import AdapterSettings
from tests.kits.adapters import save_adapter


@pytest.fixture
async def adapters(engine, tmp_path):
    engine.adapters.enabled = True
    engine.adapters.begin((), AdapterSettings(), {})
    for name in ("pirate", "poet"):
        save_adapter(tmp_path / name, {"model.layers.0.self_attn.q_proj": (8, 8)}, 1)
    await engine.load_adapter("pirate", str(tmp_path / "pirate"))
    return tmp_path


async def post(application, path, **body):
    response = await application.test_client().post(path, json=body)
    return response.status_code, msgspec.json.decode(await response.get_data())


CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {**CHAT, "max_tokens": 4}),
        ("/api/generate", {"prompt": "a", "stream": False}),
        ("/api/chat", {**CHAT, "stream": False}),
        ("/completion", {"prompt": "a"}),
    ],
)
async def test_every_api_chooses_an_adapter_by_its_model(application, engine, adapters, path, body):
    for model, name in (("pirate", "pirate"), ("fake:pirate", "pirate"), ("fake", None), ("pirate", "pirate")):
        status, _ = await post(application, path, model=model, **body)
        assert status == 200
        assert engine.requests[-1]["adapter"] == name
    status, answer = await post(application, path, model="fake:parrot", **body)
    assert status == 404
    assert "'fake:parrot' does not exist here; this server has 'fake', 'pirate'" in str(answer)


async def test_vectors_are_made_with_the_adapter_of_their_model(application, engine, adapters):
    application.service.arguments = msgspec.structs.replace(application.service.arguments, is_embedding=True)
    for model, name in (("fake:pirate", "pirate"), ("fake", None)):
        assert (await post(application, "/v1/embeddings", model=model, input="a"))[0] == 200
        assert engine.requests[-1]["adapter"] == name


async def test_an_adapter_of_the_hub_is_loaded_by_its_name(engine, adapters, monkeypatch):
    asked = []

    def download(name, **options):
        asked.append((name, options["revision"]))
        return str(adapters / "poet")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    await engine.load_adapter("poet", "owner/poet@v1")
    assert asked == [("owner/poet", "v1")]
    assert engine.adapters.find("poet").path == str(adapters / "poet")
    pirate, poet = engine.adapters.numbered()
    assert (pirate.source, poet.source) == ("", "owner/poet@v1")


async def test_an_adapter_that_the_hub_cannot_give_is_answered_in_a_sentence(engine, monkeypatch):
    def download(name, **options):
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(InvalidRequest, match=r"^lora_path: owner/poet is not a local directory.*[^.]\.$"):
        await engine.load_adapter("poet", "owner/poet")


async def test_each_prompt_of_a_native_batch_has_its_own_adapter(application, engine, adapters):
    assert (await post(application, "/generate", text=["a", "b"], lora_path=[None, "pirate"]))[0] == 200
    assert [request["adapter"] for request in engine.requests] == [None, "pirate"]
    assert (await post(application, "/generate", text=["a", "b"], lora_path="pirate"))[0] == 200
    assert [request["adapter"] for request in engine.requests[2:]] == ["pirate", "pirate"]
    status, answer = await post(application, "/generate", text="a", lora_path="parrot")
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (404, "model_not_found", "lora_path")
    assert not engine.open


async def test_models_lists_adapters_with_their_parent(application, adapters):
    client = application.test_client()
    listed = msgspec.json.decode(await (await client.get("/v1/models")).get_data())["data"]
    assert [(card["id"], card["root"], card["parent"]) for card in listed] == [
        ("fake", "fake", None),
        ("pirate", "pirate", "fake"),
    ]
    one = msgspec.json.decode(await (await client.get("/v1/models/pirate")).get_data())
    assert one["parent"] == "fake"


async def test_models_of_other_apis_list_adapters(application, adapters):
    client = application.test_client()
    listed = msgspec.json.decode(
        await (await client.get("/v1/models", headers={"anthropic-version": "2023-06-01"})).get_data()
    )
    assert [each["id"] for each in listed["data"]] == ["fake", "pirate"]
    tags = msgspec.json.decode(await (await client.get("/api/tags")).get_data())
    assert [each["model"] for each in tags["models"]] == ["fake:latest", "pirate:latest"]


async def test_an_adapter_is_described_by_both_of_its_names(application, adapters):
    client = application.test_client()
    for name in ("pirate", "fake:pirate"):
        card = msgspec.json.decode(await (await client.get(f"/v1/models/{name}")).get_data())
        assert (card["id"], card["root"], card["parent"]) == (name, "pirate", "fake")


async def test_adapters_are_loaded_and_unloaded_in_sglangs_form(application, engine, adapters):
    status, answer = await post(
        application, "/load_lora_adapter", lora_name="poet", lora_path=str(adapters / "poet"), pinned=True
    )
    loaded = {name: str(adapters / name) for name in ("pirate", "poet")}
    assert (status, answer) == (200, {"success": True, "error_message": "", "loaded_adapters": loaded})
    assert engine.adapters.find("poet").pinned
    status, answer = await post(application, "/load_lora_adapter", lora_name="x", lora_path="http://host/x")
    assert (status, answer["success"], answer["error"]["param"]) == (400, False, "lora_path")
    assert answer["error_message"] == answer["error"]["message"]
    status, answer = await post(application, "/unload_lora_adapter", lora_name="pirate")
    assert (status, answer["success"], list(answer["loaded_adapters"])) == (200, True, ["poet"])
    status, answer = await post(application, "/unload_lora_adapter", lora_name="pirate")
    assert (status, answer["success"], answer["error"]["param"]) == (400, False, "lora_name")


async def test_adapters_are_loaded_and_unloaded_in_vllms_form(application, engine, adapters):
    client = application.test_client()

    async def text(path, **body):
        response = await client.post(path, json=body)
        return response.status_code, response.mimetype, await response.get_data(as_text=True)

    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    body = {"lora_name": "poet", "lora_path": str(adapters / "poet")}
    assert await text(load, **body) == (200, "text/plain", "Success: LoRA adapter 'poet' added successfully.")
    first = engine.adapters.find("poet")
    status, answer = await post(application, load, **body)
    assert (status, answer["error"]["param"]) == (400, "lora_name")
    assert (await text(load, **body | {"lora_path": str(adapters / "pirate")}, load_inplace=True))[0] == 200
    second = engine.adapters.find("poet")
    assert (second.path, second.salt != first.salt) == (str(adapters / "pirate"), True)
    assert (await text(load, **body | {"lora_path": str(adapters / "none")}, load_inplace=True))[0] == 400
    assert engine.adapters.find("poet") is second
    for given, is_pinned in (({"pinned": True}, True), ({}, True), ({"pinned": False}, False), ({}, False)):
        assert (await text(load, **body, **given, load_inplace=True))[0] == 200
        assert engine.adapters.find("poet").pinned == is_pinned
    removed = (200, "text/plain", "Success: LoRA adapter 'poet' removed successfully.")
    assert await text(unload, lora_name="poet") == removed
    status, answer = await post(application, unload, lora_name="poet")
    assert (status, answer["error"]["param"], answer["error"]["code"]) == (404, "lora_name", "model_not_found")


@pytest.mark.parametrize("name", ["a\nb", "a\0b", "  "])
async def test_a_name_that_no_log_can_carry_is_refused(application, adapters, name):
    status, answer = await post(application, "/load_lora_adapter", lora_name=name, lora_path=str(adapters / "poet"))
    assert (status, answer["error"]["param"]) == (400, "lora_name")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {**CHAT, "max_tokens": 4}),
        ("/api/chat", {**CHAT, "stream": False}),
        ("/completion", {"prompt": "a"}),
    ],
)
async def test_an_answer_whose_adapter_is_unloaded_meanwhile_is_given(
    application, engine, adapters, path, body, monkeypatch
):
    generate = engine.generate

    def unloading(*given, **options):
        stream = generate(*given, **options)
        del engine.adapters._names["pirate"]
        return stream

    monkeypatch.setattr(engine, "generate", unloading)
    assert (await post(application, path, model="pirate", **body))[0] == 200
    assert (await post(application, path, model="pirate", **body))[0] == 404


async def test_a_server_without_adapters_says_so(application):
    status, answer = await post(application, "/load_lora_adapter", lora_name="a", lora_path="/a")
    assert (status, answer["error"]["code"]) == (409, "adapters_disabled")


async def test_the_box_has_adapters_to_load_by_name(application, engine, adapters, monkeypatch):
    loaded = []

    async def load(name, path, **options):
        loaded.append((name, path))

    monkeypatch.setattr(engine, "load_adapter", load)
    service = application.service
    for model in (service.arguments.model_path, str(MODEL_DIR)):
        service.arguments = msgspec.structs.replace(service.arguments, model_path=model)
        status, _ = await post(application, "/load_lora_adapter", lora_name="poet", lora_path="poet")
        assert status == 200
    assert loaded == [("poet", "poet"), ("poet", str(ADAPTERS / "poet"))]
    assert (await post(application, "/load_lora_adapter", lora_name="a", lora_path="a" * 300))[0] == 200
