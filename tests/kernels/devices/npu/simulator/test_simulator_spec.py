"""What a simulator switch may say."""

from __future__ import annotations

import pytest

from kernels.contract.npu_simulator import Spec, SpecError, parse
from kernels.devices.npu_simulator.activate import ActivationError, visible

GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A2", Spec("A2", 2, 4 * GIB)),
        ("a3:4", Spec("A3", 4, 4 * GIB)),
        ("A5:2:8GiB", Spec("A5", 2, 8 * GIB)),
        ("A2:1:512M", Spec("A2", 1, 512 << 20)),
        ("A2:1:1.5g", Spec("A2", 1, 3 * GIB // 2)),
    ],
)
def test_parse(text: str, expected: Spec) -> None:
    assert parse(text) == expected


@pytest.mark.parametrize("text", ["", "A1", "A2:0", "A2:x", "A2:65", "A2:2:", "A2:2:lots", "A2:2:1K", "A2:2:8GiB:1"])
def test_parse_shows_the_format(text: str) -> None:
    with pytest.raises(SpecError, match=r"A2|64 MiB"):
        parse(text)


def test_visible_devices() -> None:
    spec = Spec("A2", 4, GIB)
    assert visible(spec, None) == 4
    assert visible(spec, "3") == 1
    assert visible(spec, "0, 2") == 2
    with pytest.raises(ActivationError, match="0 to 3"):
        visible(spec, "4")
