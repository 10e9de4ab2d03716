"""Runs models on several ranks, a process each: as a module what the tests call, as a program one of the ranks."""

from __future__ import annotations

import tests.kits.simulated_npu  # noqa: F401 - where torch_npu is installed, NPUs come before torch

# isort: split
import atexit
import gc
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
import torch

from kernels.contract.adapters import AdapterSettings
from kernels.contract.config import RunnerConfig
from kernels.contract.environment import NPU_TRITON
from kernels.contract.speculation import SpeculativeSettings
from kernels.contract.step import SlotSampling
from kernels.devices.cpu.device import CpuDevice
from kernels.distributed.group import join_group
from kernels.execution.runner import ModelRunner
from tests.kits.driver import Driver, ints

__all__ = ["run_ranks"]

PATIENCE = 500
"""Seconds until ranks that have not ended are a failure."""


ANSWER = "answer: "


class Ranks:
    """Ranks that wait for jobs: processes that stay, since each imports torch."""

    def __init__(self, size: int, environment: dict[str, str]) -> None:
        self.size, self.environment = size, environment
        self.folder = TemporaryDirectory()
        self.logs = [Path(self.folder.name) / f"rank-{rank}" for rank in range(size)]
        self.ranks = [self._start(rank) for rank in range(size)]
        self.groups = 0

    def _start(self, rank: int) -> subprocess.Popen[str]:
        own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "ASCEND_RT_VISIBLE_DEVICES": str(rank)}
        with self.logs[rank].open("w") as log:
            return subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "tests.kernels.distributed.ranks", str(rank), str(self.size)],
                cwd=Path(__file__).parents[3],
                env=self.environment | own,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def run(self, jobs: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
        given = []
        for job in jobs:
            self.groups += 1
            given.append(job | {"rendezvous": str(Path(self.folder.name) / f"store-{self.groups}")})
        late = threading.Timer(PATIENCE, self.kill)
        late.start()
        try:
            for process in self.ranks:
                assert process.stdin is not None
                process.stdin.write(json.dumps(given) + "\n")
                process.stdin.flush()
            return [self._answer(rank) for rank in range(self.size)]
        finally:
            late.cancel()

    def _answer(self, rank: int) -> list[dict[str, Any]]:
        lines = self.ranks[rank].stdout
        assert lines is not None
        for line in lines:
            if line.startswith(ANSWER):
                return list(json.loads(line.removeprefix(ANSWER)))
        self.kill()
        raise AssertionError("\n".join(log.read_text()[-4000:] for log in self.logs))

    def kill(self) -> None:
        for process in self.ranks:
            process.kill()

    def close(self) -> None:
        self.kill()
        for process in self.ranks:
            process.communicate()
        self.folder.cleanup()


_ranks: Ranks | None = None


@atexit.register
def _close() -> None:
    if _ranks is not None:
        _ranks.close()


def run_ranks(jobs: list[dict[str, Any]], size: int = 2) -> list[list[dict[str, Any]]]:
    """What each rank says of each job: [rank][job]. A job: ``model``, ``prompts``, ``length``, ``sampling``,
    ``options`` of RunnerConfig, its ``speculation``, ``stages`` of a pipeline, ``adapters`` of the first prompts, and
    what differs by rank; the prompts decode together until each has ``length`` tokens. The ranks stay for the next jobs
    of the same environment.
    """
    global _ranks
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    if _ranks is None or (_ranks.size, _ranks.environment) != (size, environment):
        _close()
        _ranks = Ranks(size, environment)
    try:
        return _ranks.run(jobs)
    except BaseException:
        _close()
        _ranks = None
        raise


def run_collectives(job: dict[str, Any], rank: int, size: int) -> dict[str, Any]:
    """What groups of some of four ranks give; rank n brings n + 1."""
    config = RunnerConfig(model_path="", tp_rank=rank, tp_size=size, rendezvous=job["rendezvous"], op_timeout=240.0)
    whole = join_group(CpuDevice(threads=1), config)
    near = whole.subgroup([0, 1] if rank < 2 else [2, 3])
    far = whole.subgroup([rank % 2, rank % 2 + 2])
    mine = torch.full((2, 1), float(rank + 1))
    answer = {
        "near": near.all_gather_rows(mine).flatten().tolist(),
        "far": far.all_reduce(torch.tensor([rank + 1.0, 10.0 * (rank + 1)])).tolist(),
        "columns": near.all_gather(mine)[1].tolist(),
        "least": near.minimum(rank + 1),
        "numbers": [near.rank, near.size, far.rank],
    }
    both = torch.tensor([1.0, 1.0, 10.0, 10.0]).repeat_interleave(2).view(8, 1) * (rank + 1)
    answer["scattered"] = whole.reduce_scatter(both).flatten().tolist()
    for group in (far, near, whole):
        group.close()
    return answer


def run(job: dict[str, Any], rank: int, size: int) -> dict[str, Any]:
    if job.get("collectives"):
        return run_collectives(job, rank, size)
    options = {"dtype": "float32", "max_slots": 9, "max_total_tokens": 4096, "threads": 1} | job.get("options", {})
    stages = job.get("stages", 1)
    part = size // stages
    share = job.get("tokens_of_rank")  # how large a cache each rank would like
    speculation = job.get("speculation")
    if speculation:
        options["speculation"] = msgspec.convert(speculation, SpeculativeSettings)
    adapters = job.get("adapters", [])
    if adapters:
        options["adapters"] = AdapterSettings(max_rank=4, max_batch=len(adapters))
    if share:
        options["max_total_tokens"] = share[rank]
    config = RunnerConfig(
        model_path=job["model"],
        tp_rank=rank % part,
        tp_size=part,
        pp_rank=rank // part,
        pp_size=stages,
        rendezvous=job["rendezvous"],
        op_timeout=240.0,
        **options,
    )
    with pytest.MonkeyPatch.context() as patch:
        if "own_of_rank" in job:  # which ranks may use our own kernels of an NPU
            patch.setenv(NPU_TRITON, job["own_of_rank"][rank])
        runner = ModelRunner(config)
    if "streams_of_rank" in job:  # what is left for graphs on each rank's NPU
        from kernels.devices.npu_simulator.activate import active

        simulator = active()
        assert simulator is not None
        gc.collect()  # else graphs of the job before may give theirs back later
        simulator.faults.scarce_streams(0, job["streams_of_rank"][rank])
    info = runner.load()
    for index, path in enumerate(adapters, start=1):
        runner.load_adapter(index, path)
    driver = Driver(runner, info)
    sampling = SlotSampling(**job.get("sampling", {"temperature": 0.0}))
    if "parts" in job:
        return run_parts(runner, driver, job["parts"], config, job["length"])
    accepted = []
    for slot, prompt in enumerate(job["prompts"], start=1):
        driver.admit(slot, prompt, sampling=sampling, adapter=slot if slot <= len(adapters) else 0)
        assert not driver.step([(slot, len(prompt))]).failed
    while rows := [(slot, 1) for slot in driver.tokens if len(driver.tokens[slot]) < job["length"]]:
        drafts = dict.fromkeys(driver.tokens, info.speculative_nodes - 1) if speculation else {}
        result = driver.step(rows, drafts)
        assert not result.failed
        accepted.append(ints(result.accepted))
        assert speculation or sum(accepted[-1]) == len(rows)
    runner.close()
    return {
        "accepted": accepted,
        "tokens": [driver.tokens[slot] for slot in sorted(driver.tokens)],
        "weight_bytes": info.weight_bytes,
        "parameters": info.parameters,
        "num_pages": info.num_pages,
        "cache_bytes": info.cache_bytes,
        "graph_rows": list(info.graph_rows),
    }


def run_parts(
    runner: ModelRunner, driver: Driver, parts: list[list[list[int]]], config: RunnerConfig, length: int
) -> dict[str, Any]:
    """Data-parallel attention of ``parts``, the prompts of each: in chunks, one after the other, then all decode."""
    plans = [plan(prompts, length) for prompts in parts]
    own = config.tp_rank // config.attention_size
    for number in range(max(map(len, plans))):
        steps = [each[number] if number < len(each) else [] for each in plans]
        driver.pass_tokens = tuple(sum(count for _, count in rows) for rows in steps)
        for slot, _ in steps[own]:
            if slot not in driver.tokens:
                driver.admit(slot, parts[own][slot - 1])
        assert not driver.step(steps[own]).failed
    runner.close()
    return {"tokens": [driver.tokens[slot] for slot in sorted(driver.tokens)], "weight_bytes": driver.info.weight_bytes}


def plan(prompts: list[list[int]], length: int, chunk: int = 16) -> list[list[tuple[int, int]]]:
    """The rows of each step."""
    chunks = [
        [(slot, min(chunk, len(prompt) - begin))]
        for slot, prompt in enumerate(prompts, start=1)
        for begin in range(0, len(prompt), chunk)
    ]
    left = {slot: length - len(prompt) - 1 for slot, prompt in enumerate(prompts, start=1)}
    decodes = [
        [(slot, 1) for slot, count in left.items() if step < count] for step in range(max(left.values(), default=0))
    ]
    return chunks + decodes


def main() -> None:
    rank, size = int(sys.argv[1]), int(sys.argv[2])
    for line in sys.stdin:
        print(ANSWER + json.dumps([run(job, rank, size) for job in json.loads(line)]), flush=True)


if __name__ == "__main__":
    main()
