"""Parsers of model output: formats of tool calls and reasoning.

registry.py    all formats by name, and which one a model has
base.py        StreamingParser: thought, content and calls of one choice; every format extends it
text_reader.py TextReader: the methods by which it reads the text as it arrives, JSON included
tools/         one file for each format of tool calls; constraints.py, lark.py: grammars that force calls
reasoning/     formats of reasoning    harmony.py: gpt-oss, which has both in one format
events.py      what a parser returns: Text, Reasoning, CallBegun, CallArguments
"""
