"""What stops a rule: a refusal, or that too little is known. It must not know any rule."""

from __future__ import annotations

from edge_opt.schema.errors import EdgeOptError


class ShapeError(EdgeOptError):
    """The shapes, types or attributes of an operation cannot go together.

    `detail` is the sentence itself, `where` the place ("subgraph 'decode', operator 34 (BATCH_MATMUL)") or
    None.
    """

    def __init__(self, detail: str, where: str | None = None) -> None:
        super().__init__(f"{where}: {detail}" if where else detail)
        self.detail = detail
        self.where = where

    def at(self, where: str) -> ShapeError:
        """Return the same error with its place; a place that is already known stays."""
        return self if self.where else ShapeError(self.detail, where)


class UnknownError(Exception):
    """A rule asked for a rank or a number that nobody knows: nothing is derived. It never leaves this package."""
