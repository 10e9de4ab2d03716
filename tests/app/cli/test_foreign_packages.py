"""Beside packages of others that break ours: Hugging Face's kernels, and torch_npu without CANN."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import actors
from tests.kits.tiny_model import make_tiny_model

ROOT = Path(__file__).parents[3]
OURS = ("app", "actors", "kernels", "telemetry")
CONVERT = (
    "import sys; from pathlib import Path; from actors.text.tokenizer_conversion import convert_tokenizer as convert; "
    "print(convert(Path(sys.argv[1])).encode('the king').ids)"
)


def install_ours(site: Path) -> None:
    """As pip does: over what is there."""
    for name in OURS:
        shutil.copytree(
            ROOT / name, site / name, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", "understudy")
        )
    shutil.copytree(ROOT / "app" / "understudy", site / "app" / "understudy", ignore=shutil.ignore_patterns("*.sa*"))


def install_fake(site: Path) -> None:
    """The distribution's names and what transformers imports of it, of which nothing works."""
    (site / "kernels").mkdir(exist_ok=True)
    (site / "kernels" / "__init__.py").write_text("__version__ = '0.17.2'\n")
    metadata = site / "kernels-0.17.2.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.17.2\n")
    (metadata / "RECORD").write_text("kernels/__init__.py,,\n")


def install_real(site: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), "kernels>=0.10"]
    if importlib.util.find_spec("pip") is None:
        pytest.skip("pip is not installed here, and so cannot install the package kernels")
    done = subprocess.run([*command, "--retries", "0", "--timeout", "10"], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"the package kernels cannot be installed here: {done.stderr.strip().splitlines()[-1:]}")


def run(site: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Python in an environment whose packages are those of ``site`` before others."""
    environment = os.environ | {"PYTHONPATH": str(site)} | variables
    return subprocess.run(
        [sys.executable, *words], cwd=site, env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture
def slow_model(tmp_path: Path) -> Path:
    """A model whose tokenizer only transformers can make."""
    path = make_tiny_model(tmp_path / "model")
    made = json.loads((path / "tokenizer.json").read_text())["model"]
    (path / "vocab.json").write_text(json.dumps(made["vocab"]))
    (path / "merges.txt").write_text("".join(f"{' '.join(pair)}\n" for pair in made["merges"]))
    settings = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": "GPT2Tokenizer"}))
    (path / "tokenizer.json").unlink()
    return path


@pytest.mark.long
@pytest.mark.parametrize("install", [install_fake, install_real])
def test_a_start_beside_hugging_faces_kernels_works_or_names_it(install, tmp_path: Path, slow_model: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    install(site)
    install_ours(site)
    assert run(site, "-m", "app", "version").returncode == 0
    converted = run(site, "-c", CONVERT, str(slow_model))
    assert converted.returncode == 0, converted.stderr
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    install(theirs)
    shutil.copytree(theirs, site, dirs_exist_ok=True)  # theirs is installed last
    output = run(site, "-m", "app", "version")
    assert output.returncode == 2
    assert output.stderr.startswith("troupe: the module named kernels")
    assert "pip uninstall kernels" in output.stderr
    assert "Traceback" not in output.stderr


def test_a_module_that_was_uninstalled_over_ours_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left without its __init__.py is a namespace, and has no origin."""
    monkeypatch.setattr(actors, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"whose __init__.py is gone, is not Troupe's.*--force-reinstall"):
        actors._check_kernels()


def test_an_asgi_server_names_the_foreign_package(tmp_path: Path) -> None:
    install_ours(tmp_path)
    (tmp_path / "kernels" / "__init__.py").write_text("__version__ = '0.17.2'\n")
    program = (
        "import asyncio, app\n"
        "async def receive(): return {'type': 'lifespan.startup'}\n"
        "async def send(message): print(message)\n"
        "asyncio.run(app.asgi({'type': 'lifespan'}, receive, send))\n"
    )
    output = run(tmp_path, "-c", program)
    assert "lifespan.startup.failed" in output.stdout, output.stderr
    assert "pip uninstall kernels" in output.stdout


@pytest.fixture
def broken_npu(tmp_path: Path) -> Path:
    """A folder with a torch_npu that torch loads by itself and that fails, as the real one does without CANN."""
    site = tmp_path / "npu"
    (site / "torch_npu").mkdir(parents=True)
    (site / "torch_npu" / "__init__.py").write_text("raise ImportError('libhccl.so: cannot open shared object file')\n")
    metadata = site / "torch_npu-2.13.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.13.0\n")
    (metadata / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    return site


@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("-c", CONVERT, "MODEL"), id="tokenizer"),
        pytest.param(("-m", "tests.bench", "quantization", "--help"), id="bench"),
        pytest.param(("-m", "tests.understudy.train", "--help"), id="train"),
        pytest.param(("-m", "tests.understudy.drafts.train", "--help"), id="drafts"),
        pytest.param(("-m", "tests.understudy.adapters.train", "--help"), id="adapters"),
        pytest.param(
            (
                "-c",
                "from kernels.contract.environment import hide_broken_npu; hide_broken_npu(); "
                "import transformers; transformers.Qwen3ForCausalLM",
            ),
            id="models",
        ),
    ],
)
def test_programs_of_ours_run_beside_torch_npu_without_cann(words, broken_npu: Path, slow_model: Path) -> None:
    site = os.pathsep.join((str(broken_npu), str(ROOT)))
    environment = {name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    output = [str(slow_model) if word == "MODEL" else word for word in words]
    done = subprocess.run(
        [sys.executable, *output], cwd=ROOT, env=environment | {"PYTHONPATH": site}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
