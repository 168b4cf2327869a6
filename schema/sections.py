"""Files made of sections, some of them models: how one is written with other models. It knows no format."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple, Protocol

from edge_opt.base.atomic import replacing, resolve_target
from edge_opt.schema.data import Source, copy_range
from edge_opt.schema.table import Table
from edge_opt.schema.writer import Placement, Progress, counter, place_model, write_placed

Content = Table | bytes
"""What a section is replaced with: a model's root table, or the bytes of any other section."""


class Section(Protocol):
    """One part of a bundle."""

    @property
    def is_model(self) -> bool:
        """True for a TFLite model."""

    @property
    def model_type(self) -> str:
        """What a model is for, e.g. `prefill_decode`; empty for other sections."""


def place_content(content: Content) -> Placement:
    """A model with its weights, or bytes as they are."""
    if isinstance(content, bytes):
        return Placement(bytearray(content), [], len(content))
    return place_model(content)


class Place(NamedTuple):
    """Where `size` bytes go: a new section, or those from `start` of the bundle on."""

    begin: int
    size: int
    start: int
    placement: Placement | None

    @property
    def stop(self) -> int:
        """The byte behind the last one."""
        return self.begin + self.size

    def write(self, source: Source, target: int, advance: Callable[[int], None]) -> None:
        """Write the bytes to a descriptor."""
        if self.placement is not None:
            write_placed(self.placement, target, self.begin, advance)
            return
        assert source.fd is not None
        copy_range(source.fd, source.base + self.start, target, self.begin, self.size, advance=advance)


class Bundle(ABC):
    """An open bundle: its file, and its sections."""

    source: Source
    sections: Sequence[Section]
    suffix: ClassVar[str]
    """What the names of such files end in."""

    @property
    def models(self) -> dict[int, str]:
        """What each section that is a model is for, by its index."""
        return {index: one.model_type for index, one in enumerate(self.sections) if one.is_model}

    @abstractmethod
    def content(self, index: int) -> Source:
        """The bytes of a section, as something that `read_model` reads.

        Raises:
            ModelFormatError: the format tells that they are damaged.
        """

    @abstractmethod
    def _lay_out(self, contents: Mapping[int, Content]) -> tuple[list[Place], Callable[[int], None]]:
        """Where each section goes, and what writes the rest of the file once they are written."""

    def write(
        self,
        contents: Mapping[int, Content],
        path: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        progress: Progress | None = None,
        check: Callable[[Path], None] | None = None,
    ) -> None:
        """Write the bundle with some sections (by index) replaced; weights go from file to file.

        Raises:
            UsageError, OutputError, ModelFormatError: as `write_model`; also for a damaged section.
        """
        inputs = (self.source.identity,)
        resolve_target(path, overwrite=overwrite, inputs=inputs)
        places, complete = self._lay_out(contents)
        distinct = list({place.begin: place for place in places}.values())
        advance = counter(sum(place.size for place in distinct), progress)
        with replacing(path, overwrite=overwrite, inputs=inputs, check=check) as target:
            os.ftruncate(target, max(place.stop for place in places))  # what no section fills is zeros
            for place in distinct:
                place.write(self.source, target, advance)
            complete(target)
            self.source.check_unchanged()
