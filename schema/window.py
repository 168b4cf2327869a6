"""The parts of a file that the reader looks at, a page at a time; nothing is mapped. It must not interpret them."""

from typing import Final

from edge_opt.schema.data import Source

_PAGE_BITS: Final = 14
PAGE: Final = 1 << _PAGE_BITS

# Weights lie between the tables of a file that was exported in one piece: a few hundred pages of it hold tables.
_MOST_PAGES: Final = 1024


class Window:
    """Gives any stretch of a source as bytes and a position in them; remembers up to 16 MiB of pages."""

    __slots__ = ("_content", "_end", "_pages", "_source", "loaded")

    def __init__(self, source: Source, end: int) -> None:
        """`end`: nobody will ask for what lies behind it."""
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
        start = position & (PAGE - 1)
        if page is not None and start + length <= len(page):
            return page, start
        if start + length > PAGE:
            self.loaded += 1 + length // PAGE
            return self._source.view(position, length).tobytes(), 0
        return self._load(position >> _PAGE_BITS), start

    def _load(self, number: int) -> bytes:
        if len(self._pages) >= _MOST_PAGES:
            self._pages.clear()
        begin = number << _PAGE_BITS
        page = self._source.view(begin, min(PAGE, self._end - begin)).tobytes()
        self._pages[number] = page
        self.loaded += 1
        return page
