"""Weights: declarations, files and quantized forms.

tensors.py                   TensorSpec: what a family declares of each tensor
loading.py                   reads a model's weights from one of the sources below
source.py                    what a model asks of these sources
safetensors_checkpoint.py    a Hugging Face directory     gguf/: GGUF files     dummy.py: random weights
quantization/                one file for each format; weights.py there: the kinds of weights in memory
config_json.py               config.json as data; wrapped.py: the language model of one that also reads images
adapter_files.py             LoRA adapters of PEFT
"""
