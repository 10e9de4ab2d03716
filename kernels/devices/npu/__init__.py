"""Ascend NPUs (A2, A3, A5) by torch_npu's fused operators.

device.py              NpuDevice, of the capabilities in this folder; soc.py: the generation and what it has
operators.py           norms, rotation, activation, linear layers    norm_quant.py: norms that quantize
attention.py           splits the rows of a step; backends.py: which kernels take which rows
    fused_attention.py     npu_fused_infer_attention_score; tree_attention.py: draft trees
    native_attention.py    plain torch for the rest
latent_attention.py    latent vectors; latent_prologue.py: from tokens to them in one operator
linear.py              linear layers; quantized.py, weight_only.py, microscaling.py: quantized weights
    low_rank.py            what adapters add to them
experts.py             layers of experts    cache.py, int8_cache.py: keys and values
expert_exchange.py     limits of the operators that send tokens to experts    features.py: what every NPU does
capture.py, graphs.py  NPU graphs           invariant.py: batch-invariant results    errors.py: CANN's errors for users
captured.py            graphs by the number of rows; step_graphs.py: whole steps    drawing.py: sampling in graphs
../npu_triton          kernels of our own
"""
