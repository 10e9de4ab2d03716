"""The arguments of LoRA adapters."""

import pytest

from actors.engine.configuration import planner_config
from actors.options import ArgumentError, Arguments
from actors.options.lora import AdapterPath
from actors.requests.adapters import adapter_settings
from actors.workers.placement import place
from kernels.contract.adapters import AdapterInfo, AdapterSettings

INFOS = (AdapterInfo("a", 4, ("q_proj",)), AdapterInfo("b", 8, ("k_proj", "q_proj")))


@pytest.mark.parametrize(
    "given",
    [
        ["a=x/a", "b", '{"lora_name": "c", "lora_path": "x/c", "pinned": true}', '{"name": "d", "path": "y"}'],
        '["a=x/a", "b", {"lora_name": "c", "lora_path": "x/c", "pinned": true}, {"name": "d", "path": "y"}]',
        'a=x/a, b {"lora_name":"c","lora_path":"x/c","pinned":true} {"name": "d", "path": "y"}',
    ],
)
def test_adapters_are_words_or_objects(given):
    arguments = Arguments.from_keywords(lora_paths=given)
    assert arguments.has_adapters
    assert arguments.adapter_paths == (
        AdapterPath("a", "x/a"),
        AdapterPath("b", "b"),
        AdapterPath("c", "x/c", True),
        AdapterPath("d", "y"),
    )


def test_objects_may_come_before_words():
    given = '{"lora_name": "c", "lora_path": "x, y"} a=x,b=y'
    paths = (AdapterPath("c", "x, y"), AdapterPath("a", "x"), AdapterPath("b", "y"))
    assert Arguments.from_keywords(lora_paths=given).adapter_paths == paths


def test_a_single_object_is_one_adapter():
    given = '{"lora_name": "c", "lora_path": "x, y"}'
    assert Arguments.from_keywords(lora_paths=given).adapter_paths == (AdapterPath("c", "x, y"),)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"lora_paths": ["=x"]}, "needs a name and a path"),
        ({"lora_paths": ["a=https://x/y"]}, "is a URL"),
        ({"lora_paths": ["a\nb=x"]}, "is no name; take one of printable characters"),
        ({"lora_paths": [" =x"]}, "is no name"),
        ({"lora_paths": ['{"lora_name": "a"}']}, "is no adapter"),
        ({"lora_paths": ['{"lora_name": "a", "lora_path": "b", "rank": 1}']}, "has no 'rank'"),
        (
            {"lora_paths": ['{"name": "a", "path": "b", "base_model_name": "m"}']},
            "is always the served model; leave it",
        ),
        ({"lora_paths": ["{a"]}, "is no JSON object"),
        ({"lora_paths": ["a=x", "a=y"]}, "'a' is the name of another"),
        ({"lora_paths": ["m=x"], "served_model_name": ["m"]}, "or of the model"),
        ({"lora_paths": ["a", "b"], "max_loaded_loras": 1}, "is less than the 2"),
        ({"enable_lora": True, "lora_eviction_policy": "fifo"}, "needs max_loaded_loras"),
        ({"max_lora_rank": 8}, "needs enable_lora"),
        ({"max_loras_per_batch": 2}, "needs enable_lora"),
        ({"enable_lora": True, "lora_backend": "cutlass"}, "lora_backend"),
        ({"enable_lora": True, "lora_backend": "csgmv", "device": "cpu"}, "lora_backend contradicts device cpu"),
        ({"enable_lora": True, "lora_backend": "native", "device": "npu"}, "lora_backend contradicts device npu"),
        ({"enable_lora": True, "lora_backend": "torch", "enable_deterministic_inference": True}, "by its own kernels"),
        ({"lora_backend": "torch"}, "needs enable_lora"),
        ({"enable_lora": True, "max_lora_chunk_size": 64}, "those of the device"),
        ({"enable_lora": True, "fully_sharded_loras": True}, "are divided over the devices"),
    ],
)
def test_wrong_adapters_and_limits_without_any_are_named(options, reason):
    with pytest.raises(ArgumentError, match=reason):
        Arguments.from_keywords(**options)


def test_room_is_that_of_the_first_adapters_or_as_given():
    def room(*infos, **options):
        return adapter_settings(Arguments.from_keywords(**options), infos)

    assert room() is None
    assert room(enable_lora=True) == AdapterSettings(16, 8, ("all",))
    assert room(*INFOS, lora_paths=["a", "b"]) == AdapterSettings(8, 8, ("k_proj", "q_proj"))
    for backend, plain in (("torch", True), ("torch_native", True), ("native", False), ("auto", False)):
        assert room(enable_lora=True, lora_backend=backend, device="cpu").plain is plain
    given = {"max_lora_rank": 32, "max_loras": 3, "lora_target_modules": ["o_proj"]}
    assert room(*INFOS, lora_paths=["a", "b"], **given) == AdapterSettings(32, 3, ("o_proj",))


def test_the_planner_limits_adapters_only_where_there_are_any():
    for options, limit in (({}, 0), ({"enable_lora": True, "max_loras": 3}, 3)):
        arguments = Arguments.from_keywords(device="cpu", **options)
        assert planner_config(arguments, 64, place(arguments, {})).max_adapters == limit
