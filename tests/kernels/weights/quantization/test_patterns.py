"""Regular expressions of checkpoints: what they mean, and that none of them hangs a load or takes its memory."""

from __future__ import annotations

import pytest

from kernels.contract.errors import ConfigError
from kernels.weights.quantization import patterns
from kernels.weights.quantization.detect import METHODS
from kernels.weights.quantization.patterns import NoPattern, Patterns
from kernels.weights.wrapped import language_model
from tests.kits.declared import spec_of

NAME = "model.layers.17.mlp.down_proj"
ENDLESS = r"(?:.|..|...|....)*y\b"
"""It tries all ways to part a name: seconds of this one, years of a longer one."""

WHOLE = {"bits": 4, "group_size": 16, "sym": False, "data_type": "int"}
ROWS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}


def compressed(targets, ignore=()):
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"some": {"targets": targets, "weights": ROWS}},
        "ignore": list(ignore),
    }


CHECKPOINTS = {
    "ignore": lambda pattern: compressed(["Linear"], ["lm_head", f"re:{pattern}"]),
    "config_groups.some.targets": lambda pattern: compressed(["Linear", f"re:{pattern}"]),
    "dynamic": lambda pattern: {"quant_method": "gptq", **WHOLE, "dynamic": {f"-:{pattern}": {}}},
    "extra_config": lambda pattern: {"quant_method": "auto-round", **WHOLE, "extra_config": {pattern: {"bits": 8}}},
    "modules_to_not_convert": lambda pattern: {
        "quant_method": "auto-round",
        **WHOLE,
        "modules_to_not_convert": [pattern],
    },
}
"""By the field that has the pattern."""


def read(settings):
    METHODS[settings["quant_method"]](settings).tensors(spec_of(NAME, (32, 64)))


@pytest.mark.parametrize("field", CHECKPOINTS)
def test_a_pattern_that_backtracks_for_ever_is_refused_by_its_field(field, monkeypatch):
    monkeypatch.setattr(patterns, "_SECONDS", 0.1)
    with pytest.raises(ConfigError, match="takes too long to compare with ") as refused:
        read(CHECKPOINTS[field](ENDLESS))
    assert str(refused.value).startswith(f"quantization_config: {field}: {ENDLESS!r}")


@pytest.mark.parametrize("field", CHECKPOINTS)
@pytest.mark.parametrize(
    "pattern",
    [
        "(?:(?:a{999}){1,999}){999}",
        "(?:a{99999})*",
        "(?:(?:a{1000}){,1000}){,1000}",
        "(?x)(?:(?:a{999} ) {999})\n{999}",
        "(?x)(?:(?:a{999})#\n{999})# another one\n{999}",
        "(?:(?:a{999})(?#b){999})(?#b){999}",
    ],
)
def test_a_pattern_of_huge_counts_takes_no_memory(field, pattern):
    with pytest.raises(ConfigError, match=f"{field}: .* repeats too much; use"):
        read(CHECKPOINTS[field](pattern))


@pytest.mark.parametrize(
    "pattern",
    [r"language_model\.model\.layers\.3\.", r"model\.language_model\.layers\.\d+\.", ".*language_model.layers.3.mlp"],
)
def test_a_pattern_of_a_wrappers_names_matches_the_language_model(pattern):
    matches = Patterns().match(pattern, "dynamic")
    assert matches("model.layers.3.mlp.up_proj")
    assert not matches("visual.layers.3.mlp.up_proj")


def test_a_pattern_of_what_is_around_a_language_model_leaves_it_out():
    assert not Patterns().match("(?!.*language_model)", "ignore")("model.layers.3.mlp.up_proj")
    assert Patterns().search(r"language_model\.lm_head$", "ignore")("lm_head")


def test_modules_that_a_wrapper_ignores_and_targets_are_found():
    settings = compressed(
        ["model.language_model.layers.3.mlp.up_proj", "language_model.lm_head"], ["language_model.lm_head"]
    )
    plain = language_model({"architectures": ["X"], "text_config": {}, "quantization_config": settings})
    scheme = METHODS["compressed-tensors"](plain["quantization_config"])
    names = ("model.layers.3.mlp.up_proj", "model.layers.2.mlp.up_proj", "lm_head")
    assert [scheme.tensors(spec_of(name, (32, 64))) is not None for name in names] == [True, False, False]


def test_counts_of_many_patterns_add_up():
    patterns = Patterns()
    for number in range(8):
        patterns.match(f"(?:layer{number}){{1500}}", "ignore")
    with pytest.raises(ConfigError, match=r"ignore: .* repeats too much"):
        patterns.match("(?:layer9){1500}", "ignore")
    for number in range(1000):
        patterns.match(rf"model\.layers\.{number}\..*", "ignore")  # nothing is counted


def test_counts_behind_each_other_are_not_multiplied():
    counts = r"\w{1,30}\." * 20
    patterns = Patterns()
    for _ in range(20):
        assert not patterns.search(counts, "ignore")(NAME)


def test_modules_are_compared_once_with_many_patterns(monkeypatch):
    compared, search = [], Patterns.search

    def reported(self, text, field):
        found = search(self, text, field)
        return lambda name: compared.append(name) or found(name)

    monkeypatch.setattr(Patterns, "search", reported)
    names = {f"model.layers.{layer}.self_attn": {"bits": 8} for layer in range(9)}
    scheme = METHODS["auto-round"]({"quant_method": "auto-round", **WHOLE, "extra_config": names})
    for _ in range(3):
        scheme.tensors(spec_of(NAME, (32, 64)))
        scheme.ignores(f"{NAME}.qzeros", {})
    assert compared.count(NAME) == len(names)


def test_all_comparisons_share_their_time():
    patterns = Patterns()
    patterns._seconds = 0.0
    with pytest.raises(ConfigError, match="takes too long"):
        patterns.match(ENDLESS, "ignore")(NAME)


@pytest.mark.parametrize(
    ("pattern", "matches", "searches"),
    [
        (r".*\.down_proj", True, True),
        (r"down_proj", False, True),
        (r"model\.layers\.(?!1\.).*", True, True),
        (r"(?i)MODEL", True, True),
        (r"layers\.\d{1,3}\.", False, True),
        (r"model.layers.17.", True, True),
        (r".*(q|k|v)_proj$", False, False),
    ],
)
def test_what_patterns_find(pattern, matches, searches):
    patterns = Patterns()
    assert patterns.match(pattern, "targets")(NAME) is matches
    assert patterns.search(pattern, "targets")(NAME) is searches


@pytest.mark.parametrize("text", ["(", "*", "a{" + "9" * 30 + "}", "(?R)", r"\p{L}", "a{s}*", "(" * 5000 + ")" * 5000])
def test_what_is_no_pattern_is_reported(text):
    """``(?R)`` is one to ``regex`` alone: it calls itself without end. ``a{s}*`` is one to ``re`` alone."""
    with pytest.raises(NoPattern, match=r"quantization_config: ignore: .* is no regular expression"):
        Patterns().match(text, "ignore")
