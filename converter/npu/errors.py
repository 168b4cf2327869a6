"""What can go wrong when a vendor's compiler is asked."""

from edge_opt.schema.errors import EdgeOptError, UsageError


class CompilerMissingError(UsageError):
    """The compiler, or the vendor's libraries that it needs, are not on this machine."""


class CompilerFailedError(EdgeOptError):
    """The compiler ended without a result, or printed figures that we cannot read."""


class CompilerTimeoutError(CompilerFailedError):
    """The compiler was not done in the time that it was given; with more it may be."""
