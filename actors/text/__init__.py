"""Text and tokens: chat templates, tokenizers, incremental decoding, stop strings.

served_model.py   ServedModel: tokenizer, template, limits and defaults of the served model
model_files.py    a model's small files, from a directory, the hub or a GGUF file (gguf_tokenizer.py)
fingerprint.py    what nodes compare of their model's files
renderer.py       the Renderer actor; rendering.py sends to it; chat_template.py: the sandbox
tokenizer.py      the Tokenizer actor; encoding.py sends to it; text_codec.py: one tokenizer
tokenizer_conversion.py, tokenizer_growth.py    a tokenizer from transformers; how far it may lengthen a text
detokenizer.py    the Detokenizer actor; incremental_text.py, stop_strings.py, stop_patterns.py: its logic
token_pieces.py   the bytes that each token adds to a text
fair_pool.py      FairPool: members that tenants use in turn
"""
