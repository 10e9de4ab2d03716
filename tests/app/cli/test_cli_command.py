"""The command's words: help, version, wrong arguments, and what reaches the server."""

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import app.cli.command
from actors.options import ARGUMENTS, Arguments
from actors.options.refused import REFUSALS
from app.cli.command import main
from app.cli.help import serve_help

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Arguments]:
    """The arguments with which a server would have run."""
    runs: list[Arguments] = []

    def run(arguments: Arguments) -> int:
        runs.append(arguments)
        return 0

    monkeypatch.setattr(app.cli.command, "_run", run)
    monkeypatch.delenv("TROUPE_ARGS", raising=False)
    return runs


@pytest.mark.parametrize("words", [[], ["help"], ["--help"], ["-h"]])
def test_the_overview(words: list[str], capsys: Capture) -> None:
    assert main(words) == 0
    assert "troupe serve MODEL" in capsys.readouterr().out


def test_the_version(capsys: Capture) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("troupe ")


def test_dashboards_are_put_into_a_folder_once(tmp_path: Path, capsys: Capture) -> None:
    assert main(["dashboards", str(tmp_path / "boards")]) == 0
    compose = tmp_path / "boards" / "compose.yaml"
    assert compose.exists()
    assert str(compose) in capsys.readouterr().out.splitlines()
    assert main(["dashboards", str(tmp_path / "boards")]) == 2
    assert "exists already" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["--help"], ["a", "b"]])
def test_dashboards_requires_one_folder(words: list[str], capsys: Capture) -> None:
    assert main(["dashboards", *words]) == 2
    assert "troupe dashboards telemetry" in capsys.readouterr().err


def test_serve_help_lists_every_argument_with_its_default(capsys: Capture) -> None:
    assert main(["serve", "m", "--help"]) == 0
    text = capsys.readouterr().out
    for argument in ARGUMENTS:
        assert re.search(rf"^  --{argument.name}\b", text, re.MULTILINE), argument.name
        assert f"\n{argument.group}:\n" in text
        for alias in (*argument.aliases, *argument.opposites):
            assert f"--{alias}" in text
    assert len(re.findall(r"Default:\s+[^\s.]", text)) == len(ARGUMENTS)
    assert "--no-enable-metrics" in text  # it is on: how to turn it off
    assert "--enable-lora-bias" not in text


def test_help_all_adds_the_refused_ones_with_the_reason(capsys: Capture) -> None:
    assert main(["serve", "--help-all"]) == 0
    text = " ".join(capsys.readouterr().out.split()).lower()
    for refusal in REFUSALS:
        assert f"-{refusal.name}" in text, refusal.name
        assert refusal.reason.lower() in text, refusal.name


@pytest.mark.parametrize("width", [60, 80, 200])
def test_help_fits_the_terminal(width: int) -> None:
    lines = [line for line in serve_help(refused=True, width=width).splitlines() if line.startswith("      ")]
    longest_word = max(len(word) for line in lines for word in line.split())
    assert max(map(len, lines)) <= max(min(width, 120), longest_word + 6)


def test_words_reach_the_server(served: list[Arguments], tmp_path: Path) -> None:
    assert main(["serve", "m", "--port", "1"]) == 0
    assert main(["--port", "2"]) == 0
    assert main([str(tmp_path), "--port", "3"]) == 0
    assert [(run.model_path, run.port) for run in served] == [("m", 1), (served[1].model_path, 2), (str(tmp_path), 3)]


def test_the_environment_reaches_the_server(served: list[Arguments], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TROUPE_ARGS", "--port 4")
    assert main(["serve"]) == 0
    assert served[0].port == 4


def test_wrong_arguments_end_with_status_2(served: list[Arguments], capsys: Capture) -> None:
    assert main(["serve", "--enable-lora-bias", "--prot", "1"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "troupe: --enable-lora-bias: adapters have no biases" in captured.err
    assert "troupe: --prot: there is no such argument; did you mean --port?" in captured.err
    assert "troupe serve --help" in captured.err
    assert not served


def test_an_unknown_command(capsys: Capture) -> None:
    assert main(["server"]) == 2
    assert "Did you mean: troupe serve?" in capsys.readouterr().err
    assert main(["Qwen/Qwen3-0.6B"]) == 2
    assert "troupe serve Qwen/Qwen3-0.6B" in capsys.readouterr().err


def test_a_taken_port_is_reported_before_anything_is_loaded(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TROUPE_ARGS", raising=False)
    monkeypatch.setattr(app.cli.command, "_configure_logging", lambda arguments: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "m", "--port", str(port)]) == 2
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in capsys.readouterr().err


def test_python_m_app_is_the_command_and_help_is_light() -> None:
    program = (
        "import sys, runpy; sys.argv = ['app', 'serve', '--help']\n"
        "try: runpy.run_module('app', run_name='__main__')\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "print(sorted({'torch', 'transformers', 'quart', 'hypercorn', 'yaml'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "--max-running-requests" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"
