"""What all layers of the kernels share: inputs of a pass, signatures of operators, draft trees, noise.

batch.py             ForwardBatch: the input of one forward pass, on the device
attention_rows.py    AttentionRows: the same rows as host arrays, from which a device makes its attention plan
operators.py         signatures of what devices implement: Linear, Norm, Draw, Acceptance, ...
layer_context.py     LayerContext: rank and adapters of the rows, for linear layers
tree.py              DraftTree and its bit masks
noise.py             sampling noise by (seed, position, token id)    logit_blocks.py: top tokens by maxima of blocks
arrays.py            views of packed messages
"""
