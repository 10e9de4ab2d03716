"""Sampling on the device.

sampler.py     from logits to one token a row, with log-probabilities
edits.py       changes of single logits      penalties.py: repetition, frequency and presence
masks.py       tokens that a grammar allows  nucleus.py: top-k and top-p
"""
