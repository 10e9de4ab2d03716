"""Kernels between the passes of a draft model on a GPU.

draft_kernels.py    the capability (``kernels.devices.draft_kernels``)
candidates.py       the best tokens of each row of logits
levels.py           chooses each level of a tree; tree_builder.py: grows the tree level by level
acceptance.py       finds the accepted path and prepares the rows of the next draft
"""
