"""NVIDIA GPUs: Triton kernels, CUDA graphs, and cuBLAS for large matrix products.

device.py        CudaDevice, of the capabilities in this folder; features.py: facts of every GPU
attention/       attention over the paged cache          elementwise/: norms, activations, rotation, sampling
matmul/          linear layers by size and kind of weight    moe/: layers of experts
linear.py        what takes a product: matmul/ or cuBLAS    cache.py: keys and values, latent vectors
delta_rule.py, state_space.py, convolution.py    layers with states
graphs/          captured decodes, prompts and whole steps; capture.py builds them
drafting/        kernels between the passes of a draft model
launch.py        launches that overlap the previous kernel, and facts of a GPU that kernels ask for
precompile.py    compiles kernels in parallel at load
invariant.py     batch-invariant results (invariant_kernels.py)    errors.py: CUDA's errors for users
"""
