"""Errors of the native runtime and its process."""

from edge_opt.base.errors import EdgeOptError


class RuntimeUnavailable(EdgeOptError):  # noqa: N818 - not an error in a model
    """The runtime's process cannot be started on this machine, whatever the model."""


class RuntimeFailed(EdgeOptError):  # noqa: N818 - its kinds say what the runtime did
    """The native runtime gave no result for this model."""


class RuntimeRefused(RuntimeFailed):
    """The runtime declined the model or its inputs; `reason` is the runtime's own message."""

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class RuntimeCrashed(RuntimeFailed):
    """The runtime's process ended in the middle of a request."""


class RuntimeTimedOut(RuntimeFailed):
    """The runtime gave no answer within the time limit and was stopped."""


class DeclinedError(Exception):
    """In the worker: the runtime rejects a model or its inputs; the message is its reason."""
