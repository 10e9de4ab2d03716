"""The understudy: the small trained model that comes in Troupe's box, and the scripts that made it.

Importing this package costs nothing: it names the directory of the model and imports neither torch nor transformers.
"""

from pathlib import Path

__all__ = ["MODEL_DIR"]

MODEL_DIR: Path = Path(__file__).resolve().parent / "model"
"""A Hugging Face model directory: config, weights, tokenizer, chat template, generation defaults."""
