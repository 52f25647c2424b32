"""Files and folders by path or URL (local, s3://, gs://, az://), written atomically."""

# ruff: noqa: F401  # what this room is to others

from rayrec.storage.files import (
    Scratch,
    clone_file,
    copy_file,
    exists,
    json_text,
    locked,
    make_temporary_folder,
    read_bytes,
    read_into,
    read_json,
    read_stream,
    read_text,
    remove_file,
    size_of,
    sync,
    write_bytes,
    write_json,
    write_stream,
    writing,
)
from rayrec.storage.filesystems import delta_options, resolve
from rayrec.storage.folders import (
    JOB_FOLDER,
    PARTITION,
    File,
    copy_files,
    files_below,
    files_in,
    find_files,
    list_files,
    list_folder,
    make_folder,
    natural_order,
    remove_folder,
    writing_folder,
)
from rayrec.storage.lakehouse import TableError, split_version, table_kind, with_version
from rayrec.storage.range_reader import in_order, in_parallel, read_ahead
from rayrec.storage.retry import OUTAGE_S, outage_s, retry_timeout
from rayrec.storage.urls import absolute, folder_names, home, is_url, join, name_of, parent_folder
