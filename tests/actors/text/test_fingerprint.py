"""Fingerprints of a model's files, which nodes compare."""

from __future__ import annotations

import shutil
from pathlib import Path

from actors.text.fingerprint import fingerprint


def test_config_and_headers_count_and_the_weights_themselves_do_not(tiny_model: Path, tmp_path: Path) -> None:
    own = fingerprint(tiny_model)
    copy = shutil.copytree(tiny_model, tmp_path / "copy")
    weights = copy / "model.safetensors"
    stored = bytearray(weights.read_bytes())
    stored[-1] ^= 1  # of a tensor
    weights.write_bytes(stored)
    assert fingerprint(copy) == {**own, "model path": str(copy)}
    stored[8 + stored[8:].index(b"F32" if b"F32" in stored[8:] else b"BF16")] ^= 1  # of the header
    weights.write_bytes(stored)
    changed = fingerprint(copy, prefix="draft's ")
    assert changed["draft's config.json"] == own["config.json"]
    assert changed["draft's weights"] != own["weights"]
    (copy / "config.json").write_text("{}")
    assert fingerprint(copy, weights=False).keys() == {"model path", "config.json"}
    assert fingerprint(copy)["config.json"] != own["config.json"]
    weights.unlink()
    (copy / "model.safetensors.index.json").write_text('{"weight_map": {"a": "one", "b": "two"}}')
    assert fingerprint(copy)["weights"].startswith("2 files of 0 bytes")
    (copy / "some-TP-notes.safetensors").write_bytes(b"a")
    assert fingerprint(copy)["weights"].startswith("2 files of 0 bytes")
    for rank in ("000", "001", "common"):
        (copy / f"part-TP-{rank}.safetensors").write_bytes(b"a")
    assert fingerprint(copy)["weights"].startswith("3 files of 3 bytes")
