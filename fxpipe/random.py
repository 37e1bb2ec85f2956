"""Random operators to pure functions of a seed and of each element's position.

Widynski, "Squares: A Fast Counter-Based RNG" (arXiv 2004.06278), written in operators on int64
that wrap around: they hold no state, fuse with what uses them, and give the same bits on every
device. The seed is the key of the paper, an element's position in its tensor is the counter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

aten = torch.ops.aten

# Marks a node whose value has no rows: all microbatches share what it draws.
WHOLE = "fxpipe_whole"
# Random bits of a number in [0, 1): as many as every multiple of 2**-bits below 1 is exact with.
FRACTION_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
LOW_WORD = 0xFFFFFFFF
# Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators" (2014): SplitMix64.
GOLDEN, FIRST, SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


class Made(NamedTuple):
    """What a random operator makes."""

    shape: tuple[int, ...]
    dtype: torch.dtype


# Seeds, on the host.


def draw_seed() -> int:
    """The seed of a step, in [0, 2**63): from the generator that `torch.manual_seed` sets."""
    return int(torch.empty((), dtype=torch.int64).random_())


def seeds_of_step(seed: int, microbatches: int, places: int) -> Tensor:
    """int64[1 + microbatches, places]: a seed per place in the model, one row per microbatch.

    Row 0 is for values that all microbatches share, row 1 + k for microbatch k. A row or column
    does not depend on how many there are.
    """
    rows = torch.arange(1 + microbatches).unsqueeze(1) << 32
    x = (rows + torch.arange(places)) * GOLDEN + seed
    x = (x ^ shift_right(x, 30)) * FIRST
    x = (x ^ shift_right(x, 27)) * SECOND
    return (x ^ shift_right(x, 31)) | 1


# Bits.


def shift_right(x: Tensor, bits: int) -> Tensor:
    """A shift that fills with zeros; int64 has only the one that copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def swap_words(x: Tensor) -> Tensor:
    return (x << 32) | shift_right(x, 32)


def counters(seed: Tensor, shape: tuple[int, ...], draw: int) -> Tensor:
    """Each element's number; those of the next draw begin where those of this one end."""
    count = math.prod(shape)
    return torch.arange(draw * count, (draw + 1) * count, device=seed.device).view(shape)


def squares32(seed: Tensor, shape: tuple[int, ...], draw: int = 0) -> Tensor:
    """32 random bits per element, in int64: section 3 of the paper."""
    x = y = counters(seed, shape, draw) * seed
    z = y + seed
    x = swap_words(x * x + y)
    x = swap_words(x * x + z)
    x = swap_words(x * x + y)
    return shift_right(x * x + z, 32)


def squares64(seed: Tensor, shape: tuple[int, ...], draw: int = 0) -> Tensor:
    """64 random bits per element: section 3 of the paper."""
    x = y = counters(seed, shape, draw) * seed
    z = y + seed
    x = swap_words(x * x + y)
    x = swap_words(x * x + z)
    x = swap_words(x * x + y)
    t = x * x + z
    x = swap_words(t)
    return t ^ shift_right(x * x + y, 32)


# Numbers.


def chance(seed: Tensor, shape: tuple[int, ...], p: float) -> Tensor:
    """True with probability p, to 2**-32."""
    return squares32(seed, shape) < round(p * 2**32)


def fraction(seed: Tensor, shape: tuple[int, ...], dtype: torch.dtype, draw: int = 0) -> Tensor:
    """Evenly spread in [0, 1)."""
    bits = FRACTION_BITS[dtype]
    if dtype == torch.float64:
        return shift_right(squares64(seed, shape, draw), 64 - bits).to(dtype) * 2.0**-bits
    return (squares32(seed, shape, draw) >> (32 - bits)).to(dtype) * 2.0**-bits


