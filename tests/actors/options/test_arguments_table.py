"""The table, the struct, and the names that users bring from other engines."""

import subprocess
import sys
import typing
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest

from actors.options import ARGUMENTS, ArgumentError, Arguments
from actors.options.argument import Argument
from actors.options.declaration import ArgumentSpec, declared
from actors.options.refusal import Refusal
from actors.options.refused import REFUSALS
from actors.options.resolving import find
from app.cli.arguments import load_arguments

_LINES = [
    line.split(" ", 2)
    for line in (Path(__file__).parent / "foreign_names.txt").read_text().splitlines()
    if not line.startswith("#")
]
FOREIGN = [line[1] for line in _LINES]
SGLANG_DEFAULTS = {line[1]: line[2] if len(line) > 2 else "" for line in _LINES if line[0] == "sglang"}

SAME_ARGUMENT = [
    ("--model", "--model-path"),
    ("--tokenizer", "--tokenizer-path"),
    ("--hf-overrides", "--json-model-override-args"),
    ("--max-model-len", "--context-length"),
    ("--gpu-memory-utilization", "--mem-fraction-static"),
    ("--max-num-seqs", "--max-running-requests"),
    ("--block-size", "--page-size"),
    ("--enforce-eager", "--disable-cuda-graph"),
    ("--max-cudagraph-capture-size", "--cuda-graph-max-bs"),
    ("--cudagraph-capture-sizes", "--cuda-graph-bs"),
    ("--tp", "--tensor-parallel-size"),
    ("--dense-tp-size", "--moe-dense-tp-size"),
    ("--drafter-attention-backend", "--speculative-draft-attention-backend"),
    ("--moe-backend", "--moe-runner-backend"),
    ("--draft-moe-backend", "--speculative-moe-runner-backend"),
    ("--all2all-backend", "--moe-a2a-backend"),
    ("--enable-log-requests", "--log-requests"),
    ("--max-loras", "--max-loras-per-batch"),
    ("--max-cpu-loras", "--max-loaded-loras"),
    ("--lora-modules", "--lora-paths"),
    ("--max-num-batched-tokens", "--chunked-prefill-size"),
    ("--no-enable-prefix-caching", "--disable-radix-cache"),
]

# Where SGLang's own default would ask for something that Troupe does otherwise: giving it is an error, with the reason.
REFUSED_DEFAULTS = {
    "--sleep-on-idle",
    "--enable-mixed-chunk",
}


def test_struct_and_table_have_the_same_names_defaults_and_choices() -> None:
    hints = typing.get_type_hints(Arguments)
    defaults = Arguments()
    assert set(msgspec.structs.asdict(defaults)) == {argument.field for argument in ARGUMENTS}
    for argument in ARGUMENTS:
        default = getattr(defaults, argument.field)
        assert default == argument.default, argument.name
        assert type(default) is type(argument.default), argument.name
        assert argument.parse(default) == default
        literals = [part for part in _parts(hints[argument.field]) if typing.get_origin(part) is typing.Literal]
        choices = {choice for literal in literals for choice in typing.get_args(literal)}
        assert choices == set(argument.choices), argument.name


class Declared(msgspec.Struct, frozen=True, kw_only=True):
    wait_seconds: Annotated[
        float | None,
        ArgumentSpec(group="Runtime", aliases=("wait",), default_text="none", minimum=0, maximum=9, help="Wait."),
    ] = None
    colours: Annotated[tuple[Literal["red", "blue"], ...], ArgumentSpec(group="API", kind="names", help="Paint.")] = (
        "red",
    )
    settings: Annotated[dict[str, object], ArgumentSpec(group="API", help="Set.")] = {}


def test_a_field_is_all_that_an_option_needs() -> None:
    wait, colours, settings = declared(Declared)
    assert (wait.name, wait.field, wait.aliases, wait.kind) == ("wait-seconds", "wait_seconds", ("wait",), "float")
    assert (wait.default, wait.optional, wait.parse("3")) == (None, True, 3.0)
    with pytest.raises(ArgumentError, match="from 0 to 9"):
        wait.parse("10")
    assert (colours.kind, colours.choices, colours.parse("blue,red")) == ("names", ("red", "blue"), ("blue", "red"))
    assert (settings.kind, settings.default, settings.parse('{"a": 1}')) == ("json", {}, {"a": 1})


@pytest.mark.parametrize("hint", [int, Annotated[set[int], ArgumentSpec(group="API", help="No.")]])
def test_a_field_that_is_no_option_is_refused(hint: object) -> None:
    with pytest.raises(TypeError, match="amount"):
        declared(msgspec.defstruct("Wrong", [("amount", hint, 1)]))


