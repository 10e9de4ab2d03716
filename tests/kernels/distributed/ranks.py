"""Runs models on several ranks, a process each: as a module what the tests call, as a program one of the ranks."""

from __future__ import annotations

from tests.kits.simulated_npu import REASON, SPEC  # where torch_npu is installed, NPUs come before torch

# isort: split
import atexit
import contextlib
import dataclasses
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TextIO

import msgspec
import pytest
import torch
import torch.distributed as dist

from kernels.contract.adapters import AdapterSettings
from kernels.contract.config import RunnerConfig
from kernels.contract.environment import NPU_TRITON
from kernels.contract.expert_settings import ExchangeSettings, ExpertSettings
from kernels.contract.runner import RunningStep
from kernels.contract.speculation import SpeculativeSettings
from kernels.contract.step import SlotSampling, StepBatch, StepResult
from kernels.core.batch import ForwardBatch
from kernels.devices.cpu.device import CpuDevice
from kernels.distributed.group import GroupError, join_group
from kernels.execution.executors import two_batches
from kernels.execution.runner import ModelRunner
from tests.kits.driver import Driver, ints, short_warm_up

__all__ = ["run_ranks"]

PATIENCE = 500
"""Seconds until ranks that have not ended are a failure."""


DEVICES = 4
"""Simulated NPUs of a machine, one for each rank."""
AT_ONCE = max(1, min(8, (os.cpu_count() or 1) // 4))
"""Jobs on GPUs that run side by side: most of their time is that of compilers."""


class Program:
    """This module as a program, the leader of a group of processes: it becomes a rank, or forks ranks."""

    def __init__(self, environment: dict[str, str], log: TextIO, forks: bool) -> None:
        self._forks = forks
        environment = environment | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-W", "ignore", "-m", __name__),
                    str(theirs.fileno()),
                    *(["forks"] if forks else []),
                ],
                cwd=Path(__file__).parents[3],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                process_group=0,
            )

    def start(self, rank: int, log: TextIO) -> TextIO:
        """Where a new rank reads jobs and writes answers."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            socket.send_fds(self._control, [str(rank).encode()], [theirs.fileno(), log.fileno()])
            return ours.makefile("rw")

    def kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        self._control.close()  # at which it ends its forks, and itself
        if not self._forks:
            self.kill()
        self._process.wait()


class Ranks:
    """Ranks that wait for jobs: processes that stay, forks of one that has imported torch, but where torch is imported
    with other variables for each. Jobs of fewer ranks take the first."""

    def __init__(self, environment: dict[str, str], forks: bool = bool(REASON)) -> None:
        self.environment = environment
        self.forks = forks
        self.folder = TemporaryDirectory()
        self.programs: list[Program] = []
        self.ranks: list[TextIO] = []
        self.groups = 0

    def _log(self, rank: int) -> Path:
        return Path(self.folder.name) / f"rank-{rank}"

    def _start(self, rank: int) -> TextIO:
        own = {"ASCEND_RT_VISIBLE_DEVICES": str(rank)}
        visible = [part for part in self.environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if part]
        own["CUDA_VISIBLE_DEVICES"] = visible[rank] if rank < len(visible) else str(rank)
        if not REASON:
            own["TROUPE_NPU_SIMULATOR"] = SPEC if ":" in SPEC else f"{SPEC}:{DEVICES}"
        with self._log(rank).open("w") as log:
            if not self.forks or not self.programs:
                self.programs.append(Program(self.environment | own, log, self.forks))
            return self.programs[-1].start(rank, log)

    def run(self, jobs: list[dict[str, Any]], size: int) -> list[list[dict[str, Any]]]:
        self.ranks += [self._start(rank) for rank in range(len(self.ranks), size)]
        given = []
        for job in jobs:
            self.groups += 1
            given.append(job | {"rendezvous": str(Path(self.folder.name) / f"store-{self.groups}")})
        late = threading.Timer(PATIENCE, self.kill)
        late.start()
        try:
            for rank in self.ranks[:size]:
                rank.write(json.dumps([size, given]) + "\n")
                rank.flush()
            return [self._answer(rank, size) for rank in range(size)]
        finally:
            late.cancel()

    def _answer(self, rank: int, size: int) -> list[dict[str, Any]]:
        with contextlib.suppress(ConnectionError):
            if line := self.ranks[rank].readline():
                return list(json.loads(line))
        self.kill()
        raise AssertionError("\n".join(self._log(rank).read_text()[-4000:] for rank in range(size)))

    def kill(self) -> None:
        for program in self.programs:
            program.kill()

    def close(self) -> None:
        for program in self.programs:
            program.close()
        for rank in self.ranks:
            with contextlib.suppress(OSError):
                rank.close()
        self.folder.cleanup()


_ranks: Ranks | None = None


@atexit.register
def _close() -> None:
    if _ranks is not None:
        _ranks.close()


def run_ranks(jobs: list[dict[str, Any]], size: int = 2) -> list[list[dict[str, Any]]]:
    """What each rank says of each job: [rank][job]. A job: ``model``, ``prompts``, ``length``, ``sampling``,
    ``options`` of RunnerConfig, its ``speculation``, ``stages`` of a pipeline, ``adapters`` of the first prompts,
    ``chunk``, tokens of a prompt in a step, in which others decode, ``cached``, whether prompts take pages of the first
    that begin as they do, ``overlapped``, tokens of chunks that run before others are answered, ``poisoned``, a rank
    whose cache of the first prompt becomes NaN, and what differs by rank; the prompts decode together until each has
    ``length`` tokens, or ``new`` ones. ``unread``: steps of tensor parallelism that run before others are answered. The
    ranks stay for the next jobs of the same environment; on GPUs each job has ranks of its own, as a server has.
    """
    global _ranks
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    if any(job.get("options", {}).get("device") == "cuda" for job in jobs):
        with ThreadPoolExecutor(AT_ONCE) as threads:
            by_job = list(threads.map(lambda job: run_apart(job, size, environment), jobs))
        return [[answers[rank] for answers in by_job] for rank in range(size)]
    if _ranks is None or _ranks.environment != environment:
        _close()
        _ranks = Ranks(environment)
    try:
        return _ranks.run(jobs, size)
    except BaseException:
        _close()
        _ranks = None
        raise


def run_apart(job: dict[str, Any], size: int, environment: dict[str, str]) -> list[dict[str, Any]]:
    """What each rank says of one job, in processes that end with it: [rank]."""
    ranks = Ranks(environment, forks=False)
    try:
        return [answer for (answer,) in ranks.run([job], size)]
    finally:
        ranks.close()


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
    if "experts" in options:
        options["experts"] = msgspec.convert(options["experts"], ExpertSettings)
    if "exchange" in options:
        options["exchange"] = msgspec.convert(options["exchange"], ExchangeSettings)
    adapters = job.get("adapters", [])
    if adapters:
        options["adapters"] = AdapterSettings(4, len(adapters), tuple(job.get("targets", ["all"])))
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
    if options.get("device") == "npu":  # what is left for graphs on each rank's NPU, whatever the job before left
        from kernels.devices.npu_simulator.activate import active

        simulator = active()
        assert simulator is not None
        gc.collect()  # else graphs of the job before may give theirs back later
        simulator.faults.scarce_streams(0, job.get("streams_of_rank", [1000] * size)[rank])
    info = runner.load()
    eager_drafts = count_eager_drafts(runner)
    for index, path in enumerate(adapters, start=1):
        runner.load_adapter(index, path)
    driver = Driver(runner, info)
    sampling = SlotSampling(**job.get("sampling", {"temperature": 0.0}))
    if "overlapped" in job:
        return run_overlapped(runner, driver, job, rank, rank // part == stages - 1)
    if "unread" in job:
        return run_unread(runner, driver, job, rank)
    if "parts" in job:
        return run_parts(runner, driver, job, config)
    if "min_divided" in job:
        return run_divided(runner, driver, job, rank)
    accepted, failed, wanted, replays = [], dict[int, str](), dict[int, int](), 0
    for slot, prompt in enumerate(job["prompts"], start=1):
        cached = cached_tokens(job, job["prompts"], slot, info.page_size)
        shared = driver.pages[1][: cached // info.page_size] if cached else ()
        driver.admit(slot, prompt, sampling=sampling, shared=shared, adapter=slot if slot <= len(adapters) else 0)
        wanted[slot] = wanted_length(job, prompt)
        size = job.get("chunk", len(prompt))
        for begin in range(cached, len(prompt), size):
            others = [
                (other, 1) for other in driver.tokens if other < slot and len(driver.tokens[other]) < wanted[other]
            ]
            chunk = slot, min(size, len(prompt) - begin)
            assert not driver.step([*(others if "chunk" in job else []), chunk]).failed
    while rows := [(slot, 1) for slot in driver.tokens if len(driver.tokens[slot]) < wanted[slot]]:
        drafts = dict.fromkeys(driver.tokens, info.speculative_nodes - 1) if speculation else {}
        if len(accepted) == 3 and job.get("poisoned") == rank:
            with torch.inference_mode():
                runner._loaded.caches[0][driver.pages[1][0]] = float("nan")
        result = driver.step(rows, drafts)
        for error in result.failed:
            assert "poisoned" in job, error
            failed[error.slot] = error.message
            rows.remove((error.slot, 1))
            driver.release(error.slot)
        accepted.append(ints(result.accepted))
        replays += result.timing.graph_rows > 0
        assert speculation or sum(accepted[-1]) == len(rows)
    rebalancer = runner._loaded.rebalancer
    runner.close()
    return {
        "accepted": accepted,
        "moved": 0 if rebalancer is None else rebalancer.moved,
        "failed": failed,
        "tokens": [driver.tokens[slot] for slot in sorted(driver.tokens)],
        "weight_bytes": info.weight_bytes,
        "draft_bytes": info.draft_weight_bytes,
        "parameters": info.parameters,
        "num_pages": info.num_pages,
        "cache_bytes": info.cache_bytes,
        "graph_rows": list(info.graph_rows),
        "eager_drafts": len(eager_drafts),
        "replays": replays,
    }


def count_eager_drafts(runner: ModelRunner) -> list[int]:
    """Tokens of each pass of a draft head that runs eagerly from now on, in the last stage."""
    found, speculator = list[int](), runner._loaded.speculator
    head = getattr(getattr(getattr(speculator, "drafter", None), "_own", None), "_model", None)
    if head is not None:
        forward = head.forward

        def counted(batch: ForwardBatch, *given: Any) -> torch.Tensor:
            found.append(len(batch.token_ids))
            return forward(batch, *given)

        head.forward = counted
    return found


def run_divided(runner: ModelRunner, driver: Driver, job: dict[str, Any], rank: int) -> dict[str, Any]:
    """Steps as two batches from ``min_divided`` tokens on: all prompts but the last, then that one beside decodes.
    ``broken``: the rank whose second batch fails in its third sum."""
    *first, last = job["prompts"]
    for slot, prompt in enumerate(job["prompts"], start=1):
        driver.admit(slot, prompt)
    lost, sums = "", list[str]()
    real = dist.all_reduce

    def all_reduce(x: torch.Tensor, **options: Any) -> Any:
        sums.append(threading.current_thread().name)
        if job.get("broken") == rank and sums.count("second-batch") == 3:
            raise OSError("broken")
        return real(x, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(two_batches, "_MIN_TOKENS", job["min_divided"])
        patch.setattr(dist, "all_reduce", all_reduce)
        try:
            results = [driver.step([(slot, len(prompt)) for slot, prompt in enumerate(first, start=1)])]
            results.append(driver.step([(1, 1), (len(first) + 1, len(last))]))
            while rows := [(slot, 1) for slot, tokens in driver.tokens.items() if len(tokens) < job["length"]]:
                results.append(driver.step(rows))
        except (OSError, GroupError) as error:
            lost, results = f"{type(error).__name__}: {error}", []
    runner.close()
    return {
        "lost": lost,
        "tokens": [driver.tokens[slot] for slot in sorted(driver.tokens)],
        "divided": [result.timing.divided for result in results],
        "turns": sums[:4],
    }


def run_overlapped(runner: ModelRunner, driver: Driver, job: dict[str, Any], rank: int, last: bool) -> dict[str, Any]:
    """Two prompts in chunks, of which up to three are under way, then the second decodes. A stage that is not the
    last waits for no result."""
    prompts, chunk = job["prompts"], job["overlapped"]
    run_step = runner.run
    if not last:

        def start(batch: StepBatch) -> StepResult:
            runner.start(batch)
            return StepResult(batch.number, accepted=bytes(len(batch.slots)), tokens=b"")

        run_step = start
    failed = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "run", run_step)
        for slot, prompt in enumerate(prompts, start=1):
            driver.admit(slot, prompt)
        for number in range(len(prompts[0]) // chunk):
            if number == 2 and job["poisoned"] == rank:
                with torch.inference_mode():
                    runner._loaded.caches[0][driver.pages[1][0]] = float("nan")
            driver.unanswered = min(number, 2)
            result = driver.step([(slot, chunk) for slot in (1, 2)])
            failed += [[number, error.slot, error.message] for error in result.failed]
        driver.unanswered = 0
        driver.release(1)
        while driver.computed[2] < job["length"]:
            failed += [[-1, error.slot, error.message] for error in driver.step([(2, 1)]).failed]
    runner.close()
    return {"failed": failed, "tokens": driver.tokens[2]}


def run_unread(runner: ModelRunner, driver: Driver, job: dict[str, Any], rank: int) -> dict[str, Any]:
    """Steps of all prompts, of which ``unread`` are launched before the first result is read; rank 1 reads none by
    itself. The cache of the first prompt becomes NaN before step 3."""
    ahead, running = job["unread"], deque[RunningStep]()

    def start(batch: StepBatch) -> StepResult:
        running.append(runner.start(batch))
        return StepResult(batch.number, accepted=bytes(len(batch.slots)), tokens=b"")

    for slot, prompt in enumerate(job["prompts"], start=1):
        driver.admit(slot, prompt)
    results = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "run", start)
        for number in range(job["length"]):
            if number == 3:
                with torch.inference_mode():
                    runner._loaded.caches[0].values[driver.pages[1][0]] = float("nan")
            driver.unanswered = min(number, ahead)
            driver.step([(slot, 1 if number else len(prompt)) for slot, prompt in enumerate(job["prompts"], start=1)])
            assert not running[-1].done
            if rank == 0 and len(running) > ahead:
                results.append(running.popleft().result())
    results += [each.result() for each in running]
    runner.close()
    return {
        "failed": [[result.number, error.slot, error.message] for result in results for error in result.failed],
        "tokens": [ints(result.tokens) for result in results],
    }


def wanted_length(job: dict[str, Any], prompt: list[int]) -> int:
    return len(prompt) + job["new"] if "new" in job else int(job["length"])


def cached_tokens(job: dict[str, Any], prompts: list[list[int]], slot: int, page: int) -> int:
    """The tokens of a slot's prompt that whole pages of the first prompt hold; one is left to run."""
    if slot == 1 or not job.get("cached"):
        return 0
    same = takewhile(lambda pair: pair[0] == pair[1], zip(prompts[0], prompts[slot - 1][:-1], strict=False))
    return sum(1 for _ in same) // page * page


