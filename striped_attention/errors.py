"""Errors that users can fix, and warnings that users can filter.

Every message is one line: the rule, what was received, what to do instead.
"""


class UsageError(Exception):
    """A request that cannot be carried out."""


class Diverged(Exception):
    """The loss or the norm of the gradients became non-finite."""


class SlowKernelWarning(UserWarning):
    """`kernel="auto"` took a slow kernel because the device's faster kernel does not support the call."""
