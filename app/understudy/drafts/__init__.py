"""The drafts of the included model, for speculative decoding. Their trainers are in tests/understudy/drafts.

Importing this package names files and imports neither torch nor transformers.
"""

from pathlib import Path

__all__ = ["DRAFTS", "TOKEN_MAP", "draft_arguments", "draft_path"]

DRAFTS: Path = Path(__file__).resolve().parent
"""The directory that holds a directory for each draft."""

TOKEN_MAP: Path = DRAFTS / "token_map.json"
"""The tokens that the included model writes most, most frequent first: a JSON list of ids."""

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


def _chain(steps: int) -> dict[str, int | str]:
    return {
        "speculative_num_steps": steps,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": steps + 1,
    }


_MAP: dict[str, int | str] = {"speculative_token_map": str(TOKEN_MAP)}
_ARGUMENTS: dict[str, dict[str, int | str]] = {
    "EAGLE": _chain(7) | _MAP,
    "EAGLE3": _chain(7),
    "MTP": _chain(7) | _MAP,
    "DFLASH": {"speculative_num_draft_tokens": 8},
    "STANDALONE": _chain(5),
}


def draft_arguments(algorithm: str) -> dict[str, int | str]:
    """The arguments that suit the draft in the box, by their fields: its path, how much to draft, and a token map.

    Deep chains pay here: the drafts are right often, a step of them is cheap, and up to 16 tokens cost the model hardly
    more than one. Longer chains than these gain at batch 1 and lose at 16. Empty where no draft is needed.
    """
    path = draft_path(algorithm)
    if path is None:
        return {}
    return {"speculative_draft_model_path": str(path)} | _ARGUMENTS[algorithm.upper()]
