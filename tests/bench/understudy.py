"""`python -m tests.bench understudy`: the scores of the model in the box on the test set its training never saw."""

from app.understudy.evaluate import main

__all__ = ["main"]
