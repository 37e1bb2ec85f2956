"""Every error that fxpipe raises on purpose.

FxpipeError
|-- OptionError      an option has an unknown name, a wrong type or a value that fits nothing
|-- CaptureError     the model cannot become one graph of one microbatch
|-- ModelError       the graph was captured, but cannot be pipelined with the same numbers
|-- ScheduleError    a schedule is malformed, incomplete or would deadlock
|-- PassError        a pass failed, or broke a promise that is checked after it
|-- ParityError      a checked step gives other numbers than plain eager
`-- RankError        a rank raised, died, stalled, or disagrees with the others
"""


class FxpipeError(Exception):
    """Base of all errors raised by fxpipe."""


class OptionError(FxpipeError, ValueError):
    """An option has an unknown name, a wrong type or a value that fits nothing."""


class CaptureError(FxpipeError, RuntimeError):
    """The model cannot become one graph of one microbatch."""


class ModelError(FxpipeError, RuntimeError):
    """The graph was captured, but cannot be pipelined with the same numbers."""


class ScheduleError(FxpipeError, ValueError):
    """A schedule is malformed, incomplete or would deadlock."""


class PassError(FxpipeError, RuntimeError):
    """A pass failed, or broke a promise that is checked after it."""


class ParityError(FxpipeError, AssertionError):
    """A checked step gives other numbers than plain eager."""


class RankError(FxpipeError, RuntimeError):
    """A rank raised, died, stalled, or disagrees with the others."""
