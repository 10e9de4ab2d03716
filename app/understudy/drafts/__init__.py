"""The drafts of the model in the box, for speculative decoding, and the scripts that made them.

Importing this package costs nothing: it names files and imports neither torch nor transformers.
"""

from pathlib import Path

__all__ = ["DRAFTS", "TOKEN_MAP", "draft_path"]

DRAFTS: Path = Path(__file__).resolve().parent
"""The directory that holds a directory for each draft."""

TOKEN_MAP: Path = DRAFTS / "token_map.json"
"""The tokens that the model in the box writes most, most frequent first: a JSON list of ids."""

_OF_ALGORITHM = {
    "EAGLE": "eagle",
    "EAGLE3": "eagle3",
    "MTP": "mtp",
    "DFLASH": "dflash",
    "STANDALONE": "standalone",
}


def draft_path(algorithm: str) -> Path | None:
    """The directory of the draft for a speculative algorithm; None for one that needs no draft, as NGRAM."""
    name = _OF_ALGORITHM.get(algorithm.upper())
    return None if name is None else DRAFTS / name
