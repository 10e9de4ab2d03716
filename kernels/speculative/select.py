"""Which drafter an algorithm's name stands for. Its module is imported when it is wanted."""

from __future__ import annotations

from importlib import import_module

from kernels.models.config import ModelConfig
from kernels.speculative.drafter import Drafter, DrafterContext
from kernels.speculative.settings import SpeculativeSettings

__all__ = ["captured_layers", "make_drafter"]

_CLASSES = {
    "EAGLE": ("eagle", "EagleDrafter"),
    "EAGLE3": ("eagle3", "Eagle3Drafter"),
    "MTP": ("mtp", "MtpDrafter"),
    "DFLASH": ("dflash", "DflashDrafter"),
    "STANDALONE": ("standalone", "StandaloneDrafter"),
    "NGRAM": ("ngram", "NgramDrafter"),
}


def captured_layers(settings: SpeculativeSettings, model: ModelConfig) -> tuple[int, ...]:
    """The target's layers that the draft is made from, in the order of its features; none: the last hidden state.

    Raises ConfigError or LoadError for a draft that does not fit the model.
    """
    layers: tuple[int, ...] = _class(settings).captured_layers(settings, model)
    return layers


def make_drafter(context: DrafterContext) -> Drafter:
    """Load the draft. Raises what the loading of a model raises."""
    return _class(context.settings)(context)


def _class(settings: SpeculativeSettings) -> type[Drafter]:
    module, name = _CLASSES[settings.algorithm]
    found: type[Drafter] = getattr(import_module(f"kernels.speculative.{module}"), name)
    return found
