"""Runs models on several ranks, a process each: as a module what the tests call, as a program one of the ranks."""

from __future__ import annotations

import tests.simulated_npu  # noqa: F401 - where torch_npu is installed, NPUs come before torch

# isort: split
import gc
import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from kernels.runner import ModelRunner
from kernels.speculative.settings import SpeculativeSettings
from kernels.step import RunnerConfig, SlotSampling
from tests.kernels.conftest import Driver, ints

__all__ = ["run_ranks"]

PATIENCE = 500
"""Seconds until ranks that have not ended are a failure."""


def run_ranks(jobs: list[dict[str, Any]], size: int = 2) -> list[list[dict[str, Any]]]:
    """What each rank says of each job: [rank][job]. A job: ``model``, ``prompts``, ``length``, ``sampling``,
    ``options`` of RunnerConfig, its ``speculation``, and what differs by rank; the prompts decode together until each
    has ``length`` tokens.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        given = [job | {"rendezvous": str(folder / f"store-{number}")} for number, job in enumerate(jobs)]
        ranks = []
        for rank in range(size):
            environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "ASCEND_RT_VISIBLE_DEVICES": str(rank)}
            process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "tests.kernels.parallel.ranks", str(rank), str(size)],
                cwd=Path(__file__).parents[3],
                env=os.environ | environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.callback(process.kill)
            ranks.append(process)
        for process in ranks:
            assert process.stdin is not None
            process.stdin.write(json.dumps(given))
            process.stdin.close()
            process.stdin = None
        said = [process.communicate(timeout=PATIENCE) for process in ranks]
    for process, (_, errors) in zip(ranks, said, strict=True):
        assert process.returncode == 0, errors[-4000:]
    return [json.loads(output.splitlines()[-1]) for output, _ in said]


def run(job: dict[str, Any], rank: int, size: int) -> dict[str, Any]:
    options = {"dtype": "float32", "max_slots": 9, "max_total_tokens": 4096, "threads": 1} | job.get("options", {})
    share = job.get("tokens_of_rank")  # how large a cache each rank would like
    speculation = job.get("speculation")
    if speculation:
        options["speculation"] = msgspec.convert(speculation, SpeculativeSettings)
    if share:
        options["max_total_tokens"] = share[rank]
    config = RunnerConfig(
        model_path=job["model"], tp_rank=rank, tp_size=size, rendezvous=job["rendezvous"], op_timeout=240.0, **options
    )
    runner = ModelRunner(config)
    if "streams_of_rank" in job:  # what is left for graphs on each rank's NPU
        from kernels.npu.simulator.activate import active

        simulator = active()
        assert simulator is not None
        gc.collect()  # else graphs of the job before may give theirs back later
        simulator.faults.scarce_streams(0, job["streams_of_rank"][rank])
    info = runner.load()
    driver = Driver(runner, info)
    sampling = SlotSampling(**job.get("sampling", {"temperature": 0.0}))
    accepted = []
    for slot, prompt in enumerate(job["prompts"], start=1):
        driver.admit(slot, prompt, sampling=sampling)
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


def main() -> None:
    rank, size = int(sys.argv[1]), int(sys.argv[2])
    jobs = json.load(sys.stdin)
    print(json.dumps([run(job, rank, size) for job in jobs]))


if __name__ == "__main__":
    main()
