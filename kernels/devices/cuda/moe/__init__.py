"""Layers of experts on a GPU.

experts.py        the router's choice, and two grouped matrix products, which a CUDA graph can capture
gemv_mxfp4.py     the products of single tokens in MXFP4    routing.py: choice and order of experts, and their sum
"""
