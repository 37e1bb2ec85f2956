"""The bits are those of the paper, and the numbers made of them are spread as they should be."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fxpipe import random
from fxpipe.random import Made

WORD = 2**64
COUNT = 20000


def seed(place: int = 0, microbatch: int = 0, step: int = 0) -> Tensor:
    return random.seeds_of_step(1234 + step, microbatch + 1, place + 1)[microbatch + 1, place]


# Section 3 of the paper, in whole numbers that Python keeps exact.


def swapped(x: int) -> int:
    return (x >> 32 | x << 32) % WORD


def rounds(counter: int, key: int) -> tuple[int, int, int]:
    x = y = counter * key % WORD
    z = (y + key) % WORD
    for added in (y, z, y):
        x = swapped((x * x + added) % WORD)
    return x, y, z


def squares32_by_hand(counter: int, key: int) -> int:
    x, _, z = rounds(counter, key)
    return (x * x + z) % WORD >> 32


def squares64_by_hand(counter: int, key: int) -> int:
    x, y, z = rounds(counter, key)
    t = (x * x + z) % WORD
    return t ^ (swapped(t) ** 2 + y) % WORD >> 32


def test_bits_are_those_of_the_paper() -> None:
    keys = [seed(), seed(5, 3), torch.tensor(-1), torch.tensor(0x548C9DECBCE65297)]
    for key in keys:
        whole = int(key) % WORD
        words = random.squares32(key, (3, 4)).flatten().tolist()
        assert words == [squares32_by_hand(i, whole) for i in range(12)]
        longs = [x % WORD for x in random.squares64(key, (3, 4)).flatten().tolist()]
        assert longs == [squares64_by_hand(i, whole) for i in range(12)]


def test_the_next_draw_goes_on_where_the_last_one_ended() -> None:
    both = random.squares32(seed(), (2, 5))
    assert torch.equal(random.squares32(seed(), (5,), draw=1), both[1])


# Seeds.


def test_a_seed_does_not_depend_on_how_many_there_are() -> None:
    few, many = random.seeds_of_step(7, 2, 3), random.seeds_of_step(7, 8, 9)
    assert torch.equal(few, many[:3, :3])


def test_seeds_of_microbatches_places_and_steps_differ_and_are_odd() -> None:
    tables = [random.seeds_of_step(step, 16, 40) for step in range(10)]
    found = torch.cat(tables).flatten().tolist()
    assert len(set(found)) == 10 * 17 * 40
    assert all(value % 2 for value in found)


def test_the_seed_of_a_step_follows_the_default_generator() -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    first, second = random.draw_seed(), random.draw_seed()
    assert first != second and 0 <= min(first, second) and max(first, second) < 2**63
    torch.manual_seed(3)
    assert random.draw_seed() == first
    torch.set_rng_state(state)
    assert [random.draw_seed(), random.draw_seed()] == [first, second]


# Spread. Limits are five standard deviations of what is measured; seeds are fixed.


def chi_square(words: Tensor, bins: int) -> float:
    """How far counts are from even, in standard deviations of the statistic."""
    counts = torch.bincount(words.flatten(), minlength=bins).double()
    expected = words.numel() / bins
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return (statistic - (bins - 1)) / math.sqrt(2 * (bins - 1))


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("byte", range(4))
def test_every_byte_is_spread_evenly(byte: int, place: int) -> None:
    words = random.squares32(seed(place), (256 * 256,)) >> (8 * byte) & 255
    assert abs(chi_square(words, 256)) < 5


def test_a_bit_says_nothing_of_its_neighbours() -> None:
    bits = random.squares32(seed(), (COUNT, 1)) >> torch.arange(32) & 1
    spread = bits.double() - 0.5
    for other in (spread[1:] * spread[:-1], spread[:, 1:] * spread[:, :-1]):
        assert float(other.mean().abs()) < 5 * 0.25 / math.sqrt(other.numel())


def test_places_microbatches_and_steps_are_not_correlated() -> None:
    kinds = [seed(), seed(place=1), seed(microbatch=1), seed(step=1), seed(place=2, microbatch=3)]
    kinds += [random.seeds_of_step(1234, 1, 1)[0, 0]]
    drawn = torch.stack([random.fraction(s, (COUNT,), torch.float64) for s in kinds])
    found = torch.corrcoef(drawn) - torch.eye(len(kinds))
    assert float(found.abs().max()) < 5 / math.sqrt(COUNT)


X = torch.zeros(COUNT, dtype=torch.float64)
# operator -> what it draws, and the mean and variance of its distribution
MOMENTS: dict[str, tuple[Callable[[Tensor, Made], Tensor], float, float]] = {
    "rand": (lambda s, made: random.rand(s, made), 0.5, 1 / 12),
    "uniform": (lambda s, made: random.uniform(s, made, X, -1.0, 3.0), 1.0, 16 / 12),
    "randn": (lambda s, made: random.randn(s, made), 0.0, 1.0),
    "normal": (lambda s, made: random.normal(s, made, 2.0, 3.0), 2.0, 9.0),
    "log_normal": (
        lambda s, made: random.log_normal(s, made, X, 0.0, 0.5),
        math.exp(0.125),
        (math.exp(0.25) - 1) * math.exp(0.25),
    ),
    "exponential": (lambda s, made: random.exponential(s, made, X, 2.0), 0.5, 0.25),
    "geometric": (lambda s, made: random.geometric(s, made, X, 0.25), 4.0, 12.0),
    "bernoulli": (lambda s, made: random.bernoulli(s, made, X + 0.3), 0.3, 0.21),
    "bernoulli.p": (lambda s, made: random.bernoulli_of_number(s, made, X, 0.3), 0.3, 0.21),
    "randint": (lambda s, made: random.randint(s, made, 10, [COUNT]), 4.5, 99 / 12),
    "random": (lambda s, made: random.random(s, made, X, 9), 4.0, 80 / 12),
    "multinomial": (
        lambda s, made: random.multinomial(s, made, torch.tensor([1.0, 0.0, 3.0]), COUNT, True),
        1.5,
        0.75,
    ),
    "multinomial, one of each row": (
        lambda s, made: random.multinomial(
            s, made, torch.tensor([[1.0, 0.0, 3.0]]).expand(COUNT, 3), 1
        ),
        1.5,
        0.75,
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", MOMENTS)
def test_mean_and_variance(name: str, dtype: torch.dtype) -> None:
    draw, mean, variance = MOMENTS[name]
    drawn = draw(seed(), Made((COUNT,), dtype)).double()
    assert abs(float(drawn.mean()) - mean) < 5 * math.sqrt(variance / COUNT)
    fourth = float(((drawn - mean) ** 4).mean())
    deviation = math.sqrt(abs(fourth - variance**2) / COUNT)
    assert abs(float(drawn.var()) - variance) < 5 * deviation + 1e-3 * variance


def test_half_of_a_cauchy_distribution_is_within_its_scale() -> None:
    drawn = random.cauchy(seed(), Made((COUNT,), torch.float32), X, 1.0, 2.0)
    inside = float(((drawn - 1).abs() < 2).double().mean())
    assert abs(inside - 0.5) < 5 * 0.5 / math.sqrt(COUNT)


@pytest.mark.parametrize("dtype", random.FRACTION_BITS, ids=str)
def test_a_fraction_is_below_one_in_every_type(dtype: torch.dtype) -> None:
    drawn = random.rand(seed(), Made((COUNT,), dtype))
    assert drawn.dtype == dtype
    assert 0 <= float(drawn.min()) and float(drawn.max()) < 1
    bits = random.FRACTION_BITS[dtype]
    assert torch.equal(drawn.double() * 2**bits, (drawn.double() * 2**bits).round())


@pytest.mark.parametrize("dtype", random.FRACTION_BITS, ids=str)
def test_logarithms_stay_finite(dtype: torch.dtype) -> None:
    made = Made((COUNT,), dtype)
    for drawn in (random.randn(seed(), made), random.exponential(seed(), made, X).log()):
        assert drawn.dtype == dtype and bool(drawn.isfinite().all())


def test_integers_keep_to_their_bounds() -> None:
    made = Made((COUNT,), torch.int64)
    assert set(random.randint_from(seed(), made, -2, 3, [COUNT]).tolist()) == {-2, -1, 0, 1, 2}
    assert int(random.random(seed(), made, X).min()) >= 0
    octets = random.random(seed(), Made((COUNT,), torch.uint8), X)
    assert set(octets.tolist()) == set(range(256))


def test_a_permutation_holds_every_number_once_at_every_place() -> None:
    made = Made((5,), torch.int64)
    drawn = torch.stack([random.randperm(s, made, 5) for s in random.seeds_of_step(1, 1, 500)[1]])
    assert torch.equal(drawn.sort().values, torch.arange(5).expand(500, 5))
    for place in range(5):
        assert abs(chi_square(drawn[:, place], 5)) < 5


def test_multinomial_without_replacement_draws_each_place_once() -> None:
    weights = torch.tensor([0.1, 0.0, 0.7, 0.2])
    drawn = random.multinomial(seed(), Made((3,), torch.int64), weights, 3)
    assert sorted(drawn.tolist()) == [0, 2, 3]


@pytest.mark.parametrize(("p", "train"), [(0.0, True), (1.0, True), (0.5, False), (0.0, None)])
def test_dropout_without_chance_is_atens(p: float, train: bool | None) -> None:
    x = torch.linspace(-1, 1, 12).view(3, 4)
    found = random.native_dropout(seed(), Made((3, 4), x.dtype), x, p, train)
    for actual, expected in zip(found, torch.native_dropout(x, p, train)):
        assert actual.dtype == expected.dtype and torch.equal(actual, expected)


def test_dropout_keeps_its_share_and_scales_it() -> None:
    x = torch.full((COUNT,), 3.0)
    y, mask = random.native_dropout(seed(), Made((COUNT,), x.dtype), x, 0.2, True)
    assert torch.equal(y, x * mask * 1.25)
    assert abs(float(mask.double().mean()) - 0.8) < 5 * 0.4 / math.sqrt(COUNT)
