"""What a process knows of another one that failed, in words."""

from __future__ import annotations

from fxpipe.lowering.news import Peer


def place(peer: Peer, step: int = 0) -> str:
    """Where a rank was; it is at least in the step that this rank is in, which began for all."""
    if peer.report is None:
        return "before its first step"
    if peer.report.step < step:
        return f"at the start of step {step}"
    return peer.report.where


def ended(peer: Peer, step: int) -> str:
    if peer.farewell:
        return f"rank {peer.rank} ended {place(peer)}: {peer.farewell}"
    return (
        f"rank {peer.rank} died, last heard of {place(peer, step)}: its process ended without a "
        f"word, so it was killed or crashed"
    )


def silent(peer: Peer, step: int, seconds: float, limit: float) -> str:
    if peer.report is None:
        return (
            f"rank {peer.rank} stalled before its first step: it has not come there within "
            f"timeout={limit:g} s; if it only is slow, give a longer timeout"
        )
    return (
        f"rank {peer.rank} stalled, last heard of {place(peer, step)}: its process has "
        f"not answered for {seconds:.1f} s, longer than timeout={limit:g}; it was stopped, or its "
        f"machine is lost"
    )


def stalled(peer: Peer, seconds: float, limit: float) -> str:
    assert peer.report is not None
    return (
        f"rank {peer.rank} stalled {peer.report.where}: it has been there for {seconds:.1f} s, "
        f"longer than timeout={limit:g}; if it only is slow, give a longer timeout"
    )


def in_short(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