def _parts(hint: object) -> list[object]:
    """A type and all types inside it."""
    if typing.get_origin(hint) is typing.Literal:
        return [hint]
    return [hint, *(part for inner in typing.get_args(hint) for part in _parts(inner))]


def test_every_argument_explains_itself_and_is_bounded() -> None:
    for argument in ARGUMENTS:
        assert argument.help.endswith("."), argument.name
        assert bool(argument.default_text) == argument.optional, argument.name
        if argument.kind in ("int", "float"):
            assert argument.minimum is not None, argument.name
            assert argument.maximum is not None, argument.name
        assert set(argument.synonyms.values()) <= set(argument.choices)
        assert not set(argument.unbuilt_choices) & set(argument.choices)
    for refusal in REFUSALS:
        assert refusal.reason, refusal.name
        assert refusal.remedy, refusal.name


@pytest.mark.parametrize("name", FOREIGN)
def test_every_foreign_name_is_built_or_refused_with_a_reason(name: str) -> None:
    entry = find(name).entry
    if isinstance(entry, Argument):
        assert hasattr(Arguments(), entry.field)
        return
    if {True, False} <= set(entry.accepts):  # nothing can be asked for that is not so
        entry.check(True)
        return
    given: object = "something else" if not entry.is_flag else True not in entry.accepts
    with pytest.raises(ArgumentError) as caught:
        entry.check(given)
    assert entry.reason in str(caught.value)
    assert entry.remedy in str(caught.value)


@pytest.mark.parametrize("name", SGLANG_DEFAULTS)
def test_a_default_that_changes_nothing_is_accepted(name: str) -> None:
    found, default = find(name), SGLANG_DEFAULTS[name]
    if isinstance(found.entry, Argument):
        if default != "None":
            found.entry.parse(default)
    elif name in REFUSED_DEFAULTS:
        with pytest.raises(ArgumentError):
            found.entry.check(default)
    elif not (default == "None" and found.entry.is_flag):
        found.entry.check(default)


@pytest.mark.parametrize(("one", "other"), SAME_ARGUMENT)
def test_names_of_the_same_meaning_are_one_argument(one: str, other: str) -> None:
    assert find(one) == find(other)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--enable-deepep-moe", "use --moe-a2a-backend deepep with --expert-parallel-size"),
        ("--nsa-prefill fa3", "the device decides on the kernels"),
        ("--nsa-decode flashmla_sparse", "the device decides on the kernels"),
        ("--show-time-cost", "use --enable-trace for the times of each request"),
        ("--no-disable-kvstore", "a hierarchical prefix cache is not built yet"),
        ("--no-enable-mixed-batch", "decodes and chunks of prompts always share a step"),
        ("--attention-use-fp4-indexer-cache", "the device decides on the kernels"),
        ("--low-latency-max-num-tokens-per-gpu 64", "deepep needs no package"),
        ("--mem-frac 0.8", "did you mean --mem-fraction-static"),
    ],
)
def test_names_of_other_engines_are_refused_with_what_to_use(words: str, says: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{words.split()[0]}: .*{says}"):
        load_arguments(["m", *words.split()], {})


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        ("--load-balance-method shortest_queue", "load_balance_method", "total_requests"),
        ("--load-balance-method minimum_tokens", "load_balance_method", "total_tokens"),
        ("--load-balance-method auto", "load_balance_method", "cache_aware"),
        ("--watchdog-timeout 1000000", "watchdog_timeout", 1_000_000.0),
        ("--enable-ep-moe --tp 2", "enable_expert_parallel", True),
        ("--prefill-graph-max-tokens 64", "piecewise_cuda_graph_max_tokens", 64),
        ("--prefill-graph-capture-sizes 32 64", "piecewise_cuda_graph_tokens", (32, 64)),
    ],
)
def test_values_of_recipes_mean_the_nearest_here(words: str, field: str, value: object) -> None:
    assert getattr(load_arguments(["m", *words.split()], {}), field) == value


def test_there_are_as_many_foreign_names_as_documented() -> None:
    assert len(SGLANG_DEFAULTS) == 313
    assert len(set(FOREIGN)) == 349


def test_importing_the_arguments_is_light() -> None:
    program = (
        "import sys, actors.options; heavy = {'torch', 'transformers', 'quart', 'hypercorn', 'yaml', 'asyncio'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_refusals_know_families() -> None:
    for name in ("--kvstore-anything", "--disaggregation-later", "kvstore_size"):
        assert isinstance(find(name).entry, Refusal)
