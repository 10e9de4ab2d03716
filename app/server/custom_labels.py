"""Labels of clients for metrics, from a header (``--tokenizer-metrics-custom-labels-header``)."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from actors.options import Arguments
from telemetry.metrics.options import CUSTOM_LABEL
from telemetry.timeline import Value

__all__ = ["custom_labels"]

_LONGEST = 4096
"""Bytes of the header's value."""


def custom_labels(headers: Iterable[tuple[bytes, bytes]], arguments: Arguments) -> dict[str, Value]:
    """The allowed labels of a request, as attributes of its timeline.

    A header that is no JSON object of strings and numbers is ignored: a label is no reason to refuse a request.
    """
    allowed = arguments.tokenizer_metrics_allowed_custom_labels
    if not allowed:
        return {}
    wanted = arguments.tokenizer_metrics_custom_labels_header.lower().encode()
    given = next((value for name, value in headers if name.lower() == wanted), b"")
    if not given or len(given) > _LONGEST:
        return {}
    try:
        labels = msgspec.json.decode(given, type=dict[str, str | int | float | bool])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    return {CUSTOM_LABEL + name: str(labels[name])[:64] for name in allowed if name in labels}
