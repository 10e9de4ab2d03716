"""Quantized weights: one file for each format, and the kinds of weights in memory that all formats become.

scheme.py       Scheme, the contract of a format; detect.py: which scheme a checkpoint has
weights.py      QuantizedWeight: Int8Weight, GroupedWeight, Fp8Weight; gguf_weight.py: GgufWeight
gptq.py, awq.py, auto_round.py, compressed.py, fp8.py, mxfp4.py, modelslim.py, gguf_files.py    the formats
bitsandbytes.py, modelopt.py, quark.py    more of them
compressed_settings.py, compressed_layouts.py    modules of compressed-tensors
online.py       quantizes float weights at load
four_bits.py, microscaling.py, packed.py, tokens.py, int8.py    their arithmetic and packing in plain torch
cache.py        quantized keys and values    patterns.py: a checkpoint's regular expressions, bounded
"""
