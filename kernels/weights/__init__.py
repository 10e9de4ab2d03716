"""Weights: declarations, files and quantized forms.

tensors.py                   TensorSpec: what a family declares of each tensor
loading.py                   reads a model's weights from one of the sources below
safetensors_checkpoint.py    a Hugging Face directory     gguf/: GGUF files     dummy.py: random weights
quantization/                one file for each format; weights.py there: the kinds of weights in memory
"""