def open_fraction(seed: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Evenly spread in (0, 1), as middles of equal steps: log(u) and log(1 - u) are finite."""
    bits = FRACTION_BITS[dtype] - 1
    if dtype == torch.float64:
        whole = shift_right(squares64(seed, shape), 64 - bits)
    else:
        whole = squares32(seed, shape) >> (32 - bits)
    return (whole.to(dtype) + 0.5) * 2.0**-bits


def precise(dtype: torch.dtype) -> torch.dtype:
    """The type that logarithms are computed in."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def standard_normal(seed: Tensor, made: Made) -> Tensor:
    """Box and Muller (1958)."""
    dtype = precise(made.dtype)
    radius = (-2.0 * open_fraction(seed, made.shape, dtype).log()).sqrt()
    angle = 2.0 * math.pi * fraction(seed, made.shape, dtype, draw=1)
    return (radius * angle.cos()).to(made.dtype)


def integers(seed: Tensor, made: Made, low: int, high: int) -> Tensor:
    """In [low, high): the remainder of 63 bits, whose bias is below (high - low) / 2**63."""
    span = high - low
    if not 0 < span <= 2**63:
        raise NotImplementedError(f"integers in [{low}, {high})")
    bits = shift_right(squares64(seed, made.shape), 1)
    return ((bits if span == 2**63 else bits % span) + low).to(made.dtype)


# The operators, as ATen defines them; each takes the seed and what it makes before its arguments.


def native_dropout(
    seed: Tensor, made: Made, x: Tensor, p: float, train: bool | None
) -> tuple[Tensor, Tensor]:
    if train is False:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    mask = chance(seed, made.shape, 1.0 - p)
    return x * mask * (0.0 if p == 1 else 1.0 / (1.0 - p)), mask


def bernoulli_of_number(seed: Tensor, made: Made, x: Tensor, p: float = 0.5) -> Tensor:
    return chance(seed, made.shape, p).to(made.dtype)


def bernoulli(seed: Tensor, made: Made, x: Tensor, p: Tensor | None = None) -> Tensor:
    p = x if p is None else p
    u = fraction(seed, made.shape, precise(p.dtype))
    return (u < p.to(u.dtype)).to(made.dtype)


def rand(seed: Tensor, made: Made, *size_or_like: Any) -> Tensor:
    return fraction(seed, made.shape, made.dtype)


def randn(seed: Tensor, made: Made, *size_or_like: Any) -> Tensor:
    return standard_normal(seed, made)


def randint(seed: Tensor, made: Made, high: int, size: Any) -> Tensor:
    return integers(seed, made, 0, high)


def randint_from(seed: Tensor, made: Made, low: int, high: int, size: Any) -> Tensor:
    return integers(seed, made, low, high)


def randint_like(seed: Tensor, made: Made, like: Tensor, high: int) -> Tensor:
    return integers(seed, made, 0, high)


def randint_like_from(seed: Tensor, made: Made, like: Tensor, low: int, high: int) -> Tensor:
    return integers(seed, made, low, high)


def random(seed: Tensor, made: Made, x: Tensor, high: int | None = None) -> Tensor:
    """Without a bound: all whole numbers from 0 on that the type holds exactly."""
    if high is None:
        if made.dtype.is_floating_point:
            high = 2 ** FRACTION_BITS[made.dtype] + 1
        else:
            high = 2 if made.dtype == torch.bool else torch.iinfo(made.dtype).max + 1
    return integers(seed, made, 0, high)


def randperm(seed: Tensor, made: Made, n: int) -> Tensor:
    return squares64(seed, (n,)).argsort().to(made.dtype)


def uniform(seed: Tensor, made: Made, x: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    return fraction(seed, made.shape, made.dtype) * (high - low) + low


def normal(seed: Tensor, made: Made, mean: Any, std: Any = 1.0, size: Any = None) -> Tensor:
    return standard_normal(seed, made) * std + mean


def normal_like(seed: Tensor, made: Made, x: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    return standard_normal(seed, made) * std + mean


def log_normal(seed: Tensor, made: Made, x: Tensor, mean: float = 1.0, std: float = 2.0) -> Tensor:
    return normal_like(seed, made, x, mean, std).exp()


def exponential(seed: Tensor, made: Made, x: Tensor, rate: float = 1.0) -> Tensor:
    u = open_fraction(seed, made.shape, precise(made.dtype))
    return (-torch.log1p(-u) / rate).to(made.dtype)


def cauchy(seed: Tensor, made: Made, x: Tensor, median: float = 0.0, sigma: float = 1.0) -> Tensor:
    u = open_fraction(seed, made.shape, precise(made.dtype))
    return (median + sigma * torch.tan(math.pi * (u - 0.5))).to(made.dtype)


def geometric(seed: Tensor, made: Made, x: Tensor, p: float) -> Tensor:
    """The number of trials up to the first success."""
    dtype = precise(made.dtype) if made.dtype.is_floating_point else torch.float64
    if p == 1.0:
        return torch.ones(made.shape, dtype=made.dtype, device=seed.device)
    u = open_fraction(seed, made.shape, dtype)
    return (u.log() / math.log1p(-p)).ceil().to(made.dtype)


def multinomial(
    seed: Tensor, made: Made, weights: Tensor, count: int, replacement: bool = False
) -> Tensor:
    """Without replacement: the places that win a race of exponential times."""
    weights = weights.to(precise(weights.dtype))
    if not replacement or count == 1:
        times = exponential(seed, Made(tuple(weights.shape), weights.dtype), weights)
        return (weights / times).topk(count, dim=-1).indices
    reached = weights.cumsum(-1)
    u = fraction(seed, made.shape, weights.dtype) * reached[..., -1:]
    found = torch.searchsorted(reached, u, right=True)
    return found.clamp_max(weights.shape[-1] - 1)


def rrelu_with_noise(
    seed: Tensor, made: Made, x: Tensor, noise: Tensor,
    low: float = 0.125, high: float = 1 / 3, training: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if not training:
        return F.leaky_relu(x, (low + high) / 2), noise
    slope = torch.where(x <= 0, uniform(seed, made, x, low, high), torch.ones_like(x))
    return x * slope, slope


# Attention's fused kernels draw from generators of their own; its formula holds a dropout.


def attention(*args: Any, **kwargs: Any) -> Any:
    """`scaled_dot_product_attention` as matrix products, softmax and dropout."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*args, **kwargs)


def multi_head_attention(*args: Any, **kwargs: Any) -> Any:
    """`multi_head_attention_forward` as matrix products, softmax and dropout."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.multi_head_attention_forward(*args, **kwargs)


OPERATORS: dict[Any, Callable[..., Any]] = {
    aten.native_dropout.default: native_dropout,
    aten.bernoulli.p: bernoulli_of_number,
    aten.bernoulli.default: bernoulli,
    aten.bernoulli.Tensor: bernoulli,
    aten.rand.default: rand,
    aten.rand_like.default: rand,
    aten.randn.default: randn,
    aten.randn_like.default: randn,
    aten.randint.default: randint,
    aten.randint.low: randint_from,
    aten.randint_like.default: randint_like,
    aten.randint_like.low_dtype: randint_like_from,
    aten.random.default: random,
    aten.random.to: random,
    aten.randperm.default: randperm,
    aten.uniform.default: uniform,
    aten.normal.Tensor_float: normal,
    aten.normal.float_Tensor: normal,
    aten.normal.Tensor_Tensor: normal,
    aten.normal.float_float: normal,
    aten.normal_functional.default: normal_like,
    aten.log_normal.default: log_normal,
    aten.exponential.default: exponential,
    aten.cauchy.default: cauchy,
    aten.geometric.default: geometric,
    aten.multinomial.default: multinomial,
    aten.rrelu_with_noise_functional.default: rrelu_with_noise,
}
