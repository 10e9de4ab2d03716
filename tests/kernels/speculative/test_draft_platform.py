"""What a device has no choice of is refused, not passed over."""

import pytest

from kernels.platforms.base import PlatformError
from kernels.platforms.cpu import CpuPlatform
from kernels.speculative.backend import draft_platform
from kernels.speculative.settings import SpeculativeSettings
from kernels.step import RunnerConfig


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (SpeculativeSettings("NGRAM", attention_mode="decode"), "--speculative-attention-mode decode"),
        (
            SpeculativeSettings("EAGLE", draft_attention_backend="torch_native"),
            "--speculative-draft-attention-backend torch_native",
        ),
    ],
)
def test_kernels_of_an_npu_are_refused_elsewhere(settings: SpeculativeSettings, named: str) -> None:
    config = RunnerConfig(model_path="")
    platform = CpuPlatform(config)
    assert draft_platform(config, SpeculativeSettings("NGRAM"), platform, None) is platform
    with pytest.raises(PlatformError, match=f"{named} .* leave it out with --device cpu"):
        draft_platform(config, settings, platform, None)
