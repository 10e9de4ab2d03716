"""Placement: the device of each worker and the environment of its process."""

from __future__ import annotations

import ipaddress
import logging
import socket
import struct
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import msgspec

from actors.options import ArgumentError, Arguments
from actors.options.consistency import without_effect
from kernels.contract.cpu_isa import VARIABLE as ISA_VARIABLE
from kernels.contract.cpu_isa import IsaError, chosen_isa, isa_environment
from kernels.contract.environment import worker_environment
from kernels.contract.npu_simulator import SpecError
from kernels.contract.npu_simulator import parse as parse_simulation

__all__ = ["SIMULATOR_VARIABLE", "Placement", "heeded", "place"]

_log = logging.getLogger("troupe.engine")

SIMULATOR_VARIABLE = "TROUPE_NPU_SIMULATOR"

_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
_IPV6_INTERFACES = Path("/proc/net/if_inet6")  # of Linux: address, index, prefix, scope, flags, name
_SIOCGIFADDR = 0x8915  # of Linux: asks for the address of an interface
_VISIBLE = {"npu": "ASCEND_RT_VISIBLE_DEVICES", "cuda": "CUDA_VISIBLE_DEVICES"}
_PLURALS = {"npu": "NPUs", "cuda": "GPUs"}
_DEVICE_FILES = Path("/dev")
_PAGE_SIZES = {"cpu": 16, "npu": 128, "cuda": 64}
_CHUNK_SIZES = {"cpu": 512, "npu": 512, "cuda": 2048}
_MAX_HCCL_SECONDS = 17340.0  # the longest HCCL_EXEC_TIMEOUT that every NPU takes


class Placement(msgspec.Struct, frozen=True):
    """``device``: cpu, npu or cuda. ``simulator``: the NPUs to simulate; empty for real ones."""

    device: str
    simulator: str = ""

    @property
    def page_size(self) -> int:
        """Default of --page-size: tokens of a page of the cache."""
        return _PAGE_SIZES[self.device]

    @property
    def chunk_size(self) -> int:
        """Default of --chunked-prefill-size: tokens of a step. On an H200, chunks of 2048 have the throughput of larger
        ones at half the time to the first token."""
        return _CHUNK_SIZES[self.device]

    @property
    def label(self) -> str:
        """The device, with what is simulated; equal on all nodes of a model."""
        return f"{self.device} (simulated {self.simulator})" if self.simulator else self.device

    def environment(
        self, arguments: Arguments, rank: int, environ: Mapping[str, str], patience: float
    ) -> dict[str, str]:
        """Variables to add to the environment of worker ``rank`` of this node, counted from 0, which inherits
        ``environ``.

        The worker sees only its own device. ``patience``: seconds after which its supervisor considers it hung;
        collectives time out earlier, so that their error is reported. Raises ArgumentError if the environment hides the
        device.
        """
        added: dict[str, str] = worker_environment(environ)
        if arguments.tensor_parallel_size * arguments.pipeline_parallel_size > 1:
            # By default they listen at the address of the host's name or on its first interface.
            names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if self.device == "cuda" else ("GLOO_SOCKET_IFNAME",)
            address = arguments.dist_init_addr
            interface = _LOOPBACK if arguments.nnodes == 1 else address and _interface_to(address)
            if interface is not None:
                added |= {name: interface for name in names if name not in environ}
        if self.device == "cpu":
            limits: dict[str, str] = isa_environment({**environ, **_isa_variable(arguments)})
            return added | limits
        variable, devices = _VISIBLE[self.device], _PLURALS[self.device]
        index = arguments.base_gpu_id + rank * arguments.gpu_id_step
        visible = [part.strip() for part in environ.get(variable, "").split(",") if part.strip()]
        if visible and index >= len(visible):
            raise ArgumentError(
                f"base_gpu_id: {variable} shows {len(visible)} {devices}, and number {index}, counted from 0, "
                f"is required; see also gpu_id_step and tensor_parallel_size"
            )
        added[variable] = visible[index] if visible else str(index)
        if self.device == "cuda":
            return added
        patience = min(_MAX_HCCL_SECONDS, max(30.0, 0.8 * patience))
        defaults = {"HCCL_EXEC_TIMEOUT": str(int(patience)), "HCCL_CONNECT_TIMEOUT": "120"}
        if not self.simulator:
            defaults["PYTORCH_NPU_ALLOC_CONF"] = "expandable_segments:True"
        return added | {name: value for name, value in defaults.items() if name not in environ}


