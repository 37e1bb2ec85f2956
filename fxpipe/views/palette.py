"""Kinds of action and stages -> the colours that pictures, pages and graphs share."""

from __future__ import annotations

from fxpipe.schedule import Kind

# Okabe and Ito's palette, which people with any colour vision tell apart; black text reads on all.
KINDS = {Kind.F: "#56B4E9", Kind.I: "#E69F00", Kind.W: "#009E73", Kind.B: "#D55E00"}
MEANINGS = {
    Kind.F: "F  forward",
    Kind.I: "I  input gradient",
    Kind.W: "W  weight gradient",
    Kind.B: "B  I and W as one",
}
# Where a rank's time goes besides its tasks; idle has the colour of the page behind it.
PAIR, COMMUNICATION, HOST = "#CC79A7", "#8FA3BF", "#B3AFA6"
IDLE = "#F2F2F2"
TEXT = "#1A1A1A"
# Paul Tol's light palette and two of his muted one: black text reads on all; stages beyond the
# tenth begin again.
STAGES = (
    "#77AADD", "#EE8866", "#EEDD88", "#FFAABB", "#99DDFF",
    "#44BB99", "#BBCC33", "#AAAA00", "#CC99BB", "#DDDDDD",
)  # fmt: skip


def of_stage(stage: int) -> str:
    """The colour of a stage, as `#RRGGBB`."""
    return STAGES[stage % len(STAGES)]
