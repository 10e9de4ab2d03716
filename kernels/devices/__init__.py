"""Devices: what a model runs on, as a set of capabilities.

    base.py             Device and DeviceTraits; select.py: the device that an option names
    memory.py           copies, sizes, state by slot     staged_memory.py: the same through pinned buffers
    staging.py          copies that the host does not wait for    dtypes.py: what accelerators compute in
    elementwise.py      norms, activations, sums, tables of embeddings
    linear.py           linear layers from weights of any kind
    low_rank.py         what adapters add to them
    experts.py          layers of experts
    cache.py            keys and values, page by page    group_caches.py, state_cache.py: caches of each spec
    latent_cache.py     caches of latent vectors
    attention.py        rotary embedding, cache writes, plans, attention    latent_attention.py: over latent vectors
    row_attention.py    attention in plain torch, row by row    sparse_attention.py: to tokens that an indexer chooses
    block_sparse_attention.py    attention to blocks that an indexer chooses
    delta_rule.py       layers with states: gated delta nets    state_space.py: Mamba 2    convolution.py: of LFM2
    sampling.py         own kernels for choosing tokens
    capture.py          graphs and programs (graphs.py: their buffers; prepared.py: what a device returns)
    draft_kernels.py    kernels between the passes of a draft; a device may have none
    communication.py    the library of collectives
    features.py         what a kind of device does for every model    fallbacks.py: logs what has no kernels
    device_error.py     errors while a device runs    native_cache.py: where compiled libraries are kept
    invariant/          capabilities whose results do not depend on what else a step runs
    cpu/ cuda/ npu/     one class for each capability that has kernels, composed in device.py
    npu_simulator/      a machine of simulated NPUs, for tests

The base classes are plain torch. A device overrides what it has kernels for; what it lacks is logged once.
"""
