from __future__ import annotations

# isort: off
import os

from kernels.contract.cpu_isa import isa_environment
from kernels.contract.environment import NO_AUTOLOAD

os.environ.update(NO_AUTOLOAD | isa_environment(os.environ))  # before torch, which reads both once
# isort: on
import gc
import logging
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.kits.fast_lane import FAST
from tests.kits.isa_lane import ISA
from tests.kits.tiny_model import make_tiny_model


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tests = Path(__file__).parent
    lanes = {"fast": {tests / name for name in FAST}, "isa": {tests / name for name in ISA}}

    @cache
    def lanes_of(path: Path) -> list[str]:
        return [lane for lane, places in lanes.items() if not places.isdisjoint((path, *path.parents))]

    for item in items:
        if not item.get_closest_marker("long"):
            for lane in lanes_of(item.path):
                item.add_marker(lane)


def pytest_configure() -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:  # there are as many of them as cores
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        if "torch" in sys.modules:  # by a conftest.py of the files that were named; it has read the variable
            sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Without garbage collection, which took a fifth of the time of the tests' imports."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_runtest_logstart(nodeid: str) -> None:
    """Freeze what earlier modules left, so that a full collection, of which tests make many, takes no tenth of a
    second for the libraries' objects."""
    global _module
    module = nodeid.partition("::")[0]
    if module != _module:
        _module = module
        gc.collect()
        gc.freeze()


_module = ""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Let what a test draws without a seed not depend on the tests before it in this process."""
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.manual_seed(0)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with small random weights."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="session")
def warm_workers() -> Iterator[None]:
    """Workers of engines start at once. Once a test of this process has asked for it, they do for all."""
    from tests.kits.warm_workers import warm

    with warm():
        yield


@pytest.fixture
def restore_loggers() -> Iterator[Callable[..., None]]:
    """Call it with the names of loggers: after the test they are as they were."""
    kept: list[tuple[logging.Logger, int, bool, list[logging.Handler]]] = []

    def keep(*names: str) -> None:
        for logger in map(logging.getLogger, names):
            kept.append((logger, logger.level, logger.propagate, list(logger.handlers)))

    yield keep
    for logger, level, propagate, handlers in kept:
        logger.setLevel(level)
        logger.propagate = propagate
        logger.handlers[:] = handlers
