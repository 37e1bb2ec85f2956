"""What holds for the tests of lowering: a quiet trace."""

import logging

# torch writes a program's text into its structured trace where that has a handler. pytest gives
# one to every logger that does not propagate, and so every pass would print its program.
logging.getLogger("torch.__trace").propagate = True
