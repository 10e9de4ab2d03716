"""The native operators run on processors that have all kinds of vectors they are compiled for."""

from __future__ import annotations

import pytest

from kernels.devices.cpu.native import library

VECTORS = {
    "_mm256_madd_epi16": "avx2",
    "_mm256_fmadd_ps": "fma",
    "_dpbusd_epi32": "avx512vnni",
    "_permutexvar_epi8": "avx512vbmi",
    "_mulhrs_epi16": "avx512bw",
    "_fmadd_ph": "avx512fp16",
    "_cvtne2ps_pbh": "avx512bf16",
    "_tile_dpbf16ps": "amx-bf16",
    "_tile_dpbssd": "amx-int8",
}
"""An instruction of each kind -> what the compiler calls the kind."""


@pytest.mark.parametrize("instruction", VECTORS)
def test_a_processor_is_asked_for_what_is_compiled(instruction):
    texts = {path.name: path.read_text() for path in (*library.HERE.glob("*.h"), *library.HERE.glob("*.cpp"))}
    checks = texts["program.cpp"].partition("int troupe_ready()")[2].partition("\n}\n")[0]
    assert any(instruction in text for text in texts.values()), "nothing needs it any more"
    assert f'__builtin_cpu_supports("{VECTORS[instruction]}")' in checks
