"""What can go wrong that a user can mend. The messages are one line: what was wrong, what came, what to do."""


class UsageError(Exception):
    """Something that was asked for cannot be done."""


class Diverged(Exception):
    """Training went where no number is."""
