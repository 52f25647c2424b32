"""Parsing and joining of paths and URLs. Opens nothing."""

import os
import posixpath
import re
from collections.abc import Sequence
from typing import Final
from urllib.parse import parse_qsl, unquote

from rayrec.config import InputError

_URL: Final = re.compile(r"^[a-zA-Z][a-zA-Z0-9+.-]*://")
_OBJECT_STORES: Final = {
    "s3": "an S3",
    "gs": "a Google Cloud Storage",
    "gcs": "a Google Cloud Storage",
    "az": "an Azure",
    "abfs": "an Azure",
    "abfss": "an Azure",
}


def is_url(path: str) -> bool:
    return _URL.match(path) is not None


def url_scheme(path: str) -> str:
    """Return the scheme in lower case, or "" for a local path."""
    return path.partition("://")[0].lower() if is_url(path) else ""


def in_object_store(path: str) -> bool:
    """Return whether a path is in an object store, which has no folders except in object names."""
    return url_scheme(path) in _OBJECT_STORES


def absolute(path: str) -> str:
    """Return a path that is valid for all processes on this machine. URLs are returned unchanged.
    Raises InputError for ~ if this user has no home directory.
    """
    if is_url(path):
        return path
    if path == "~" or path.startswith("~/"):
        return os.path.abspath(home() + path[1:])
    return os.path.abspath(os.path.expanduser(path))


def home() -> str:
    """Return the home directory. Raises InputError if HOME is not set and the system's list of
    users has no directory for this user, as in a container with the user of another machine.
    """
    folder = os.path.expanduser("~")
    if folder == "~":
        raise InputError(
            f"HOME: not set, and the system has no home directory for user {os.getuid()}. Set HOME "
            "to a folder that this user can write"
        )
    return folder


def local_path(path: str) -> str | None:
    """Return the absolute path on this machine's file systems, also for file:// URLs. None for
    other URLs.
    """
    if path.startswith("file:///"):
        return unquote(path.removeprefix("file://"))
    return None if is_url(path) else absolute(path)


def join(folder: str, *names: str) -> str:
    """Join a folder and names. Options of an object store's URL (?region=...) stay at the end."""
    body, options = split_options(folder)
    return posixpath.join(body, *names) + options


def parent_folder(path: str) -> str:
    """Return the parent folder. Options of an object store's URL stay at the end."""
    body, options = split_options(path)
    return posixpath.dirname(body) + options


def name_of(path: str) -> str:
    """Return the last component of a path, without options."""
    return posixpath.basename(split_options(path)[0])


def folder_names(path: str) -> list[str]:
    """Return the names of the folders above a file, the outermost first, without options; of a
    file:// URL as on the disk.
    """
    body = unquote(path) if url_scheme(path) == "file" else split_options(path)[0]
    return posixpath.dirname(body).split("/")


def bucket_url(path: str) -> str:
    """Return the URL of the bucket (Azure: container) of an object store's URL, without options."""
    return "/".join(split_options(path)[0].split("/")[:3])


def to_url(inner: str, path: str) -> str:
    """Convert a path within the filesystem of `path` into a path or URL, with the scheme, account
    and options of `path`.
    """
    if not is_url(path):
        return inner
    if not in_object_store(path):
        # `local_path` decodes it
        inner = inner.replace("%", "%25") if url_scheme(path) == "file" else inner
        return path[: path.index("://") + 3] + inner
    within = inner.partition("/")[2]
    return bucket_url(path) + (f"/{within}" if within else "") + split_options(path)[1]


def split_options(path: str) -> tuple[str, str]:
    """Split an object store's URL into its body and its options, with their question mark. Other
    paths have the options "".
    """
    body, question, query = path.rpartition("?")
    # the ? belongs to a glob
    if not in_object_store(path) or not question or not re.match(r"\w+=", query):
        return path, ""
    return body, question + query


def url_options(path: str, supported: Sequence[str]) -> dict[str, str]:
    """Return the options of an object store's URL. Raises InputError for an unknown option."""
    options = dict(parse_qsl(split_options(path)[1].removeprefix("?")))
    unknown = sorted(options.keys() - set(supported))
    if unknown:
        hint = f"there are {', '.join(supported)}" if supported else "it has none"
        raise InputError(
            f"{path}: {unknown[0]} is not an option of {_OBJECT_STORES[url_scheme(path)]} URL; "
            f"{hint}"
        )
    return options