def _interface_to(address: str) -> str | None:
    """The network interface by which this host reaches host:port; None if the system does not say."""
    host, _, port = address.rpartition(":")
    try:
        family, _, _, _, place = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # sends nothing
            own = probe.getsockname()[0]
    except OSError:
        return None
    address_here = ipaddress.ip_address(own.partition("%")[0])
    if address_here.is_loopback:
        return _LOOPBACK
    if address_here.version == 6:
        return _interface_of_ipv6(address_here.packed.hex())
    return next((name for _, name in socket.if_nameindex() if _ipv4_of(name) == own), None)


def _ipv4_of(interface: str) -> str | None:
    """The first IPv4 address of an interface, on Linux."""
    if sys.platform != "linux":
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:  # it has none
            return None
    return socket.inet_ntoa(found[20:24])


def _interface_of_ipv6(address: str) -> str | None:
    """The network interface with this address, of 32 hexadecimal digits, on Linux."""
    try:
        rows = [line.split() for line in _IPV6_INTERFACES.read_text().splitlines()]
    except OSError:
        return None
    return next((row[-1] for row in rows if row[0] == address), None)


def _isa_variable(arguments: Arguments) -> dict[str, str]:
    """The environment variable that the argument sets; empty if the environment decides."""
    return {} if arguments.cpu_isa is None else {ISA_VARIABLE: arguments.cpu_isa}


def heeded(arguments: Arguments, placement: Placement) -> Arguments:
    """Remove arguments without effect on the device that ``--device auto`` found, with a warning: the same command may
    serve several machines.
    """
    ignored = without_effect(arguments, placement.device)
    if not ignored:
        return arguments
    _log.warning(
        "Without effect on device %s, which --device auto found: %s. Leave them out, or choose another --device.",
        placement.device,
        ", ".join(f"--{name.replace('_', '-')}" for name in ignored),
    )
    return msgspec.structs.replace(arguments, **ignored)


def place(arguments: Arguments, environ: Mapping[str, str]) -> Placement:
    """The device of the arguments, or the best available one. It must not import torch, so it only checks files.

    Raises ArgumentError for an invalid simulator in the environment, or if the device does not support the arguments.
    """
    result = _place(arguments, environ)
    if result.device == "cpu":
        try:
            chosen_isa({**environ, **_isa_variable(arguments)})
        except IsaError as error:
            raise ArgumentError(f"{ISA_VARIABLE if arguments.cpu_isa is None else 'cpu_isa'}: {error}") from None
    return result


def _place(arguments: Arguments, environ: Mapping[str, str]) -> Placement:
    if arguments.device in ("cpu", "cuda"):
        return Placement(arguments.device)
    simulator = arguments.npu_simulator or environ.get(SIMULATOR_VARIABLE, "").strip()
    if simulator:
        try:
            parse_simulation(simulator)
        except SpecError as error:
            raise ArgumentError(f"{SIMULATOR_VARIABLE}: {error}") from None
        return Placement("npu", simulator)
    if arguments.device == "npu" or (find_spec("torch_npu") is not None and _npu_is_there()):
        return Placement("npu")
    if find_spec("triton") is not None and _gpu_is_there():
        return Placement("cuda")
    return Placement("cpu")


def _gpu_is_there() -> bool:
    return any(_DEVICE_FILES.glob("nvidia[0-9]*"))


def _npu_is_there() -> bool:
    return any(_DEVICE_FILES.glob("davinci[0-9]*"))
