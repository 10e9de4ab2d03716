"""Calibration documents for quantization tools: neither trained on nor in the examination."""

from __future__ import annotations

__all__ = ["calibration_texts"]

_SEED = 20_261_122


def calibration_texts(count: int) -> list[str]:
    """The first ``count`` documents, the same in every run."""
    from tests.understudy.corpus import documents

    return ["".join(segment.text for segment in document) for document in documents(_SEED, count)]
