"""Text and tokens: chat templates, tokenizers, incremental decoding, stop strings.

served_model.py   ServedModel: tokenizer, template, limits and defaults of the served model
model_files.py    a model's small files, from a directory, the hub or a GGUF file (gguf_tokenizer.py)
renderer.py       the Renderer actor; rendering.py sends to it; chat_template.py: the sandbox
tokenizer.py      the Tokenizer actor; encoding.py sends to it; text_codec.py: one tokenizer
detokenizer.py    the Detokenizer actor; incremental_text.py, stop_strings.py, stop_patterns.py: its logic
fair_pool.py      FairPool: members that tenants use in turn
"""
