"""Attention over the paged cache on a GPU.

attention.py    CudaAttention, the capability; plan.py: which kernel takes which rows of a step
decode.py       one token a row; decode_persistent.py: many rows on compute capability 9.0
verify.py       draft tokens of a row; verify_sm90.py: few rows on compute capability 9.0
prefill.py      chunks of prompts; prefill_warp_specialized.py: the same on compute capability 9.0
latent.py       all three over latent vectors (MLA); latent_prompts.py: keys and values made of them first
cache_8bit.py   quantized caches    moving.py: moves keys and values of accepted draft tokens
"""
