"""Score the included model on the test set that its training never saw.

python -m tests.bench understudy                               # plain transformers, greedy, some minutes
python -m tests.bench understudy --url http://127.0.0.1:8000   # a running server
"""

from __future__ import annotations

from tests.bench._options import command_line
from tests.bench._record import record
from tests.understudy.evaluate import add_arguments, evaluate

__all__ = ["main"]


def main(argv: list[str]) -> int:
    """0 when at least 95 % of the held-out capital questions are right, else 1."""
    parser = command_line(__name__, __doc__, records=True)
    add_arguments(parser)
    table = evaluate(parser.parse_args(argv))
    for subject, (right, total) in table.items():
        record(subject, "right", 100 * right / total, "%")
    right, total = table["held-out capital questions"]
    return 0 if right >= 0.95 * total else 1
