"""Images of a source by their names in a ground truth."""

from __future__ import annotations

import os
from collections import defaultdict

from selftask.data.source import Source
from selftask.errors import UserError, nearest


class ImageNames:
    """Lookup of images by path or the end of a path, with or without the extension."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._by_stem: dict[str, list[int]] = defaultdict(list)
        for index in range(len(source)):
            self._by_stem[_stem(source.path(index))].append(index)

    def find(self, name: str, where: str) -> int:
        """Return the index of the image with the name ``name``.

        Args:
            name: ``all_souls_000013``, ``jpg/all_souls_000013.jpg`` or a whole path.
            where: Where the name was read, such as a file and line, for error messages.

        Raises:
            UserError: If no image or several images match.
        """
        end = "/" + name.removeprefix("./")
        matches = [
            index
            for index in self._by_stem.get(_stem(name), ())
            if (path := "/" + self._source.path(index)).endswith(end)
            or os.path.splitext(path)[0].endswith(end)
        ]
        if len(matches) == 1:
            return matches[0]
        if matches:
            first = ", ".join(self._source.path(index) for index in matches[:2])
            raise UserError(f"{where}: {name!r} may be any of {len(matches)} images: {first}, ...")
        hint = nearest(_stem(name), self._by_stem, show=4)
        raise UserError(f"{where}: no image of data is called {name!r}; {hint}")


def _stem(path: str) -> str:
    return os.path.basename(path).partition(".")[0]
