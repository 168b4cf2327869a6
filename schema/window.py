"""The parts of a file that the reader looks at, a page at a time; nothing is mapped. It must not interpret them."""

from typing import Final

from edge_opt.schema.data import Source

_PAGE_BITS: Final = 14
_PAGE: Final = 1 << _PAGE_BITS

# Tables are read nearly in the order in which they lie: of a 270M, with 128 pages at hand instead of 1024, 563 are read
# instead of 417.
_MOST_PAGES: Final = 128


class Window:
    """Gives any stretch of a source as bytes and a position in them; remembers up to 2 MiB of pages."""

    __slots__ = ("_content", "_end", "_pages", "_source", "loaded")

    def __init__(self, source: Source, end: int) -> None:
        """`end`: what lies behind it is never read."""
        self._source = source
        self._end = end
        self._content = source.content
        self._pages: dict[int, bytes] = {}
        self.loaded = 0

    def at(self, position: int, length: int) -> tuple[bytes, int]:
        """A piece of the source that holds the `length` bytes from `position` on, and where in it they start.

        Raises:
            ModelFormatError: the file was shortened meanwhile, or cannot be read.
        """
        if self._content is not None:
            return self._content, position
        page = self._pages.get(position >> _PAGE_BITS)
        start = position & (_PAGE - 1)
        if page is not None and start + length <= len(page):
            return page, start
        if start + length > _PAGE:
            self.loaded += 1 + length // _PAGE
            return self._source.view(position, length).tobytes(), 0
        return self._load(position >> _PAGE_BITS), start

    def _load(self, number: int) -> bytes:
        if len(self._pages) >= _MOST_PAGES:
            self._pages.clear()
        begin = number << _PAGE_BITS
        page = self._source.view(begin, min(_PAGE, self._end - begin)).tobytes()
        self._pages[number] = page
        self.loaded += 1
        return page
