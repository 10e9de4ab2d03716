"""Where a model comes from, and which failures a later start may heal."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

from actors.engine.lifecycle import Lifecycle
from actors.options import Arguments
from actors.text.model_files import (
    ModelDownloadError,
    ModelFiles,
    ModelPathError,
    adapter_source,
    resolve_adapter_path,
    resolve_model_path,
)
from actors.text.served_model import ServedModel


class _HubError(OSError):
    def __init__(self, status: int | None) -> None:
        super().__init__("the hub")
        if status is not None:
            self.response = SimpleNamespace(status_code=status)


@pytest.mark.parametrize(
    ("error", "permanent"),
    [
        (_HubError(404), True),
        (_HubError(401), True),
        (_HubError(503), False),
        (_HubError(429), False),
        (_HubError(None), False),  # no network
        (ValueError("no name of a repository"), True),
    ],
)
def test_a_hub_that_does_not_answer_may_answer_a_later_start(
    error: Exception, permanent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(*_: object, **__: object) -> Any:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelPathError) as caught:
        resolve_model_path("owner/name")
    assert isinstance(caught.value, ModelDownloadError) is not permanent
    assert type(error).__name__ not in str(caught.value)
    assert ("no such repository" in str(caught.value)) is (getattr(error, "response", None) is not None and permanent)
    lifecycle = Lifecycle()
    lifecycle.failed(caught.value)
    assert lifecycle.status.permanent is permanent


def test_an_adapter_of_the_hub_is_downloaded_at_its_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def download(name: str, **options: Any) -> str:
        asked.append({"name": name, **options})
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_adapter_path("owner/name@abc", download_dir="there") == tmp_path
    assert resolve_adapter_path("owner/name") == tmp_path
    files = ["adapter_config.json", "adapter_model.safetensors"]
    first = {"name": "owner/name", "revision": "abc", "cache_dir": "there", "allow_patterns": files}
    assert asked == [first, first | {"revision": None, "cache_dir": None}]
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for local in ("owner/name", "one", "./one/two", "/one/two", "one/two/three"):
        assert resolve_adapter_path(local) == (tmp_path / local).absolute()
    assert len(asked) == 2


def test_other_nodes_get_an_adapter_of_the_hub_at_the_same_commit(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--owner--name" / "snapshots" / "c0ffee"
    assert adapter_source("owner/name@main", snapshot) == "owner/name@c0ffee"
    assert adapter_source(str(snapshot), snapshot) == ""


def test_an_adapter_that_the_hub_has_not_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: object, **__: object) -> Any:
        raise _HubError(404)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(
        ModelPathError, match="owner/name@x is not a local directory, and the hub has no such repository"
    ):
        resolve_adapter_path("owner/name@x")


def test_the_argument_that_names_a_path_is_reported() -> None:
    with pytest.raises(ModelPathError, match="--tokenizer-path /no/such"):
        resolve_model_path("/no/such", argument="--tokenizer-path")


@pytest.mark.parametrize(
    ("config", "length", "eos"),
    [
        ({"model_max_length": 4096, "eos_token_id": 7}, 4096, (7,)),
        ({"text_config": {"max_position_embeddings": 64, "eos_token_id": [5, 6]}}, 64, (5, 6)),
        ({"eos_token_id": 3, "text_config": {"eos_token_id": 5}}, 2048, (3,)),
    ],
)
def test_lengths_and_ends_are_read_where_families_keep_them(
    config: dict[str, object], length: int, eos: tuple[int, ...], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    files = ModelFiles(tmp_path)
    assert (files.context_length, files.eos_token_ids()) == (length, eos)


def test_the_first_reason_to_give_up_decides_whether_it_is_permanent() -> None:
    lifecycle = Lifecycle()
    lifecycle.give_up("no memory is left")
    lifecycle.give_up("a wrong dtype", permanent=True)
    assert (lifecycle.error, lifecycle.permanent) == ("no memory is left", False)


@pytest.mark.parametrize("path", ["a" * 300, "~nobody-of-this-name/adapter"])
def test_an_adapters_path_that_no_file_can_have_is_refused(path):
    with pytest.raises(ModelPathError, match="cannot be read"):
        resolve_adapter_path(path)


def test_ends_outside_of_the_vocabulary_are_left_out_with_a_warning(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = shutil.copytree(tiny_model, tmp_path / "model")
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 120025, -1]}))
    with caplog.at_level(logging.WARNING):
        served = ServedModel(Arguments(model_path=str(path)))
    assert served.eos_ids == (2,)
    expected = f"are ignored: 120025, -1 (vocab_size: {served.vocab_size})"
    assert f"eos_token_id has ids that are no tokens of the model and {expected}" in caplog.text
