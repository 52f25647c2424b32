"""Tells trouble of a store that passes from trouble that the user must fix, and waits for the former to pass."""

from __future__ import annotations

import contextvars
import logging
import os
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Literal, TypeVar

from rayrec.config import InputError

_logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")

OUTAGE_S: Final = 60.0
"""How long a store may be out before an operation on it fails; RAYREC_STORAGE_OUTAGE_S in the environment overrides it."""

_FIRST_WAIT_S: Final = 0.1
_LONGEST_WAIT_S: Final = 5.0

_limit_s: contextvars.ContextVar[float | None] = contextvars.ContextVar("storage_outage_s", default=None)

Trouble = Literal["passing", "denied", "no bucket", "region", "certificate", "other"]

# pyarrow passes on the AWS SDK's names of errors; where a store gives none (it need not), the HTTP status alone.
_NAME: Final = re.compile(r"AWS Error (\w+)(?: \(HTTP status (\d+)\))?(?: during \w+ operation: (.*))?", re.DOTALL)
_OF_CREDENTIALS: Final = re.compile(
    r"(No response body\.)?$|.*(token|credential|access key|signature|authori[sz])", re.I | re.S
)
_CURL: Final = re.compile(r"curlCode: (\d+), ([^;]+)")
_CURL_CERTIFICATE: Final = {"58", "60", "77"}
_PASSING: Final = {
    "NETWORK_CONNECTION", "SLOW_DOWN", "THROTTLING", "REQUEST_TIMEOUT", "INTERNAL_FAILURE", "SERVICE_UNAVAILABLE",
    "CLIENT_SIGNING_FAILURE",  # no credentials from the machine's metadata service just now
}  # fmt: skip
_DENIED: Final = {
    "ACCESS_DENIED", "SIGNATURE_DOES_NOT_MATCH", "INVALID_SIGNATURE", "INVALID_ACCESS_KEY_ID", "INVALID_CLIENT_TOKEN_ID",
    "MISSING_AUTHENTICATION_TOKEN", "INCOMPLETE_SIGNATURE", "UNRECOGNIZED_CLIENT", "OPT_IN_REQUIRED",
    "REQUEST_EXPIRED", "REQUEST_TIME_TOO_SKEWED",
}  # fmt: skip
_DENIED_STATUS: Final = {"400", "401", "403", "412"}  # answers to HEAD have no body that could name the error
_PASSING_STATUS: Final = re.compile(r"408|425|429|5\d\d")


@contextmanager
def patience(seconds: float) -> Iterator[None]:
    """Within it, and in this thread, an operation on a store that is out fails after so many seconds (0: at once)."""
    token = _limit_s.set(seconds)
    try:
        yield
    finally:
        _limit_s.reset(token)


def outage_s() -> float:
    """Seconds that the operation about to begin may wait for its store. Raises InputError for a bad environment."""
    limit = _limit_s.get()
    if limit is not None:
        return limit
    text = os.environ.get("RAYREC_STORAGE_OUTAGE_S", "")
    if not re.fullmatch(r"\d*\.?\d+|", text):
        raise InputError(f"RAYREC_STORAGE_OUTAGE_S: {text!r} is no number of seconds; give one such as 60")
    return float(text) if text else OUTAGE_S


def trouble(error: OSError) -> Trouble:
    """What kind of trouble an error of a remote file system is, by its text: it has nothing else to go by."""
    text = str(error)
    if "PERMANENT_REDIRECT" in text or "HTTP status 301" in text:
        return "region"
    found = _NAME.search(text)
    if not found:  # a body that ends early, or a file system other than S3
        return "other" if isinstance(error, FileNotFoundError | PermissionError) or error.errno else "passing"
    name, status = found[1], found[2] or ""
    curl = _CURL.search(text)
    if curl and curl[1] in _CURL_CERTIFICATE:
        return "certificate"
    if name in _PASSING or _PASSING_STATUS.fullmatch(status):
        return "passing"
    if name in _DENIED or (status in _DENIED_STATUS and _OF_CREDENTIALS.match(found[3] or "")):
        return "denied"
    return "no bucket" if name == "NO_SUCH_BUCKET" else "other"


def cause_of(error: OSError) -> str:
    """The few words of an error that matter to a reader: no keys, no request numbers, no newline."""
    text = str(error)
    curl, found = _CURL.search(text), _NAME.search(text)
    if curl:
        return f"{curl[2][:1].lower()}{curl[2][1:]}"
    if found:
        name = f"HTTP status {found[2]}" if found[2] else found[1].lower().replace("_", " ")
        said = re.sub(r"\(Request ID: [^)]*\)|No response body\.", "", found[3] or "")
        return " ".join(f"{name}: {said}".split()).rstrip(": .")
    return " ".join(text.split())


def explained(path: str, error: OSError, *, waited_s: float, remedy: str) -> Exception:
    """What to raise for an error of the store of `path`, a line: InputError for what the user can fix, else OSError.

    `remedy` describes the endpoint and credentials of the store.
    """
    bucket = "/".join(path.split("/")[:3])
    cause = cause_of(error)
    match trouble(error):
        case "passing":
            return OSError(f"{path}: the store was out for {waited_s:.0f} s ({cause}); {remedy}")
        case "denied":
            return InputError(
                f"{bucket}: access denied ({cause}); set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, to "
                f"credentials that may use it ({remedy})"
            )
        case "no bucket":
            return InputError(f"{bucket}: no such bucket; create it or fix its name ({remedy})")
        case "region":
            return InputError(f"{bucket}: is in another region; set AWS_REGION to it ({remedy})")
        case "certificate":
            return InputError(
                f"{bucket}: the store's certificate is not trusted ({cause}); name its authority in AWS_CA_BUNDLE"
            )
    return OSError(f"{path}: the store refused ({cause})")


def persist(path: str, call: Callable[[], _Result], *, remedy: Callable[[], str]) -> _Result:
    """The result of `call`, made again while the store of `path` is out, with growing, random waits.

    `call` may be made twice with success, so it must not matter if it is. FileNotFoundError is passed on. Raises what
    `explained` gives: InputError at once, OSError for an outage longer than `outage_s`.
    """
    start, wait_s, limit_s = time.monotonic(), _FIRST_WAIT_S, outage_s()
    warned = False
    while True:
        try:
            result = call()
        except FileNotFoundError:
            raise
        except OSError as error:
            waited_s = time.monotonic() - start
            if trouble(error) != "passing" or waited_s >= limit_s:
                raise explained(path, error, waited_s=waited_s, remedy=remedy()) from None
            if waited_s > 2 and not warned:
                warned = True
                _logger.warning("%s: %s; trying again for up to %.0f s", path, cause_of(error), limit_s)
        else:
            if warned:
                _logger.warning("%s: the store answers again, after %.0f s", path, time.monotonic() - start)
            return result
        time.sleep(min(random.uniform(0.5, 1.0) * wait_s, max(start + limit_s - time.monotonic(), 0.0)))
        wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
