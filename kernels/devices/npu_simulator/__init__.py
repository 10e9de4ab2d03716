"""Simulated NPUs under the real torch_npu, for tests. Device memory is host memory; fused operators run on the CPU.

activate.py       simulates NPUs in this process; build.py: compiles the simulated CANN (runtime.c, memory.c, streams.c)
cann.py           calls of the simulated CANN
takeover.py       replaces torch_npu's operators: a reference from operators/, or a refusal
checking.py       checks each call: the vendor's rules (constraints.py), then shapes and dtypes
dispatch.py       runs an operator; aten.py: torch's own operators
fused_attention.py    layouts of fused attention    communicators.py: groups of ranks by name
ordering.py       reports a missing wait    memory.py, formats.py: memory and its storage formats
graphs.py         capture; recording.py: what a graph keeps; replay.py: runs it again
collectives.py    hccl by gloo              faults.py: injected failures    randomness.py: random numbers
"""
