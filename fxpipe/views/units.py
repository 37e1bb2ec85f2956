"""Numbers -> text with a unit, for reports: `1.25 ms`, `96.2 MB`, `1.4 Gflop`."""

from __future__ import annotations

_STEPS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def seconds(value: float) -> str:
    """1.5 s, 12.3 ms, 4.2 us."""
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{1e9 * value:.3g} ns" if value else "0 s"


def scaled(value: float, unit: str) -> str:
    """`scaled(1234567, "B")` is 1.23 MB."""
    for size, prefix in _STEPS:
        if value >= size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def size(value: float) -> str:
    return scaled(value, "B")


def count(value: int) -> str:
    """1,234,567 as 1.23 M; below 10,000 in full."""
    return str(value) if value < 10_000 else scaled(value, "")


def plural(number: int, noun: str, ending: str = "s") -> str:
    """1 message, 2 messages."""
    return f"{number} {noun}{'' if number == 1 else ending}"


def percent(part: float) -> str:
    return f"{100 * part:.1f} %"
