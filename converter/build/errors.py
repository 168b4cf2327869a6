"""What can go wrong while a bundle is built, besides bad input; `result` has what was done until then."""

from edge_opt.schema.errors import EdgeOptError


class StageFailedError(EdgeOptError):
    """A tool of a stage failed."""


class BuildCheckError(EdgeOptError):
    """The compiled bundle is not what it has to be."""

    exit_code = 1
