"""Tests on simulated NPUs (tests/kits/simulated_npu.py); skipped with a reason where there are none."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from tests.kits.simulated_npu import REASON, SPEC

HERE = Path(__file__).parent


class Skipped(pytest.File):
    """A test file that cannot even be imported here, reported as skipped."""

    def collect(self) -> list[pytest.Item]:
        pytest.skip(REASON, allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if REASON and HERE in module_path.parents:
        return Skipped.from_parent(parent, path=module_path)
    return None


def pytest_report_header() -> str:
    return f"npu: none, {REASON}" if REASON else f"npu: simulated {SPEC}"


if not REASON:

    @pytest.fixture(scope="session")
    def simulator():
        """The simulated machine of this process."""
        from kernels.devices.npu_simulator.activate import active

        found = active()
        assert found is not None
        return found

    @pytest.fixture(scope="session")
    def streams(simulator):
        """How many streams each device has for graphs to take, once it is in use."""
        import torch

        for device in range(simulator.cann.devices):
            torch.ones(1, device=f"npu:{device}").add_(1)
        torch.npu.synchronize()
        torch.npu.empty_cache()
        return [simulator.cann.streams_left(device) for device in range(simulator.cann.devices)]

    @pytest.fixture(scope="module", autouse=True)
    def _quick_collections(simulator):
        """What the libraries have made is not looked through again before each test."""
        gc.collect()
        gc.freeze()
        yield
        gc.unfreeze()

    @pytest.fixture(autouse=True)
    def rested_devices(simulator, streams):
        """Each test finds the devices of its process as the first one did, whichever ran before it: well, at rest, with
        nothing in flight, and with all of their memory and streams."""
        import torch

        gc.collect()  # graphs and runners of other tests go, and give back what they held
        torch.npu.set_stream(torch.npu.default_stream())
        simulator.faults.clear()
        simulator.engine.order.host_waited()
        torch.npu.synchronize()
        torch.npu.empty_cache()
        for device, left in enumerate(streams):
            simulator.cann.set_streams_left(device, left)
