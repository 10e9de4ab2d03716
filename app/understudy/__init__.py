"""The included model, a small trained one of the name understudy. Its corpus and trainers are in tests/understudy.

Importing this package names the model's directory and imports neither torch nor transformers.
"""

from pathlib import Path

__all__ = ["MODEL_DIR", "TEMPLATE"]

MODEL_DIR: Path = Path(__file__).resolve().parent / "model"
"""A Hugging Face model directory: config, weights, tokenizer, chat template, generation defaults."""

TEMPLATE: Path = Path(__file__).resolve().parent / "chat_template.jinja"
"""The source of the chat template in the model's tokenizer_config.json."""
