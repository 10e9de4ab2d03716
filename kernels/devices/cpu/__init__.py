"""The CPU: native operators in C++, and plain torch for what they do not take.

device.py             CpuDevice, of the capabilities in attention.py, cache.py, linear.py, experts.py, ...
native/               the operators' sources; library.py compiles and loads them
native_operators.py   NativeOperators: the operators of a device, once they are compiled
operators.py          Native: one method for each operator, which fills an ``Op``
recording.py          runs operators at once, or records them into a program
program.py            a recorded pass, run in one call: the counterpart of a CUDA graph
capture.py            records passes; decode_loop.py, chains.py: steps of several passes in one call
matmul.py             matrix products by the kind of weight: dense_linear.py, native_int8.py, native_blocks.py, ...
quantized.py          quantized linear layers: native_fp8.py, native_grouped.py; native_experts.py: layers of experts
low_rank.py           what adapters add to a linear layer
elementwise.py        activations, sums, tables    norm.py: norms
paged_attention.py    attention in plain torch; kept_pages.py: pages of a narrow cache as floats, each once
memory.py             the host's memory: host.py: how much the process may use; large_pages.py: large pages
cache_8bit.py         keys and values of 8 bits
invariant.py          batch-invariant results
"""
