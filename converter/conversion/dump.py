"""The text of a graph before and after each pass, as numbered files: a diff of two is what a pass did."""

import re

from edge_opt.base.atomic import AnyPath, path_of, write_whole
from edge_opt.base.errors import OutputError, UsageError
from edge_opt.ir import Subgraph
from edge_opt.ir.text import subgraph_text

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.-]+")


class Dump:
    """A folder of texts, which is made with the first of them if it does not exist.

    Raises:
        UsageError: the folder has files.
        OutputError: it cannot be read.
    """

    def __init__(self, folder: AnyPath) -> None:
        self._folder = path_of(folder, "dump")
        self._count = 0
        try:
            is_used = self._folder.exists() and any(self._folder.iterdir())
        except OSError as error:
            raise self._unusable(error) from error
        if is_used:
            raise UsageError(f"folder {folder} is not empty: give a new one for the texts")

    def write(self, signature: str, step: str, graph: Subgraph) -> None:
        """Write the text of a signature after a step; OutputError if that fails."""
        names = (_NOT_IN_NAMES.sub("_", text)[:100] for text in (signature, step))
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unusable(error) from error
        path = self._folder / f"{self._count:03}-{'-'.join(names)}.txt"
        write_whole(path, subgraph_text(graph).encode(errors="replace"), overwrite=False)
        self._count += 1

    def _unusable(self, error: OSError) -> OutputError:
        return OutputError(
            f"folder {self._folder} cannot be used: {error.strerror}, choose another"
        )
