"""Grafana boards, Prometheus rules, and a compose file with Prometheus, Grafana, Jaeger and a collector.

:mod:`telemetry.dashboards.boards` describes the boards, and ``grafana/boards`` has them as JSON; the other files are
written by hand. No server imports this package.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from telemetry.dashboards.board import Board
from telemetry.dashboards.boards import BOARDS

__all__ = ["BOARDS", "FOLDER", "board_file", "copy_files", "render", "stale_boards", "write_boards"]

FOLDER = Path(__file__).parent
_FILES = ("compose.yaml", "collector.yaml", "prometheus", "grafana")


def render(board: Board) -> str:
    """The board as JSON text, as it is stored."""
    return json.dumps(board.json(), indent=2, ensure_ascii=False) + "\n"


def board_file(board: Board, folder: Path = FOLDER) -> Path:
    return folder / "grafana" / "boards" / f"{board.uid.removeprefix('troupe-')}.json"


def stale_boards(folder: Path = FOLDER) -> list[Path]:
    """The JSON files that differ from their descriptions, and those without one."""
    wanted = {board_file(board, folder): render(board) for board in BOARDS}
    kept = set((folder / "grafana" / "boards").glob("*.json"))
    wrong = {path for path, text in wanted.items() if path not in kept or path.read_text(encoding="utf-8") != text}
    return sorted(wrong | (kept - wanted.keys()))


def write_boards(folder: Path = FOLDER) -> None:
    """Write the JSON files of all boards."""
    for path in (folder / "grafana" / "boards").glob("*.json"):
        path.unlink()
    for board in BOARDS:
        board_file(board, folder).write_text(render(board), encoding="utf-8")


def copy_files(target: Path) -> list[Path]:
    """Copy boards, rules and the compose file into the folder ``target``; return the written paths.

    Raises FileExistsError if a file exists already: it may have been changed.
    """
    sources = [path for name in _FILES for path in sorted((FOLDER / name).rglob("*")) or [FOLDER / name]]
    pairs = [(path, target / path.relative_to(FOLDER)) for path in sources if path.is_file()]
    for _, copy in pairs:
        if copy.exists():
            raise FileExistsError(f"{copy} exists already; name a new folder, or remove it first")
    for path, copy in pairs:
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    return [copy for _, copy in pairs]
