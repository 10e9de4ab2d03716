"""Operators on each token by itself, on a GPU.

elementwise.py    CudaElementwise, the capability
norms.py          RMS norm, alone or with the preceding addition    activation.py: silu(gate) * up
angles.py         cosines and sines of positions    norm_rope_cache.py, latent_heads.py: norms, rotates and caches heads
rows.py           adds, copies and looks up rows    sampling.py: argmax and masks over logits
"""
