"""Model families: a file each, behind a registry.

registry.py        which family an architecture is, and what is known of it without torch
llama.py, ...      one file a family: ``config``, ``tensors``, ``caches``, ``build``
layers/            what families are built from
decoder.py         Decoder: embeddings, layers, head; encoder.py: Encoder
config.py          ModelConfig and the reader of config.json; config_loader.py: from a path
gguf_description.py, pooling.py   GGUF metadata as config.json; pooling of models that generate no text
native_model.py    the model as one native call on the CPU
"""
