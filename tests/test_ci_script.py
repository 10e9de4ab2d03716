"""The installations of ``.ci/run``, with programs that install nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    any(shutil.which(tool) is None for tool in ("bash", "flock")), reason="needs bash and flock"
)

PYTHON = """#!/bin/bash
mkdir -p "$3/bin"
cp "$(dirname "$0")/pip" "$3/bin/pip"
"""  # python3 -m venv FOLDER
PIP = """#!/bin/bash
case "$0" in
    */"$FAILS"/*) echo "no such package"; exit 3;;
    *) [ -z "$WAITS" ] || exec sleep 600;;
esac
"""


@pytest.mark.parametrize(("fails", "waits", "code"), [("npu", "", 1), ("cpu", "npu", 3)])
def test_one_failed_installation_ends_ci_before_its_tests(tmp_path: Path, fails: str, waits: str, code: int) -> None:
    """Also while the other one still runs; what was installed is removed."""
    script = tmp_path / "tree/.ci/run"
    programs, temporary = tmp_path / "programs", tmp_path / "temporary"
    for folder in (script.parent, programs, temporary):
        folder.mkdir(parents=True)
    shutil.copy(Path(__file__).parents[1] / ".ci/run", script)
    for name, text in {"python3": PYTHON, "pip": PIP, "gcc": "", "nm": ""}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "TMPDIR": str(temporary), "FAILS": fails, "WAITS": waits}
    ended = subprocess.run(["bash", script], env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert (ended.returncode, ended.stdout.strip()) == (code, "no such package"), ended.stderr
    assert "command not found" not in ended.stderr
    assert not list(temporary.iterdir())
