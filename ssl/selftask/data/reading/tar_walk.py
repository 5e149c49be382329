"""Listing of the members of a tar file from its headers, without reading their content."""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from selftask.errors import UserError

BLOCK = 512
MAX_TEXT = 1 << 20  # bytes of a long name, or of pax records
MAX_SIZE = 1 << 48  # bytes of a member
_FILES = b"0\x007"  # types of regular files
_LENGTH = re.compile(rb"(\d{1,7}) ")
_GZIP, _XZ, _BZIP2, _ZSTD = b"\x1f\x8b", b"\xfd7zXZ", b"BZh", b"\x28\xb5\x2f\xfd"


class Member(NamedTuple):
    """A regular file in a tar."""

    name: str
    offset: int  # start of its content, in bytes
    size: int


class Damaged(Exception):
    """Raised at a damaged header, at byte ``offset``; the members before it are valid."""

    def __init__(self, offset: int) -> None:
        self.offset = offset
        super().__init__(offset)


def walk(file: BinaryIO, path: str) -> Iterator[Member]:
    """Yield the regular files of a tar in order; supports ustar, GNU long names and pax.

    A truncated file is not an error: the content of its last member may be incomplete.

    Args:
        file: The tar, a seekable binary file.
        path: Its path, for messages.

    Raises:
        UserError: If the file is compressed, since members could then not be read alone.
        Damaged: If a header is damaged.
    """
    offset = 0
    long_name: str | None = None
    pax: dict[str, str] = {}
    if _read(file, 0, BLOCK).startswith((_GZIP, _XZ, _BZIP2, _ZSTD)):
        raise UserError(
            f"data: {path} is compressed: single images cannot be found in it; unpack it, a plain "
            ".tar of JPEGs is no larger"
        )
    while len(header := _read(file, offset, BLOCK)) == BLOCK:
        if not header.strip(b"\0"):
            return
        if not _is_header(header):
            raise Damaged(offset)
        kind, size = header[156], _size(header, offset)
        content = offset + BLOCK
        if kind in b"xL":  # about the next member: pax records or a long name
            if size > MAX_TEXT:
                raise Damaged(offset)
            text = _read(file, content, size)
            if kind == ord("L"):
                long_name = _text(text)
            else:
                pax = _pax_records(text)
        elif kind not in b"gK":  # about all members, or the long target of a link: ignored
            size = _number(pax["size"], 10, offset) if "size" in pax else size
            if kind in _FILES:
                yield Member(pax.get("path") or long_name or _name(header), content, size)
            long_name, pax = None, {}
        offset = content + -(-size // BLOCK) * BLOCK


def _read(file: BinaryIO, offset: int, size: int) -> bytes:
    file.seek(offset)
    return file.read(size)


def _is_header(header: bytes) -> bool:
    try:
        stated = int(_text(header[148:156]).strip() or "0", 8)
    except ValueError:
        return False
    unsigned = sum(header) - sum(header[148:156]) + 8 * ord(" ")
    return stated == unsigned or stated in tarfile.calc_chksums(header)  # type: ignore[attr-defined]


def _size(header: bytes, offset: int) -> int:
    if header[124] & 0x80:  # base 256, for 8 GiB and more; 0xff starts a negative number
        size = int.from_bytes(header[124:136], "big") - (0x80 << 88)
        if size > MAX_SIZE:
            raise Damaged(offset)
        return size
    return _number(_text(header[124:136]).strip() or "0", 8, offset)


def _number(text: str, base: int, offset: int) -> int:
    """Parse a size in bytes; raises Damaged.

    Signs, which ``int`` accepts, are rejected: a negative size would loop forever.
    """
    if not text.isascii() or not text.isdigit() or len(text) > 20:
        raise Damaged(offset)
    try:
        size = int(text, base)
    except ValueError:  # not octal
        raise Damaged(offset) from None
    if size > MAX_SIZE:
        raise Damaged(offset)
    return size


def _name(header: bytes) -> str:
    name = _text(header[:100])
    prefix = _text(header[345:500]) if header[257:263] == b"ustar\0" else ""
    return f"{prefix}/{name}" if prefix else name


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "surrogateescape")


def _pax_records(text: bytes) -> dict[str, str]:
    """Parse records such as ``30 mtime=1700000000.1234567\\n``; the length includes itself."""
    records: dict[str, str] = {}
    start = 0
    while match := _LENGTH.match(text, start):
        end = start + int(match[1])
        if end <= match.end():
            break
        key, _, value = text[match.end() : end - 1].partition(b"=")
        records[_text(key)] = value.decode("utf-8", "surrogateescape")
        start = end
    return records
