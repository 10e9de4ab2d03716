"""Layers of experts on a GPU.

experts.py    the router's choice, and two grouped matrix products, which a CUDA graph can capture
"""
