"""Linear layers on a GPU, by number of tokens and kind of weight. cuBLAS or PyTorch takes what no kernel here does.

linear.py                   16-bit weights; autotune.py: measures which implementation is fastest for a shape
gemm_small.py               2 to 64 tokens; gemm_small_tma.py: the same with TMA loads
gemm_small_quantized.py     a few tokens with weights of 8 or 4 bits; gemv_quantized.py: one token
eight_bit.py, grouped.py    weights of 8 bits; weights of 4 or 8 bits in groups
norm_then_linear.py, qkv_projection.py, rope_cache_epilogue.py    fused with the norm before, or with rotation and cache
residual_linear.py, scaled_residual.py                       fused with the addition to the residual stream
low_rank.py                 what adapters add; low_rank_one.py, low_rank_few.py, low_rank_many.py: by number of tokens
packing.py, packed_arithmetic.py, number_conversions.py      layouts and arithmetic of small numbers
"""
