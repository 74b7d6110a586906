"""Errors and warnings of a sandbox that cannot work."""


class SandboxUnavailableError(RuntimeError):
    """This machine can't isolate untrusted code; the message says what is missing."""


class SandboxStartError(RuntimeError):
    """A sandbox did not start, though it did when it was constructed."""


class UnsandboxedCodeWarning(UserWarning):
    """Untrusted code runs with the rights of this process, because somebody opted out."""
