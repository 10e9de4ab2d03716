"""What a draft's own caches take beside the target's pages counts when the cache is sized."""

import pytest

from app.understudy import MODEL_DIR
from app.understudy.drafts import draft_path
from kernels.sizing import CacheSizeError
from kernels.speculative.settings import SpeculativeSettings


@pytest.mark.parametrize("algorithm", ["EAGLE3", "STANDALONE", "DFLASH"])
def test_spare_pages_count(algorithm, drive, monkeypatch):
    """As much as is free holds the pages that were asked for, and not those for guesses as well."""
    steps = 15 if algorithm == "DFLASH" else 40
    speculation = SpeculativeSettings(
        algorithm, draft_model_path=str(draft_path(algorithm)), num_steps=steps, num_draft_tokens=steps + 1
    )
    made, free = {}, 1 << 40

    def sized(*arguments):
        made["weights"], made["memory"] = arguments[3], arguments[4]
        return cache_pages(*arguments)

    from kernels.loaded_model import cache_pages
    from kernels.platforms.base import Memory
    from kernels.platforms.cpu import CpuPlatform

    monkeypatch.setattr(CpuPlatform, "memory", lambda self: Memory(free, free))
    monkeypatch.setattr("kernels.loaded_model.cache_pages", sized)
    driver = drive(MODEL_DIR, speculation=speculation, page_size=16)
    caches = driver.runner._tenants._caches[1]
    beside = sum(cache[driver.info.num_pages :].nbytes for cache in caches)
    assert beside > 0
    assert made["memory"].free == free - beside
    monkeypatch.setattr(CpuPlatform, "memory", lambda self: Memory(beside, beside))
    with pytest.raises(CacheSizeError):
        drive(MODEL_DIR, speculation=speculation, page_size=16)
