"""A schedule's name and the sizes become a Schedule: `build("1f1b", stages=4, microbatches=8)`."""

from fxpipe.schedules import (  # noqa: F401 - importing enters the families
    bitpipe,
    chimera,
    controllable,
    dualpipe,
    linear,
    looped,
    wave,
)
from fxpipe.schedules.builder import build, families, resolve, stages_for
from fxpipe.schedules.custom import load, register, save
from fxpipe.schedules.family import Family
from fxpipe.schedules.fit import first_microbatches
from fxpipe.schedules.torch_csv import from_csv, to_csv

__all__ = [
    "Family",
    "build",
    "families",
    "first_microbatches",
    "from_csv",
    "load",
    "register",
    "resolve",
    "save",
    "stages_for",
    "to_csv",
]
