"""What a draft's own caches take beside the target's pages counts when the cache is sized."""

import pytest

from app.understudy import MODEL_DIR
from app.understudy.drafts import draft_path
from kernels.contract.errors import CacheSizeError
from kernels.contract.speculation import SpeculativeSettings
from kernels.devices.cpu.memory import CpuMemory


@pytest.mark.parametrize("algorithm", ["EAGLE3", "STANDALONE", "DFLASH"])
def test_spare_pages_count(algorithm, drive, monkeypatch):
    """As much as is free holds the pages that were asked for, and not those for draft tokens as well."""
    steps = 15 if algorithm == "DFLASH" else 40
    speculation = SpeculativeSettings(
        algorithm, draft_model_path=str(draft_path(algorithm)), num_steps=steps, num_draft_tokens=steps + 1
    )
    made, free = {}, 1 << 40

    def sized(*arguments, **options):
        made["weights"], made["memory"] = arguments[3], arguments[4]
        return cache_pages(*arguments, **options)

    from kernels.devices.memory import MemoryUsage
    from kernels.execution.load import cache_pages

    monkeypatch.setattr(CpuMemory, "usage", lambda self: MemoryUsage(free, free))
    monkeypatch.setattr("kernels.execution.load.cache_pages", sized)
    driver = drive(MODEL_DIR, speculation=speculation, page_size=16)
    caches = driver.runner._loaded.draft_caches
    beside = sum(cache[driver.info.num_pages :].nbytes for cache in caches)
    assert beside > 0
    assert made["memory"].free == free - beside
    monkeypatch.setattr(CpuMemory, "usage", lambda self: MemoryUsage(beside, beside))
    with pytest.raises(CacheSizeError):
        drive(MODEL_DIR, speculation=speculation, page_size=16)
