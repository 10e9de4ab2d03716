"""What must not be in the source: unpickling, evaluating, shells, code of others, ports of our own, plain Jinja."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.kits.dangers import MODULES, ROOT, modules

BUILTINS = {"eval", "exec", "compile", "__import__"}
CALLS = {
    "os.system",
    "os.popen",
    "subprocess.getoutput",
    "subprocess.getstatusoutput",
    "asyncio.create_subprocess_shell",
    "torch.load",
    "torch.jit.load",
    "torch.package.PackageImporter",
    "torch.hub.load",
    "yaml.load",
    "yaml.load_all",
    "yaml.full_load",
    "yaml.unsafe_load",
    "tempfile.mktemp",
    "jinja2.Environment",
    "jinja2.Template",
    "jinja2.sandbox.SandboxedEnvironment",
}
# Names that come from the program itself, never from a request, a checkpoint or the network.
IMPORTERS = {
    "actors/runtime/process/wire.py",
    "kernels/contract/adapters.py",
    "kernels/contract/model_files.py",
    "kernels/contract/npu_simulator.py",
    "kernels/contract/runner.py",
    "kernels/devices/cuda/launch.py",
    "kernels/devices/npu_simulator/takeover.py",
    "kernels/models/registry.py",  # and from installed distributions
    "kernels/speculation/load.py",
}
TRUSTING = {"actors/engine/configuration.py", "kernels/models/fallback/loading.py"}  # by --trust-remote-code


def dangers(source: str, file: str = "x.py") -> Iterator[str]:
    """What is wrong in a module, as ``line: what``."""
    aliases: dict[str, str] = {}
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                aliases[(name.asname or name.name).partition(".")[0]] = (
                    name.name if name.asname else name.name.partition(".")[0]
                )
                if name.name.partition(".")[0] in MODULES:
                    yield f"{node.lineno}: import {name.name}"
        elif isinstance(node, ast.ImportFrom) and node.module:
            for name in node.names:
                aliases[name.asname or name.name] = f"{node.module}.{name.name}"
            if node.module.partition(".")[0] in MODULES:
                yield f"{node.lineno}: from {node.module} import"
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        head, dot, rest = called.partition(".")
        called = f"{aliases.get(head, head)}{dot}{rest}"
        if called in BUILTINS or called in CALLS:
            yield f"{node.lineno}: {called}"
        if called.endswith("importlib.import_module") and file not in IMPORTERS:
            yield f"{node.lineno}: {called}"
        if called.endswith((".load_module", "spec_from_file_location")):
            yield f"{node.lineno}: {called}"
        for keyword in node.keywords:
            false = isinstance(keyword.value, ast.Constant) and keyword.value.value in (False, None)
            if keyword.arg in ("shell", "trust_remote_code", "allow_pickle") and not false and file not in TRUSTING:
                yield f"{node.lineno}: {keyword.arg}={ast.unparse(keyword.value)}"
        if called.endswith(".bind") and node.args and isinstance(node.args[0], ast.Tuple):
            host = node.args[0].elts[0]
            if isinstance(host, ast.Constant) and host.value in ("", "0.0.0.0", "::"):
                yield f"{node.lineno}: listens everywhere"


def test_the_source_holds_none_of_it() -> None:
    files = modules()
    assert len(files) > 100
    found = {
        str(file.relative_to(ROOT)): what
        for file in files
        if (what := list(dangers(file.read_text(encoding="utf-8"), str(file.relative_to(ROOT)))))
    }
    assert found == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import cloudpickle.fast as c",
        "def f():\n    import dill",
        "eval('1')",
        "exec(x)",
        "compile(x, '', 'exec')",
        "__import__('os')",
        "import torch\ntorch.load(f, weights_only=True)",
        "import torch as t\nt.load(f)",
        "from torch import load\nload(f)",
        "import yaml\nyaml.load(x, yaml.SafeLoader)",
        "import subprocess\nsubprocess.run(x, shell=True)",
        "import os\nos.system(x)",
        "from os import popen as p\np(x)",
        "import numpy as np\nnp.load(f, allow_pickle=True)",
        "AutoTokenizer.from_pretrained(x, trust_remote_code=True)",
        "AutoTokenizer.from_pretrained(x, trust_remote_code=arguments.trust)",
        "import jinja2\njinja2.Environment()",
        "from jinja2 import Template\nTemplate(x)",
        "import importlib\nimportlib.import_module(name)",
        "sock.bind(('0.0.0.0', 5))",
    ],
)
def test_each_rule_is_found(source: str) -> None:
    assert list(dangers(source))


@pytest.mark.parametrize(
    "source",
    ["import re\nre.compile(x)", "import yaml\nyaml.safe_load(x)", "np.load(f, allow_pickle=False)", "model.eval()"],
)
def test_what_is_harmless_is_not(source: str) -> None:
    assert not list(dangers(source))