def run_parts(runner: ModelRunner, driver: Driver, job: dict[str, Any], config: RunnerConfig) -> dict[str, Any]:
    """Data-parallel attention of ``parts``, the prompts of each: in chunks, one after the other, then all decode."""
    parts, page = job["parts"], driver.info.page_size
    drafts = driver.info.speculative_nodes - 1 if "speculation" in job else 0
    plans, accepted = [plan(prompts, job, page) for prompts in parts], list[list[int]]()
    own, replays = config.tp_rank // config.attention_size, 0
    for number in range(max(len(chunks) + len(decodes) for chunks, decodes in plans)):
        steps = [(chunks + decodes)[number : number + 1] for chunks, decodes in plans]
        limits = [
            {slot: drafts for rows in each for slot, _ in rows if drafts and number >= len(chunks)}
            for each, (chunks, _) in zip(steps, plans, strict=True)
        ]
        driver.pass_tokens = tuple(
            sum(count for rows in each for _, count in rows) + sum(most.values())
            for each, most in zip(steps, limits, strict=True)
        )
        rows = [row for rows in steps[own] for row in rows]
        for slot, _ in rows:
            if slot not in driver.tokens:
                begin = cached_tokens(job, parts[own], slot, page)
                driver.admit(slot, parts[own][slot - 1], shared=driver.pages[1][: begin // page] if begin else ())
        result = driver.step(rows, limits[own])
        assert not result.failed
        replays += result.timing.graph_rows > 0
        accepted.append(ints(result.accepted))
    rebalancer, calls = runner._loaded.rebalancer, 0
    if config.device == "npu":
        from kernels.devices.npu_simulator.activate import active

        simulator = active()
        assert simulator is not None
        calls = sum(count for name, count in simulator.engine.calls.items() if "moe_distribute" in name)
    if runner._device.torch_device.type == "cuda":
        # A part without rows waits for no result. Its group's end would abort collectives that it has launched and the
        # other part still needs.
        torch.cuda.synchronize()
    runner.close()
    return {
        "tokens": [driver.tokens[slot] for slot in sorted(driver.tokens)],
        "accepted": accepted,
        "weight_bytes": driver.info.weight_bytes,
        "graphs": list(driver.info.graph_rows),
        "replays": replays,
        "draft_bytes": driver.info.draft_weight_bytes,
        "moved": 0 if rebalancer is None else rebalancer.moved,
        "calls": calls,
    }


def plan(prompts: list[list[int]], job: dict[str, Any], page: int) -> tuple[list[list[tuple[int, int]]], ...]:
    """The rows of each step: of prompts, then of decodes."""
    size = job.get("chunk", 16)
    chunks = [
        [(slot, min(size, len(prompt) - begin))]
        for slot, prompt in enumerate(prompts, start=1)
        for begin in range(cached_tokens(job, prompts, slot, page), len(prompt), size)
    ]
    left = {slot: wanted_length(job, prompt) - len(prompt) - 1 for slot, prompt in enumerate(prompts, start=1)}
    decodes = [
        [(slot, 1) for slot, count in left.items() if step < count] for step in range(max(left.values(), default=0))
    ]
    return chunks, decodes


def emulate_gpu(patch: pytest.MonkeyPatch) -> None:
    """Let cuda be the CPU, with Triton's interpreter and gloo."""
    import kernels.devices.cuda.device as cuda
    from tests.kernels.devices.cuda.interpreted import install

    install(patch)
    patch.setattr(cuda, "FEATURES", dataclasses.replace(cuda.FEATURES, collectives="gloo"))


def serve(rank: int, lines: TextIO) -> None:
    with short_warm_up(), pytest.MonkeyPatch.context() as patch:
        if os.environ.get("TRITON_INTERPRET") == "1":
            emulate_gpu(patch)
        for line in iter(lines.readline, ""):
            size, jobs = json.loads(line)
            lines.write(json.dumps([run(job, rank, size) for job in jobs]) + "\n")
            lines.flush()


def main() -> None:
    control, forks = socket.socket(fileno=int(sys.argv[1])), sys.argv[2:] == ["forks"]
    gc.collect()
    gc.freeze()
    children = list[int]()
    while message := (received := socket.recv_fds(control, 16, 2))[0]:
        lines, log = received[1]
        if forks and (child := os.fork()):
            children.append(child)
            os.close(lines)
            os.close(log)
            continue
        os.dup2(log, 1)
        os.dup2(log, 2)
        with socket.socket(fileno=lines) as ours:
            serve(int(message), ours.makefile("rw"))
        return
    for child in children:  # of which none is reaped before, so that the numbers are still theirs
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
