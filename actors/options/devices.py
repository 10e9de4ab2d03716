"""The arguments of devices, kernels and graphs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from actors.options.declaration import ArgumentSpec
from actors.options.recovery import RecoveryArguments

__all__ = ["DeviceArguments"]

_DEVICE = "this device is not built yet; use npu, cuda or cpu"
_ATTENTION = ("ascend", "torch_native")
_ATTENTION_HELP = (
    "ascend is the fused operator of the NPU, for 16-bit types; torch_native is plain torch, slow, for float32 and for "
    "comparison."
)
_OTHER_ATTENTION = {"*": "attention kernels can be chosen on NPUs only (ascend or torch_native); leave it out"}


class DeviceArguments(RecoveryArguments, frozen=True, kw_only=True):
    """The arguments of devices, kernels and graphs."""

    device: Annotated[
        Literal["auto", "cpu", "npu", "cuda"],
        ArgumentSpec(
            group="Devices and kernels",
            unbuilt_choices={"gpu": "use cuda or npu", "xpu": _DEVICE, "hpu": _DEVICE},
            help="The device that runs the model. auto selects an Ascend NPU if torch_npu is installed and an NPU is "
            "present or simulated, else an NVIDIA GPU if triton is installed and a GPU is present, else the CPU.",
        ),
    ] = "auto"

    cpu_isa: Annotated[
        Literal["auto", "amx", "avx512", "avx2", "neon", "torch"] | None,
        ArgumentSpec(
            group="Devices and kernels",
            default_text="the environment variable TROUPE_CPU_ISA, else auto",
            help="The most capable instruction set that CPU operators may use, including those of oneDNN and ATen: "
            "auto is everything the processor supports; avx512 excludes AMX, avx2 also AVX-512; neon is what aarch64 "
            "has; torch uses PyTorch's operators only, with everything the processor supports. Sets that the processor "
            "lacks are refused.",
        ),
    ] = None

    base_gpu_id: Annotated[
        int,
        ArgumentSpec(
            group="Devices and kernels",
            minimum=0,
            maximum=1023,
            metavar="N",
            help="The first device to use, among those in ASCEND_RT_VISIBLE_DEVICES or CUDA_VISIBLE_DEVICES if set.",
        ),
    ] = 0

    gpu_id_step: Annotated[
        int,
        ArgumentSpec(
            group="Devices and kernels",
            minimum=1,
            maximum=1024,
            metavar="N",
            help="Distance between the devices of consecutive workers.",
        ),
    ] = 1

    npu_simulator: Annotated[
        str | None,
        ArgumentSpec(
            group="Devices and kernels",
            default_text="the environment variable TROUPE_NPU_SIMULATOR, else off",
            metavar="A2|A3|A5[:DEVICES[:MEMORY]]",
            help="Simulate NPUs: the real torch_npu (pip install -e '.[npu-sim]') on a simulated CANN, on the "
            "CPU, for development. Two devices of 4 GiB unless specified, as in A3:4:8GiB.",
        ),
    ] = None

    attention_backend: Annotated[
        Literal["ascend", "torch_native"] | None,
        ArgumentSpec(
            group="Devices and kernels",
            default_text="chosen by the device",
            unbuilt_choices=_OTHER_ATTENTION,
            help=f"The attention kernels on an NPU. {_ATTENTION_HELP}",
        ),
    ] = None

    prefill_attention_backend: Annotated[
        Literal["ascend", "torch_native"] | None,
        ArgumentSpec(
            group="Devices and kernels",
            default_text="--attention-backend",
            unbuilt_choices=_OTHER_ATTENTION,
            help="The same, for prefills only.",
        ),
    ] = None

    decode_attention_backend: Annotated[
        Literal["ascend", "torch_native"] | None,
        ArgumentSpec(
            group="Devices and kernels",
            default_text="--attention-backend",
            unbuilt_choices=_OTHER_ATTENTION,
            help="The same, for decodes only.",
        ),
    ] = None

    sampling_backend: Annotated[
        Literal["pytorch", "ascend"] | None,
        ArgumentSpec(
            group="Devices and kernels",
            default_text="chosen by the device",
            unbuilt_choices={"flashinfer": "sampling kernels are not chosen by name; leave it out"},
            help="Top-k and top-p by torch operators, or by the kernel of Atlas A2 and A3.",
        ),
    ] = None

    disable_cuda_graph: Annotated[
        bool,
        ArgumentSpec(
            group="Devices and kernels",
            aliases=("enforce-eager",),
            help="Run decodes eagerly, on devices that could replay captured graphs.",
        ),
    ] = False

    compilation_config: Annotated[
        dict[str, Any],
        ArgumentSpec(
            group="Devices and kernels",
            aliases=("cc",),
            metavar="JSON",
            help="Arguments of graphs as vLLM's JSON object: cudagraph_capture_sizes (--cuda-graph-bs), "
            "max_cudagraph_capture_size (--cuda-graph-max-bs) and cudagraph_mode: NONE (--disable-cuda-graph), "
            "FULL_DECODE_ONLY (--disable-piecewise-cuda-graph), FULL or FULL_AND_PIECEWISE (both on).",
        ),
    ] = msgspec.field(default_factory=dict)

    additional_config: Annotated[
        dict[str, Any],
        ArgumentSpec(
            group="Devices and kernels",
            metavar="JSON",
            help="vLLM-Ascend's JSON object. Members that are arguments: eplb_config.dynamic_eplb (--enable-eplb), "
            "eplb_config.num_redundant_experts (--ep-num-redundant-experts), "
            "eplb_config.expert_heat_collection_interval (--eplb-rebalance-num-iterations), enable_dsa_cp "
            "(--enable-nsa-prefill-context-parallel), multistream_overlap_shared_expert "
            "(--enable-single-batch-overlap). Others are accepted with the value that always holds, such as "
            "weight_nz_mode 2, and refused with another.",
        ),
    ] = msgspec.field(default_factory=dict)

    cuda_graph_bs: Annotated[
        tuple[int, ...] | None,
        ArgumentSpec(
            group="Devices and kernels",
            aliases=("cudagraph-capture-sizes", "cuda-graph-sizes"),
            default_text="1, 2, 4 and multiples of 8",
            minimum=1,
            maximum=4096,
            metavar="N...",
            help="Batch sizes of decodes to capture graphs for.",
        ),
    ] = None

    cuda_graph_max_bs: Annotated[
        int | None,
        ArgumentSpec(
            group="Devices and kernels",
            aliases=("max-cudagraph-capture-size",),
            default_text="by the memory: on NPUs 16 or, above 32 GiB, 64; on GPUs 32, above 24 GiB 160, above 60 GiB "
            "512",
            minimum=1,
            maximum=4096,
            metavar="N",
            help="The largest batch size of decodes to capture a graph for.",
        ),
    ] = None

    disable_cuda_graph_padding: Annotated[
        bool,
        ArgumentSpec(
            group="Devices and kernels",
            help="Do not pad batches: use a graph only for exactly its batch size; other batches run eagerly.",
        ),
    ] = False

    piecewise_cuda_graph_tokens: Annotated[
        tuple[int, ...] | None,
        ArgumentSpec(
            group="Devices and kernels",
            aliases=("prefill-graph-capture-sizes",),
            default_text="powers of two, plus the decodes beside them",
            minimum=1,
            maximum=65536,
            metavar="N...",
            help="Sizes in tokens, decodes included, of steps with prompts to capture whole graphs for. On one GPU, "
            "without speculation.",
        ),
    ] = None

    piecewise_cuda_graph_max_tokens: Annotated[
        int | None,
        ArgumentSpec(
            group="Devices and kernels",
            aliases=("prefill-graph-max-tokens",),
            default_text="2048, or the limit of a step",
            minimum=1,
            maximum=65536,
            metavar="N",
            help="The most tokens of a step with prompts to capture a graph for. On one GPU, without speculation.",
        ),
    ] = None

    enable_piecewise_cuda_graph: Annotated[
        bool,
        ArgumentSpec(
            group="Devices and kernels",
            aliases=("enforce-piecewise-cuda-graph",),
            help="Capture steps with prompts of all sizes, not only those whose launch takes as long as their run. "
            "On one GPU, without speculation.",
        ),
    ] = False

    disable_piecewise_cuda_graph: Annotated[
        bool,
        ArgumentSpec(
            group="Devices and kernels",
            help="Run steps with prompts without a graph.",
        ),
    ] = False

    enable_deterministic_inference: Annotated[
        bool,
        ArgumentSpec(
            group="Devices and kernels",
            help="Make outputs bitwise reproducible on one device of any kind: independent of the batch, of the "
            "chunks of prompts, of draft tokens and of restarts. Slower, but on a CPU where native operators serve the "
            "model; weights without native operators are dequantized.",
        ),
    ] = False
