"""What the number of devices must divide. The server checks the plain sizes of config.json before any worker starts; a
worker, which has the model's family, checks all sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernels.contract.errors import ConfigError

__all__ = ["Divisible", "check_divisions", "stage_layers"]

_INNER = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "vocab_size")
_CHATGLM = {
    "num_hidden_layers": "num_layers",
    "num_key_value_heads": "multi_query_group_num",
    "intermediate_size": "ffn_hidden_size",
    "vocab_size": "padded_vocab_size",
}
"""The names of these sizes in ChatGLM's files, all of which share key-value heads."""


class Divisible:
    """The sizes of a model that ranks divide: ``heads``, ``kv_heads``, of which ranks may share one, and ``others``.
    ``names``: what config.json calls some of them."""

    def __init__(
        self, architecture: str, heads: int, kv_heads: int, others: tuple[int, ...], names: Mapping[str, str]
    ) -> None:
        self._architecture, self._heads, self._kv_heads, self._others = architecture, heads, kv_heads, others
        self._names = names

    def check(self, name: str, number: int, ranks: int) -> None:
        """Raises ConfigError if ``ranks`` do not divide ``number``, the size ``name``."""
        if number % ranks:
            raise ConfigError(
                f"{self._names.get(name, name)} {number} of {self._architecture} cannot be divided by "
                f"--tensor-parallel-size {ranks}; {self._remedy()}"
            )

    def check_kv_heads(self, ranks: int) -> None:
        """Raises ConfigError if neither ranks divide the key-value heads nor these the ranks."""
        if not self._shares(ranks):
            name = self._names.get("num_key_value_heads", "num_key_value_heads")
            raise ConfigError(
                f"{name} {self._kv_heads} of {self._architecture} and --tensor-parallel-size {ranks} do "
                f"not divide one another; {self._remedy()}"
            )

    def _shares(self, ranks: int) -> bool:
        return not (self._kv_heads % ranks and ranks % self._kv_heads)

    def _remedy(self) -> str:
        numbers = self._heads, *self._others
        sizes = range(1, self._heads + 1)
        fits = [size for size in sizes if self._shares(size) and not any(number % size for number in numbers)]
        return f"this model takes {', '.join(map(str, fits))}"


def stage_layers(layers: int, stage: int, size: int) -> range:
    """The layers of a stage: as many as of the others, or one more in the first ones. Raises ConfigError."""
    if size > layers:
        raise ConfigError(
            f"a model of {layers} layers cannot have --pipeline-parallel-size {size}: each stage needs a layer; use "
            f"at most {layers}"
        )
    each, more = divmod(layers, size)
    begin = stage * each + min(stage, more)
    return range(begin, begin + each + (stage < more))


def check_divisions(config: Mapping[str, Any], architecture: str, *, stages: int, ranks: int) -> None:
    """Check sizes of config.json that mean the same in all families; what it does not have is not checked. ``ranks``:
    devices that divide the heads of attention; 1: none do. Raises ConfigError."""
    if isinstance(config.get("text_config"), Mapping):  # workers read its sizes, and defaults of a family
        return
    names = _CHATGLM if "multi_query_group_num" in config else {}
    config = {**config, **{name: config.get(key) for name, key in names.items()}}
    sizes = {key: value for key, value in config.items() if type(value) is int and value > 0}
    if layers := sizes.get("num_hidden_layers"):
        stage_layers(layers, 0, stages)
    if heads := sizes.get("num_attention_heads"):
        kv_heads = heads if "kv_lora_rank" in config else sizes.get("num_key_value_heads", heads)
        others = tuple(sizes[key] for key in _INNER if key in sizes)
        divisible = Divisible(architecture, heads, kv_heads, others, names)
        divisible.check("num_attention_heads", heads, ranks)
        divisible.check_kv_heads(ranks)
