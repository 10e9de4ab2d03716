"""Model families: a file each, behind a registry.

registry.py        which family an architecture is, and what is known of it without torch
llama.py, ...      one file a family: ``config``, ``tensors``, ``caches``, ``build``
layers/            what families are built from
decoder.py         Decoder: embeddings, layers, head; encoder.py: Encoder
config.py          ModelConfig and the reader of config.json; config_loader.py: from a path
gguf_description.py   GGUF metadata as config.json: gguf_metadata.py reads it, gguf_families.py has what a family needs
pooling.py         pooling of models that generate no text; bidirectional.py: decoders that attend in both directions
stages.py          the part of a stage of a pipeline    adapters.py: LoRA adapters that are loaded and unloaded
native_model.py    the model as one native call on the CPU
representative_layers.py   one layer of each kind, to compile and capture what all launch
"""
