"""Operators on each token by itself, on a GPU.

elementwise.py    CudaElementwise, the capability
norms.py          RMS norm, alone or with the preceding addition    activation.py: silu(gate) * up
angles.py         cosines and sines of positions    heads.py: norms, rotates and caches the heads of new tokens
rows.py           adds, copies and looks up rows    sampling.py: argmax and masks over logits
"""
