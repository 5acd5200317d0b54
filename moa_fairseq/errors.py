"""The error that a user can mend."""


class UsageError(ValueError, SystemExit):
    """A wrong option or input, with the flag, the value and the remedy in one line.

    To Python callers it is a `ValueError`. Uncaught on a command line it is a `SystemExit`:
    the message goes to standard error without a traceback, and the exit status is 1. (hydra
    catches every `ValueError` and prints a traceback before the message.)
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.code = message


class CheckpointMismatch(SystemExit):
    """A checkpoint of another model, where fairseq loads it.

    Only a `SystemExit`: fairseq replaces every `Exception` there by one that does not say why.
    """
