"""Layers that families are built from.

    builder.py     LayerBuilder: norms and linear layers from a checkpoint's tensors
    gqa.py         grouped-query attention     moe.py: experts     mlp.py: gated feed-forward layer
    expert_places.py   the ranks of experts, where they are not divided in their order
    pre_norm.py    Llama's decoder layer       block.py: layers with norms in other places
    rotary.py      rotary embeddings           vocabulary.py: embeddings and output head
    ngram_embedding.py embeddings of the last few tokens
    classification.py                          heads that classify or reward
    mla.py           latent attention          indexer.py: chooses the tokens of sparse attention
    query_scale.py   queries that grow with their positions, by learned numbers
    compressed_attention.py   entries of several tokens           block_attention.py   blocks that an indexer chooses
    recurrent.py     layers with states        delta_net.py, kimi_delta.py, mamba.py, lightning.py, short_convolution.py
    stream_block.py  a layer between several residual streams      hyper_connections.py, constrained_connections.py,
                     independent_connections.py: how these are mixed
    group_attention.py   blocks that an index head chooses for each group of heads
    gated_attention.py   attention whose result is gated
    sparse.py        decoders of dense and expert layers, and of layers of several kinds    routes.py: chosen experts

How a residual is added
-----------------------

A layer returns its residual stream and a summand that the stream still lacks (``PendingResidual``), so that a kernel
can add, norm and multiply in one launch:

    x, residual = layer(x, residual, ...)       the stream is residual + x; x None: it is complete
    h, residual = norm.add(x, residual)         residual += x; h = norm(residual)

``NormThenLinear`` is a norm with the linear layer that reads it, ``ResidualLinear`` a linear layer whose result is
added to the stream. A device may let the latter begin the next norm. So ``set_next_norm`` gives each layer the norm
that follows it, and ``x`` may be a ``NormInProgress``. On a device without such kernels both are plain torch.
"""
