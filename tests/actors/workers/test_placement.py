"""Which device a worker gets, and what its environment says. Nothing here needs torch_npu."""

from __future__ import annotations

import ipaddress
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from actors.engine.configuration import runner_config
from actors.options import ArgumentError, Arguments
from actors.workers import placement
from actors.workers.placement import Placement, heeded, place
from kernels.contract import cpu_isa
from kernels.contract.config import RunnerConfig
from kernels.contract.cpu_isa import CpuIsa
from kernels.contract.errors import UnsupportedError
from kernels.devices.cpu.invariant import InvariantCpuDevice
from kernels.devices.select import select_device


def arguments(**keywords: object) -> Arguments:
    return Arguments.from_keywords(model="m", **keywords)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A /dev without NPUs, on a machine that has torch_npu."""
    monkeypatch.setattr(placement, "_DEVICE_FILES", tmp_path)
    monkeypatch.setattr(placement, "find_spec", lambda name: object())
    return tmp_path


def test_the_best_device_that_is_there(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert place(arguments(), {}) == Placement("cpu")
    (machine / "davinci_manager").touch()
    assert place(arguments(), {}).device == "cpu"
    (machine / "davinci3").touch()
    assert place(arguments(), {}) == Placement("npu")
    assert place(arguments(device="cpu"), {}) == Placement("cpu")
    monkeypatch.setattr(placement, "find_spec", lambda name: None)
    assert place(arguments(), {}) == Placement("cpu")
    assert place(arguments(device="npu"), {}) == Placement("npu")


def test_a_gpu_that_is_there(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine / "nvidiactl").touch()
    assert place(arguments(), {}).device == "cpu"
    (machine / "nvidia0").touch()
    assert place(arguments(), {}) == Placement("cuda")
    assert place(arguments(device="cpu"), {}) == Placement("cpu")
    (machine / "davinci0").touch()
    assert place(arguments(), {}) == Placement("npu")
    assert place(arguments(device="cuda"), {"TROUPE_NPU_SIMULATOR": "A2"}) == Placement("cuda")
    monkeypatch.setattr(placement, "find_spec", lambda name: None)
    assert place(arguments(), {}) == Placement("cpu")
    assert place(arguments(device="cuda"), {}) == Placement("cuda")


def test_each_worker_sees_its_own_gpu() -> None:
    gpu = Placement("cuda")

    def visible(rank: int, environ: dict[str, str], **keywords: object) -> str:
        return gpu.environment(arguments(**keywords), rank, environ, 300.0)["CUDA_VISIBLE_DEVICES"]

    assert visible(2, {}, base_gpu_id=1, gpu_id_step=3, tensor_parallel_size=3) == "7"
    assert visible(1, {"CUDA_VISIBLE_DEVICES": "GPU-a, GPU-b,GPU-c"}, base_gpu_id=1) == "GPU-c"
    with pytest.raises(ArgumentError, match="shows 2 GPUs"):
        visible(0, {"CUDA_VISIBLE_DEVICES": "0,1"}, base_gpu_id=2)


@pytest.mark.parametrize("keywords", [{"npu_simulator": "A2"}, {"attention_backend": "ascend"}])
def test_a_gpu_has_no_choice_of_backends(keywords: dict[str, object]) -> None:
    with pytest.raises(ArgumentError, match="contradicts device cuda"):
        arguments(device="cuda", **keywords)


def test_the_simulator_is_a_device() -> None:
    assert place(arguments(npu_simulator="A3:4"), {}) == Placement("npu", "A3:4")
    assert place(arguments(), {"TROUPE_NPU_SIMULATOR": "A2"}) == Placement("npu", "A2")
    assert place(arguments(npu_simulator="A5"), {"TROUPE_NPU_SIMULATOR": "A2"}).simulator == "A5"
    assert place(arguments(device="cpu"), {"TROUPE_NPU_SIMULATOR": "A2"}) == Placement("cpu")
    with pytest.raises(ArgumentError, match="TROUPE_NPU_SIMULATOR: 'A9'"):
        place(arguments(), {"TROUPE_NPU_SIMULATOR": "A9"})
    with pytest.raises(ArgumentError, match="npu_simulator: 'A9'"):
        arguments(npu_simulator="A9")


@pytest.mark.parametrize(
    "keywords",
    [
        {"npu_simulator": "A2"},
        {"attention_backend": "ascend"},
        {"decode_attention_backend": "torch_native"},
        {"sampling_backend": "ascend"},
        {"base_gpu_id": 2},
        {"cuda_graph_bs": (1, 2)},
        {"cuda_graph_max_bs": 8},
        {"disable_cuda_graph_padding": True},
        {"enable_piecewise_cuda_graph": True},
    ],
)
def test_the_cpu_has_none_of_it(keywords: dict[str, object]) -> None:
    with pytest.raises(ArgumentError, match="contradicts device cpu"):
        arguments(device="cpu", **keywords)
    if "npu_simulator" not in keywords:  # for which auto finds the NPU
        assert heeded(arguments(**keywords), place(arguments(**keywords), {})) == arguments()


def test_graphs_that_a_device_has_not_may_be_turned_off() -> None:
    assert arguments(device="cpu", disable_cuda_graph=True, disable_piecewise_cuda_graph=True).disable_cuda_graph


def test_deterministic_inference_takes_one_device_of_any_kind() -> None:
    with pytest.raises(ArgumentError, match="enable_deterministic_inference needs tensor_parallel_size 1"):
        arguments(device="cuda", enable_deterministic_inference=True, tensor_parallel_size=2)
    for name in ("speculative_accept_threshold_single", "speculative_accept_threshold_acc"):
        lenient = {"speculative_algorithm": "NGRAM", name: 0.9}
        arguments(device="cuda", **lenient)
        with pytest.raises(ArgumentError, match=f"{name} below 1 contradicts enable_deterministic_inference"):
            arguments(device="cuda", enable_deterministic_inference=True, **lenient)
    with pytest.raises(ArgumentError, match="attention_backend contradicts enable_deterministic_inference"):
        arguments(device="npu", enable_deterministic_inference=True, attention_backend="ascend")
    with pytest.raises(ArgumentError, match="cuda_graph_max_bs contradicts enable_deterministic_inference"):
        arguments(device="npu", enable_deterministic_inference=True, cuda_graph_max_bs=8)
    for device in ("cpu", "npu", "cuda"):
        given = arguments(device=device, enable_deterministic_inference=True)
        assert runner_config(given, Path(), 64, Placement(device)).invariant
    assert isinstance(select_device(RunnerConfig(model_path="", invariant=True)), InvariantCpuDevice)
    with pytest.raises(UnsupportedError, match=r"several ranks add up.*--tensor-parallel-size 1"):
        select_device(RunnerConfig(model_path="", invariant=True, tp_size=2))


def test_only_a_gpu_has_graphs_of_steps_with_prompts() -> None:
    for given in ({"piecewise_cuda_graph_tokens": (64,)}, {"piecewise_cuda_graph_max_tokens": 64}):
        with pytest.raises(ArgumentError, match="contradicts device npu, on which it has no effect"):
            arguments(device="npu", **given)
        arguments(device="cuda", **given)
    arguments(device="npu", cuda_graph_bs=(1, 2), disable_piecewise_cuda_graph=True)


def test_each_worker_sees_its_own_npu() -> None:
    npu = Placement("npu")

    def visible(rank: int, environ: dict[str, str], **keywords: object) -> str:
        return npu.environment(arguments(**keywords), rank, environ, 300.0)["ASCEND_RT_VISIBLE_DEVICES"]

    assert visible(0, {}) == "0"
    assert visible(2, {}, base_gpu_id=1, gpu_id_step=3, tensor_parallel_size=3) == "7"
    assert visible(1, {"ASCEND_RT_VISIBLE_DEVICES": "4, 6,7"}, base_gpu_id=1) == "7"
    with pytest.raises(ArgumentError, match="shows 2 NPUs"):
        visible(0, {"ASCEND_RT_VISIBLE_DEVICES": "0,1"}, base_gpu_id=2)


def test_a_hung_collective_speaks_before_its_supervisor_does() -> None:
    added = Placement("npu").environment(arguments(), 0, {}, 300.0)
    assert int(added["HCCL_EXEC_TIMEOUT"]) < 300
    assert Placement("npu").environment(arguments(), 0, {}, 1e6)["HCCL_EXEC_TIMEOUT"] == "17340"
    assert "HCCL_EXEC_TIMEOUT" not in Placement("npu").environment(arguments(), 0, {"HCCL_EXEC_TIMEOUT": "9"}, 300.0)


def test_workers_meet_on_the_loopback_interface() -> None:
    for device in ("cpu", "npu"):
        both = Placement(device).environment(arguments(tp=2), 1, {}, 300.0)
        assert both["GLOO_SOCKET_IFNAME"].startswith("lo")
        assert "GLOO_SOCKET_IFNAME" not in Placement(device).environment(arguments(), 0, {}, 300.0)
        chosen = {"GLOO_SOCKET_IFNAME": "eth0"}
        assert "GLOO_SOCKET_IFNAME" not in Placement(device).environment(arguments(tp=2), 0, chosen, 300.0)
    assert Placement("cuda").environment(arguments(tp=2), 1, {}, 300.0)["NCCL_SOCKET_IFNAME"].startswith("lo")


def test_workers_of_several_nodes_use_the_interface_to_node_0(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(address: str) -> str | None:
        given = arguments(tp=2, nnodes=2, dist_init_addr=address)
        return Placement("cpu").environment(given, 0, {}, 300.0).get("GLOO_SOCKET_IFNAME")

    own = next((name for _, name in socket.if_nameindex() if placement._ipv4_of(name) == "127.0.0.1"), None)
    assert own in (None, "lo"), "only Linux says the addresses of interfaces"
    assert str(chosen("127.0.0.1:29500")).startswith("lo")
    monkeypatch.setattr(placement, "_interface_to", {"10.0.0.1:29500": "eth7"}.get)
    assert chosen("10.0.0.1:29500") == "eth7"
    assert chosen("10.0.0.2:29500") is None
    unknown = arguments(tp=2, nnodes=2, cluster="ray")  # its address is chosen later
    assert "GLOO_SOCKET_IFNAME" not in Placement("cpu").environment(unknown, 0, {}, 300.0)


def test_an_ipv6_address_has_an_interface(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "if_inet6"
    monkeypatch.setattr(placement, "_IPV6_INTERFACES", table)
    own = ipaddress.ip_address("fd00::7").packed.hex()
    assert placement._interface_of_ipv6(own) is None
    table.write_text(f"{own[:-1]}8 02 40 00 80     eth0\n{own} 03 40 00 80     eth1\n")
    assert placement._interface_of_ipv6(own) == "eth1"


@pytest.mark.parametrize(
    ("keywords", "problem"),
    [
        ({"tp": 2, "nnodes": 2}, "nnodes needs dist_init_addr"),
        ({"nnodes": 2, "dist_init_addr": "h:29500"}, "nnodes needs tensor_parallel_size"),
        ({"dp": 3, "nnodes": 2, "dist_init_addr": "h:29500"}, "nnodes 2 must divide the number of workers, 3"),
        ({"tp": 3, "nnodes": 2, "dist_init_addr": "h:29500"}, "nnodes 2 must divide"),
        ({"tp": 2, "nnodes": 2, "node_rank": 2, "dist_init_addr": "h:29500"}, "node_rank 2 must be less than nnodes 2"),
        ({"node_rank": 1}, "node_rank 1 must be less than nnodes 1"),
        ({"tp": 2, "nnodes": 2, "dist_init_addr": "h:1", "nccl_port": 1}, "nccl_port must differ"),
        ({"tp": 2, "nnodes": 2, "dist_init_addr": "h:65535"}, "nccl_port 65536 leaves no port"),
        ({"tp": 2, "dp": 2, "dist_init_addr": "h:1"}, "several replicas cannot share one rendezvous"),
        ({"tp": 2, "dp": 2, "nnodes": 2, "dist_init_addr": "h:8", "nccl_port": 7}, "nccl_port must differ"),
        ({"tp": 2, "dp": 2, "nnodes": 2, "dist_init_addr": "h:65534"}, "no port below 65536 for each of 2 replicas"),
        ({"dp": 2, "nnodes": 2, "dist_init_addr": "h:1", "nccl_port": 7}, "nccl_port needs tensor_parallel_size"),
        ({"tp": 2, "dist_init_addr": "h:1", "nccl_port": 2}, "nccl_port contradicts dist_init_addr"),
        ({"nccl_port": 2}, "nccl_port needs tensor_parallel_size"),
        ({"dist_timeout": 2}, "dist_timeout needs tensor_parallel_size"),
    ],
)
def test_arguments_of_nodes_must_agree(keywords: dict[str, object], problem: str) -> None:
    with pytest.raises(ArgumentError, match=problem):
        arguments(**keywords)


def test_the_workers_of_a_model_are_divided_over_its_nodes() -> None:
    given = arguments(tp=2, pp=2, nnodes=2, dist_init_addr="h:29500")
    assert [given.node_of(worker) for worker in range(4)] == [0, 0, 1, 1]
    assert (given.node_workers, given.rendezvous) == (2, "h:29501")
    assert arguments(tp=2, nnodes=2, dist_init_addr="[::1]:29500", nccl_port=7).rendezvous == "[::1]:7"
    assert arguments(tp=2, dist_init_addr="h:29500").rendezvous == "h:29500"
    assert arguments(tp=2, nccl_port=7).rendezvous == "127.0.0.1:7"
    assert arguments(tp=2).rendezvous is None
    shared = arguments(tp=4, dp=2, enable_dp_attention=True, nnodes=2, dist_init_addr="h:29500")
    assert [shared.node_of(worker) for worker in range(4)] == [0, 0, 1, 1]
    replicas = arguments(dp=2, nnodes=2, dist_init_addr="h:29500", dist_timeout=5)
    assert [replicas.node_of(worker) for worker in range(2)] == [0, 1]


@pytest.mark.parametrize("address", ["29500", "host", "host:0", "host:port", ":1"])
def test_an_address_has_a_host_and_a_port(address: str) -> None:
    with pytest.raises(ArgumentError, match="must be host:port"):
        arguments(tp=2, dist_init_addr=address)
    with pytest.raises(ArgumentError, match="needs tensor_parallel_size"):
        arguments(dist_init_addr="127.0.0.1:29500")


def test_torch_npu_is_not_loaded_behind_the_back_of_a_cpu_worker() -> None:
    added = Placement("cpu").environment(arguments(), 0, {}, 300.0)
    assert added["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "0"
    assert not any(name.startswith(("ASCEND", "HCCL")) for name in added)


def test_placing_imports_no_torch() -> None:
    program = (
        "import sys; from actors.options import Arguments; from actors.workers.placement import place;"
        "place(Arguments(model_path='m', npu_simulator='A2'), {}); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_pages_are_larger_on_an_accelerator() -> None:
    assert [Placement(device).page_size for device in ("cpu", "cuda", "npu")] == [16, 64, 128]


def test_the_instruction_set_reaches_a_cpu_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_isa, "processor_isa", lambda: CpuIsa.AVX512)
    given = arguments(device="cpu", cpu_isa="avx2")
    assert place(given, {"TROUPE_CPU_ISA": "torch"}) == Placement("cpu")
    added = Placement("cpu").environment(given, 0, {"TROUPE_CPU_ISA": "torch"}, 300.0)
    assert (added["TROUPE_CPU_ISA"], added["ONEDNN_MAX_CPU_ISA"]) == ("avx2", "AVX2")
    assert "TROUPE_CPU_ISA" not in Placement("cpu").environment(arguments(), 0, {}, 300.0)
    inherited = Placement("cpu").environment(arguments(), 0, {"TROUPE_CPU_ISA": "avx2"}, 300.0)
    assert inherited["ATEN_CPU_CAPABILITY"] == "avx2"
    unlimited = Placement("cpu").environment(arguments(cpu_isa="auto"), 0, {"TROUPE_CPU_ISA": "avx2"}, 300.0)
    assert unlimited["TROUPE_CPU_ISA"] == "auto"
    assert "ONEDNN_MAX_CPU_ISA" not in unlimited


def test_more_than_the_processor_has_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cpu_isa, "processor_isa", lambda: CpuIsa.AVX2)
    with pytest.raises(ArgumentError, match="cpu_isa: this processor has no amx; use avx2 or less"):
        place(arguments(cpu_isa="amx"), {})
    with pytest.raises(ArgumentError, match="TROUPE_CPU_ISA: 'sse9' is no instruction set"):
        place(arguments(), {"TROUPE_CPU_ISA": "sse9"})
    elsewhere = arguments(cpu_isa="torch")
    assert heeded(elsewhere, place(elsewhere, {"TROUPE_NPU_SIMULATOR": "A2"})).cpu_isa is None
    assert "--device auto found: --cpu-isa. Leave" in caplog.text
    for device in ("npu", "cuda"):
        with pytest.raises(ArgumentError, match=f"cpu_isa contradicts device {device}"):
            arguments(device=device, cpu_isa="torch")
