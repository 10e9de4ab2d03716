from __future__ import annotations

# isort: off
import os

from kernels.cpu.isa import isa_environment
from kernels.environment import NO_AUTOLOAD

os.environ.update(NO_AUTOLOAD | isa_environment(os.environ))  # before torch, which reads both once
# isort: on
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.tiny_model import make_tiny_model


def pytest_configure() -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:  # there are as many of them as cores
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        if "torch" in sys.modules:  # by a conftest.py of the files that were named; it has read the variable
            sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with small random weights."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny-model"))


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
