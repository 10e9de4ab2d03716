"""Translates errors of the device into messages that say what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kernels.devices.base import Device

__all__ = ["device_errors"]


@contextmanager
def device_errors(device: Device) -> Iterator[None]:
    """Replace an error of the device by the one that ``Device.explain`` returns; other errors pass unchanged."""
    try:
        yield
    except Exception as error:
        explained = device.explain(error)
        if explained is None:
            raise
        raise explained from error
