"""Compiled libraries are loaded only from where no other user could have put them."""

from __future__ import annotations

import logging
import os
import stat

import pytest

from kernels.devices import native_cache
from kernels.devices.cpu.native import library
from kernels.speculation.drafters import trie as native_trie

NOBODY = 65534
SOURCE = library.OPERATORS[library.NEEDED_ISA]


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """A library in the cache, as ``library`` would have left it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native_cache._warn.cache_clear()
    folder = library._folder(SOURCE)
    native_cache.make_private(folder)
    path = folder / library.NAME
    path.write_bytes(b"a library")
    path.chmod(0o700)
    return path


def test_folders_made_for_libraries_are_private(compiled, tmp_path):
    places = [tmp_path / "troupe", compiled.parent.parent, compiled.parent]
    assert [stat.S_IMODE(place.stat().st_mode) for place in places] == [0o700] * 3
    assert library.built(SOURCE) == compiled


@pytest.mark.parametrize("up", range(4), ids=["file", "digest", "kind", "troupe"])
@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_place_others_may_write_to_is_refused(compiled, caplog, monkeypatch, up, mode):
    builds = []
    monkeypatch.setattr(library, "_compile", lambda *_: builds.append(1))
    place = (compiled, *compiled.parents)[up]
    place.chmod(mode)
    assert library.built(SOURCE) is None
    library.start_build(SOURCE)
    assert bool(builds) == (up == 0)  # a file is compiled again; a folder of others is not written to
    assert f"{place} are not used: other users may write to it (mode {mode:04o}); delete it" in caplog.text


@pytest.mark.parametrize("up", range(4), ids=["file", "digest", "kind", "troupe"])
def test_a_place_of_another_user_is_refused(compiled, caplog, monkeypatch, up):
    place = (compiled, *compiled.parents)[up]
    if os.geteuid() == 0:
        os.chown(place, NOBODY, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: NOBODY)
    assert library.built(SOURCE) is None
    assert "it belongs to user" in caplog.text


def test_a_link_to_a_place_of_others_is_refused(compiled, caplog, tmp_path):
    target = tmp_path / "elsewhere.so"
    target.write_bytes(b"a library")
    target.chmod(0o777)
    compiled.unlink()
    compiled.symlink_to(target)
    assert library.built(SOURCE) is None
    assert "other users may write to it (mode 0777)" in caplog.text


def test_a_cache_that_all_may_write_to_is_refused_unless_sticky(compiled, caplog, tmp_path):
    tmp_path.chmod(0o777)
    assert library.built(SOURCE) is None
    assert "every user may write to it" in caplog.text
    tmp_path.chmod(0o1777)
    assert library.built(SOURCE) == compiled


def test_a_refusal_is_logged_once(compiled, caplog):
    compiled.chmod(0o777)
    with caplog.at_level(logging.WARNING):
        assert library.built(SOURCE) is library.built(SOURCE) is None
    assert len(caplog.records) == 1


def test_tries_are_drafted_in_python_when_the_cache_is_refused(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native_cache._warn.cache_clear()
    tmp_path.joinpath("troupe").mkdir()
    tmp_path.joinpath("troupe").chmod(0o777)
    native_trie._library.cache_clear()
    try:
        assert not isinstance(native_trie.make_trie(1000, 4), native_trie.NativeTrie)
    finally:
        native_trie._library.cache_clear()
    assert "other users may write to it" in caplog.text
