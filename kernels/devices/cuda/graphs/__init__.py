"""CUDA graphs: recorded launches, replayed by one call.

decode_graphs.py    decodes and drafts, one graph for each batch size
prompt_graphs.py    steps with chunks of prompts
step_graphs.py      whole steps of decodes, sampling included
staging.py          writes the inputs of a draft's graph    arrivals.py: results written to the host's memory
"""
