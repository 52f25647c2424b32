"""Reads and writes files by path or URL (local, s3:// and whatever else pyarrow knows), whole or not at all."""

from rayrec.storage.files import (
    copy_file,
    exists,
    read_bytes,
    read_into,
    read_json,
    read_stream,
    remove_file,
    size_of,
    sync,
    write_bytes,
    write_json,
    write_stream,
    writing,
)
from rayrec.storage.folders import (
    File,
    copy_files,
    files_in,
    list_files,
    list_folder,
    make_folder,
    remove_folder,
    writing_folder,
)
from rayrec.storage.outages import OUTAGE_S, patience
from rayrec.storage.stores import absolute, is_url, join, resolve

__all__ = [
    "OUTAGE_S",
    "File",
    "absolute",
    "copy_file",
    "copy_files",
    "exists",
    "files_in",
    "is_url",
    "join",
    "list_files",
    "list_folder",
    "make_folder",
    "patience",
    "read_bytes",
    "read_into",
    "read_json",
    "read_stream",
    "remove_file",
    "remove_folder",
    "resolve",
    "size_of",
    "sync",
    "write_bytes",
    "write_json",
    "write_stream",
    "writing",
    "writing_folder",
]
