"""The likely cause of a text log whose lines do not parse: a header, another separator, encoding or kind of file."""

from __future__ import annotations

HEAD_BYTES = 64 << 10
"""Bytes of a file's start that tell its kind."""
_MAGIC = {
    b"\xff\xfe": "it is UTF-16; convert it (iconv -f UTF-16 -t UTF-8)",
    b"\xfe\xff": "it is UTF-16; convert it (iconv -f UTF-16 -t UTF-8)",
    b"\xef\xbb\xbf": "it starts with a byte order mark; remove these 3 bytes",
    b"PAR1": "it is Parquet; give it a name that ends in .parquet",
    b"\x28\xb5\x2f\xfd": "it is compressed with zstd; unpack it",
    b"BZh": "it is compressed with bzip2; unpack it",
    b"\xfd7zXZ": "it is compressed with xz; unpack it",
    b"PK\x03\x04": "it is a zip archive; unpack it",
    b"\x1f\x8b": "it is compressed with gzip; unpack it",
    b"ARROW1": "it is an Arrow file; write it as Parquet",
}


def likely_cause(head: bytes) -> str:
    """One sentence on the first bytes of a text log in which many lines are faulty, with the remedy; empty if nothing is
    conspicuous."""
    for magic, cause in _MAGIC.items():
        if head.startswith(magic):
            return cause
    if b"\0" in head:
        return "it is a binary file or UTF-16, not text; convert it"
    lines = [line.rstrip(b"\r") for line in head.split(b"\n")]
    first = lines[0]
    if b"\t" not in first:
        for separator, name in ((b",", "commas"), (b";", "semicolons"), (b"|", "bars"), (b" ", "blanks")):
            if first.count(separator) >= 2:
                return f"its columns are separated by {name}, not tabs; add a header and name it .csv, or convert it"
        return "its first line has no tab, and columns are separated by tabs"
    fields = first.split(b"\t")
    words = [field for field in fields if field.strip() and not field[:1].isdigit() and field[:1] != b"-"]
    if fields[0] and not fields[0].isdigit() and len(words) > len(fields) // 2:
        return "its first line looks like a header; remove it (tail -n +2)"
    return ""
