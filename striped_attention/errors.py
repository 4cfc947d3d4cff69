"""Errors that a user can mend, and warnings that a user can filter.

The messages are one line: what was wrong, what came, what to do.
"""


class UsageError(Exception):
    """Something that was asked for cannot be done."""


class Diverged(Exception):
    """The loss or the norm of the gradients became non-finite."""


class SlowKernelWarning(UserWarning):
    """`kernel="auto"` had to take a slow kernel on a device that has a faster one, which cannot do what is asked."""
