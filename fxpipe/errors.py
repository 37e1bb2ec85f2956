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
    """An option has an unknown name, a wrong type or a value that fits nothing.

    The message names the option, what was found, and a right value; correct it.
    """


class CaptureError(FxpipeError, RuntimeError):
    """The model cannot become one graph of one microbatch.

    The message names the line of the model: take out what breaks the graph there (a print, a branch
    on a tensor's value), or leave that part out of the compiled module.
    """


class ModelError(FxpipeError, RuntimeError):
    """The graph was captured, but cannot be pipelined with the same numbers.

    The message names the line and why microbatches would differ there; change it, or say with the
    options `batch_dims`, `loss` or `loss_reduction` what is meant.
    """


class ScheduleError(FxpipeError, ValueError):
    """A schedule is malformed, incomplete or would deadlock.

    The message shows the place in a grid: complete the schedule, or move the step that waits.
    `fxpipe schedule FILE` checks a file without a model.
    """


class PassError(FxpipeError, RuntimeError):
    """A pass failed, or broke a promise that is checked after it.

    `FXPIPE_DUMP=dumps` shows the program before the pass; `FXPIPE_CHECK=1` finds the first pass
    that breaks a promise; an optional one can be left out with `passes={'name': False}`.
    """


class ParityError(FxpipeError, AssertionError):
    """A checked step gives other numbers than plain eager.

    The message names the first task and line that differs, and passes of your own that may be the
    cause: leave those out first. What then differs, and not by contract (random numbers,
    BatchNorm), is a defect of fxpipe: report it with the dump.
    """


class RankError(FxpipeError, RuntimeError):
    """A rank raised, died, stalled, or disagrees with the others.

    The message names rank, stage, action and cause: look at that rank's own error first. For a rank
    that is merely slow, raise the option `timeout`.
    """
