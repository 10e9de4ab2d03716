"""Direct access to the tokenizer."""
