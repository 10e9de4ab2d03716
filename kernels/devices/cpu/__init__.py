"""The CPU: native operators in C++, and plain torch for what they do not take.

device.py             CpuDevice, of the capabilities in attention.py, cache.py, linear.py, experts.py, ...
native/               the operators' sources; library.py compiles and loads them
native_operators.py   NativeOperators: the operators of a device, once they are compiled
operators.py          Native: one method for each operator, which fills an ``Op``
recording.py          runs operators at once, or records them into a program
program.py            a recorded pass, run in one call: the counterpart of a CUDA graph
capture.py            records passes; decode_loop.py, chains.py: steps of several passes in one call
matmul.py             matrix products by the kind of weight: dense_linear.py, native_int8.py, native_blocks.py, ...
cache_8bit.py         keys and values of 8 bits
invariant.py          batch-invariant results
"""
