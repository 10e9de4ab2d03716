"""The sources of the native operators, and their build.

    program.cpp, program.h   the exported functions; Op, Step and the meaning of each operator's fields
    vectors*.h, tiles.h      16 numbers at a time, for each instruction set; AMX tiles or their replacement
    gemm*.h                  matrix products, one file for each kind of weight
    attention.h, prefill.h   attention of decodes and draft tokens, and of prompts; softmax.h, split_kv.h: their parts
    kv_cache_8bit.h          quantized caches       experts.h: layers of experts
    sampling.h               argmax and sampling    decode_loop.h, draft_*.h, short_prefill.h: steps of several passes
    thread_team.h            the threads
    library.py               compiles, loads and declares all that for ctypes

To add an operator:

1. ``program.h``: a value of ``Kind`` and the meaning of its fields in the table there.
2. A header with the operator, and its ``case`` in ``run`` of ``program.cpp``.
3. ``kernels/devices/cpu/operators.py``: the number of the kind and a method of ``Native`` that fills an ``Op``.
4. The capability that uses it (``attention.py``, ``elementwise.py``, ...), with plain torch for what it does not take.
5. A test ``test_proof_*.py`` in ``tests/kernels/devices/cpu`` against float64.

A new field of ``Op`` or ``Step`` stands in ``library.py`` too, at the same place.
"""
