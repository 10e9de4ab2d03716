"""GGUF files: their header, and their tensors under Hugging Face names.

header.py        metadata and tensor infos    checkpoint.py: the file as a source of weights
blocks.py        layouts of quantized blocks  joined.py: splits fused tensors
"""
