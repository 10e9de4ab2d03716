"""Rotary position embedding (Su et al., RoFormer, arXiv 2104.09864) and the ways it is stretched to longer contexts."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernels.core.operators import Linear
from kernels.devices.base import Device
from kernels.models.config import QueryGrowth, RopeConfig

__all__ = ["RotaryEmbedding", "alibi_slopes", "grow", "inverse_frequencies", "rotary_order"]


class RotaryEmbedding:
    """Cosines and sines of a step's positions, computed once a step and shared by all layers.

    They are computed rather than looked up: a table for a long context would take more memory than it saves time.
    """

    def __init__(self, config: RopeConfig, head_dim: int, dtype: torch.dtype, device: Device, context: int = 0) -> None:
        frequencies, self.scale = inverse_frequencies(config, config.dim or head_dim, context)
        # The other numbers of a head are rotated by nothing (``rotary_order``).
        frequencies = torch.cat((frequencies, torch.zeros(head_dim // 2 - len(frequencies))))
        # Half of each head rotates against the other half: x * cos + roll(x, dim / 2) * sin, the first sines negated:
        # here if the device takes signed sines, else by the kernel.
        first = -frequencies if device.attention.signed_sines else frequencies
        self.frequencies = torch.cat((first, frequencies)).to(device.torch_device)  # float32 [head_dim]
        self.dtype = dtype
        self._angles = device.attention.angles
        self._unscale: Linear | None = None
        if self.scale != 1.0 and config.dim:  # the factor is that of the rotated numbers alone
            factor = torch.where(frequencies == 0, self.scale, 1.0).repeat(2).to(device.torch_device, dtype)
            self._unscale = device.elementwise.compose(lambda cos: cos / factor, lambda cos: cos)

    def scale_frequencies(self, factors: Tensor) -> None:
        """Multiply the frequency of each dimension pair by ``factors`` float32 [head_dim / 2]."""
        self.frequencies = self.frequencies * factors.to(self.frequencies.device).repeat(2)

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """``positions`` int64 [tokens] -> cos and sin, each [tokens, 1, head_dim] in the model's dtype."""
        cos, sin = self._angles(positions, self.frequencies, self.scale, self.dtype)
        return (cos, sin) if self._unscale is None else (self._unscale(cos), sin)


def inverse_frequencies(config: RopeConfig, head_dim: int, context: int = 0) -> tuple[Tensor, float]:
    """Radians per token of each dimension pair, float32 [head_dim / 2], and the factor on cos and sin.

    ``context``: the most tokens that a sequence may have. LongRoPE's factors follow from it, not from each sequence's
    length, so that cached keys stay valid while a sequence grows.
    """
    pairs = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    base = 1.0 / (config.theta**pairs)
    match config.kind:
        case "none":
            return torch.zeros_like(base), 1.0
        case "proportional":
            return 1.0 / (config.theta ** (pairs * head_dim / config.head_dim)) / config.factor, 1.0
        case "linear":
            return base / config.factor, 1.0
        case "llama3":
            return _llama3(base, config), 1.0
        case "factors":
            return base / torch.tensor(config.factors), 1.0
        case "longrope":
            beyond = context > config.original_length
            return base / torch.tensor(config.factors if beyond else config.short_factors), _longrope_scale(config)
        case "yarn":
            return _yarn(base, config, head_dim), _yarn_scale(config)
    return base, 1.0


def grow(queries: Tensor, positions: Tensor, growth: QueryGrowth) -> Tensor:
    """``queries`` [tokens, heads, dim] at ``positions`` int64 [tokens], grown."""
    steps = torch.div(positions + growth.shift, growth.tokens, rounding_mode="floor").float()
    return queries * (1.0 + growth.factor * torch.log1p(steps)).to(queries.dtype).view(-1, 1, 1)


def alibi_slopes(heads: int) -> list[float]:
    """Of each head: powers of ``2 ** (-8 / n)``, for n the greatest power of two up to ``heads``; those of more heads
    lie between these (Press et al., arXiv 2108.12409)."""
    power = 1 << (heads.bit_length() - 1)
    first = [2.0 ** (-8 * head / power) for head in range(1, power + 1)]
    return first + [2.0 ** (-4 * head / power) for head in range(1, 2 * (heads - power), 2)]


def rotary_order(head_dim: int, rotary_dim: int, interleaved: bool) -> list[int] | None:
    """The order of a head's numbers in which number i rotates against number ``i + head_dim / 2``; None: as they are.

    ``rotary_dim``: so many of them are rotated, the first ones. ``interleaved``: each against its neighbor, else halves
    against one another. Queries and keys in the same order have the same products.
    """
    if rotary_dim == head_dim and not interleaved:
        return None
    rotated, others = list(range(rotary_dim)), list(range(rotary_dim, head_dim))
    half, rest = rotary_dim // 2, len(others) // 2
    first, second = (rotated[::2], rotated[1::2]) if interleaved else (rotated[:half], rotated[half:])
    return [*first, *others[:rest], *second, *others[rest:]]


def _llama3(base: Tensor, config: RopeConfig) -> Tensor:
    """Llama 3.1: long wavelengths are stretched by ``factor``, short ones kept, those between blended."""
    turns = config.original_length * base / (2 * math.pi)  # over the original context
    keep = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return keep * base + (1.0 - keep) * base / config.factor


def _yarn(base: Tensor, config: RopeConfig, head_dim: int) -> Tensor:
    """YaRN, "NTK-by-parts" (Peng et al., arXiv 2309.00071, section 3.2)."""

    def dimension(turns: float) -> float:
        return head_dim * math.log(config.original_length / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    stretch = ramp.clamp(0.0, 1.0)
    return stretch * base / config.factor + (1.0 - stretch) * base


def _longrope_scale(config: RopeConfig) -> float:
    """LongRoPE's attention temperature, put on cos and sin (Ding et al., arXiv 2402.13753; Phi-3, arXiv 2404.14219)."""
    if config.attention_factor is not None:
        return config.attention_factor
    return math.sqrt(1 + math.log(config.factor) / math.log(config.original_length)) if config.factor > 1.0 else 1.0


def _yarn_scale(config: RopeConfig) -> float:
    """YaRN's attention temperature, put on cos and sin (section 3.4)."""
    if config.attention_factor is not None:
        return config.attention_factor

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(config.factor) + 1.0 if config.factor > 1.0 else 1.0

    if config.mscale and config.mscale_all_dim:
        return scale(config.mscale) / scale(config.mscale_all_dim)
    return scale(1.0)
