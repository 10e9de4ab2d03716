"""The arguments of devices, kernels and graphs."""

from __future__ import annotations

from actors.arguments.argument import Argument

__all__ = ["DEVICE_ARGUMENTS"]

_DEVICE = "this device is not built yet; use npu, cuda or cpu"
_ATTENTION = ("ascend", "torch_native")
_ATTENTION_HELP = (
    "ascend is the fused operator of the NPU, for 16-bit types; torch_native is plain torch, slow, for float32 and for "
    "comparison."
)
_OTHER_ATTENTION = dict.fromkeys(
    ("triton", "flashinfer", "fa3", "fa4", "flashmla", "cutlass_mla", "trtllm_mla", "trtllm_mha", "aiter", "wave"),
    "kernels of attention are chosen between on NPUs only, by ascend and torch_native; a GPU has its own; leave it out",
)

DEVICE_ARGUMENTS: tuple[Argument, ...] = (
    Argument(
        name="device",
        kind="str",
        default="auto",
        choices=("auto", "cpu", "npu", "cuda"),
        unbuilt_choices={"gpu": "say cuda or npu", "xpu": _DEVICE, "hpu": _DEVICE},
        group="Devices and kernels",
        help="What runs the model. auto takes an Ascend NPU when torch_npu is installed and one is there, or is "
        "simulated, else an NVIDIA GPU when triton is installed and one is there, else the CPU.",
    ),
    Argument(
        name="cpu-isa",
        kind="str",
        default=None,
        default_text="what the environment variable TROUPE_CPU_ISA says, else auto",
        choices=("auto", "amx", "avx512", "avx2", "torch"),
        group="Devices and kernels",
        help="The instruction set that the CPU's operators may use, oneDNN's and ATen's among them: auto is all that "
        "the processor has; avx512 leaves AMX unused, avx2 AVX-512 as well; torch runs PyTorch's operators alone, with "
        "all that the processor has. More than the processor has is refused.",
    ),
    Argument(
        name="base-gpu-id",
        kind="int",
        default=0,
        minimum=0,
        maximum=1023,
        group="Devices and kernels",
        metavar="N",
        help="The first device to use, of those that ASCEND_RT_VISIBLE_DEVICES or CUDA_VISIBLE_DEVICES shows when it "
        "is set.",
    ),
    Argument(
        name="gpu-id-step",
        kind="int",
        default=1,
        minimum=1,
        maximum=1024,
        group="Devices and kernels",
        metavar="N",
        help="From one worker's device to the next one's.",
    ),
    Argument(
        name="npu-simulator",
        kind="str",
        default=None,
        default_text="what the environment variable TROUPE_NPU_SIMULATOR says, else off",
        group="Devices and kernels",
        metavar="A2|A3|A5[:DEVICES[:MEMORY]]",
        help="Simulate NPUs: the real torch_npu (pip install troupe-llm[npu-sim]) over a simulated CANN, on the CPU, "
        "for development. Two devices of 4 GiB unless it says more, as in A3:4:8GiB.",
    ),
    Argument(
        name="attention-backend",
        kind="str",
        default=None,
        default_text="chosen by the device",
        choices=_ATTENTION,
        unbuilt_choices=_OTHER_ATTENTION,
        group="Devices and kernels",
        help=f"The kernels of attention on an NPU. {_ATTENTION_HELP}",
    ),
    Argument(
        name="prefill-attention-backend",
        kind="str",
        default=None,
        default_text="--attention-backend",
        choices=_ATTENTION,
        unbuilt_choices=_OTHER_ATTENTION,
        group="Devices and kernels",
        help="The same, for prefills only.",
    ),
    Argument(
        name="decode-attention-backend",
        kind="str",
        default=None,
        default_text="--attention-backend",
        choices=_ATTENTION,
        unbuilt_choices=_OTHER_ATTENTION,
        group="Devices and kernels",
        help="The same, for decodes only.",
    ),
    Argument(
        name="sampling-backend",
        kind="str",
        default=None,
        default_text="chosen by the device",
        choices=("pytorch", "ascend"),
        unbuilt_choices={"flashinfer": "a GPU has kernels of its own for it; leave it out"},
        group="Devices and kernels",
        help="Top-k and top-p in torch operators, or by the kernel that Atlas A2 and A3 have for them.",
    ),
    Argument(
        name="disable-cuda-graph",
        aliases=("enforce-eager",),
        kind="flag",
        default=False,
        group="Devices and kernels",
        help="Run decodes operator by operator, where the device could replay captured graphs of them.",
    ),
    Argument(
        name="cuda-graph-bs",
        aliases=("cudagraph-capture-sizes", "cuda-graph-sizes"),
        kind="ints",
        default=None,
        default_text="1, 2, 4 and multiples of 8",
        minimum=1,
        maximum=4096,
        group="Devices and kernels",
        metavar="N...",
        help="The batch sizes of the decode that graphs are captured for.",
    ),
    Argument(
        name="cuda-graph-max-bs",
        aliases=("max-cudagraph-capture-size",),
        kind="int",
        default=None,
        default_text="by the memory: on NPUs 16 or, above 32 GiB, 64; on GPUs 32, above 24 GiB 160, above 60 GiB 512",
        minimum=1,
        maximum=4096,
        group="Devices and kernels",
        metavar="N",
        help="The largest batch size of the decode that a graph is captured for.",
    ),
    Argument(
        name="disable-cuda-graph-padding",
        kind="flag",
        default=False,
        group="Devices and kernels",
        help="Use a graph only for exactly its batch size; others run without one, as all steps with prompts do.",
    ),
    Argument(
        name="piecewise-cuda-graph-tokens",
        kind="ints",
        default=None,
        default_text="powers of two, and the decodes beside them",
        minimum=1,
        maximum=65536,
        group="Devices and kernels",
        metavar="N...",
        help="The tokens of a step with prompts, its decodes among them, that whole graphs are captured for where one "
        "GPU runs the model and nothing is guessed.",
    ),
    Argument(
        name="piecewise-cuda-graph-max-tokens",
        kind="int",
        default=None,
        default_text="2048, or what a step may have",
        minimum=1,
        maximum=65536,
        group="Devices and kernels",
        metavar="N",
        help="The most tokens of a step with prompts that a graph is captured for, where one GPU runs the model and "
        "nothing is guessed.",
    ),
    Argument(
        name="enable-piecewise-cuda-graph",
        aliases=("enforce-piecewise-cuda-graph",),
        kind="flag",
        default=False,
        group="Devices and kernels",
        help="Capture steps with prompts of all sizes, where one GPU runs the model and nothing is guessed: not only "
        "where launching one takes as long as running it.",
    ),
    Argument(
        name="disable-piecewise-cuda-graph",
        kind="flag",
        default=False,
        group="Devices and kernels",
        help="Run steps with prompts without a graph.",
    ),
    Argument(
        name="enable-deterministic-inference",
        kind="flag",
        default=False,
        group="Devices and kernels",
        help="On one device of any kind: an answer is the same, bit by bit, whatever runs beside it, however prompts "
        "are cut, with draft tokens and after a restart. Slower; quantized weights are dequantized.",
    ),
)
