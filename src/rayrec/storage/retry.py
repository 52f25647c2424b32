"""Retries during outages of object stores, and classification of their errors."""

import contextvars
import logging
import os
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Literal, TypeVar

import pyarrow as pa

from rayrec.config import InputError
from rayrec.storage.urls import bucket_of, scheme_of

_logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")

OUTAGE_S: Final = 60.0
"""Seconds that a store may be unavailable before an operation fails. RAYREC_STORAGE_OUTAGE_S
overrides it.
"""

_FIRST_WAIT_S: Final = 0.1
_LONGEST_WAIT_S: Final = 5.0

_limit_s: contextvars.ContextVar[float | None] = contextvars.ContextVar(
    "storage_outage_s", default=None
)

ErrorKind = Literal["passing", "denied", "no bucket", "region", "certificate", "other"]

# pyarrow passes on the error names of the AWS SDK, or the HTTP status alone, because stores need
# not send a name.
_NAME: Final = re.compile(
    r"AWS Error (\w+)(?: \(HTTP status (\d+)\))?(?: during \w+ operation: (.*))?", re.DOTALL
)
_OF_CREDENTIALS: Final = re.compile(
    r"(No response body\.)?$|.*(token|credential|access key|signature|authori[sz])", re.I | re.S
)
_CURL: Final = re.compile(r"curlCode: (\d+), ([^;]+)")
_CURL_CERTIFICATE: Final = {"58", "60", "77"}
_PASSING: Final = {
    "NETWORK_CONNECTION",
    "SLOW_DOWN",
    "THROTTLING",
    "REQUEST_TIMEOUT",
    "INTERNAL_FAILURE",
    "SERVICE_UNAVAILABLE",
    "CLIENT_SIGNING_FAILURE",  # the instance metadata service has no credentials yet
}
_DENIED: Final = {
    "ACCESS_DENIED",
    "SIGNATURE_DOES_NOT_MATCH",
    "INVALID_SIGNATURE",
    "INVALID_ACCESS_KEY_ID",
    "INVALID_CLIENT_TOKEN_ID",
    "MISSING_AUTHENTICATION_TOKEN",
    "INCOMPLETE_SIGNATURE",
    "UNRECOGNIZED_CLIENT",
    "OPT_IN_REQUIRED",
    "REQUEST_EXPIRED",
    "REQUEST_TIME_TOO_SKEWED",
}
# responses to HEAD have no body with the error name
_DENIED_STATUS: Final = {"400", "401", "403", "412"}
_PASSING_STATUS: Final = re.compile(r"408|425|429|5\d\d")

# Google's library reports the name of a gRPC status, Azure's library an error code and the HTTP
# status, or neither without a response.
_GOOGLE: Final = re.compile(r"google::cloud::Status\((\w+): (.*)", re.DOTALL)
_GOOGLE_CURL: Final = re.compile(r"CURL error \[(\d+)\]=(.*?)(?: error_info=|$)", re.DOTALL)
_GOOGLE_JSON: Final = re.compile(r'"message": ?"([^"]*)"')
_GOOGLE_PASSING: Final = {
    "UNAVAILABLE",
    "DEADLINE_EXCEEDED",
    "INTERNAL",
    "RESOURCE_EXHAUSTED",
    "ABORTED",
}
_AZURE: Final = re.compile(r"Azure Error: \[(\w*)\] (?:(\d{3}) )?([^\n]*)")
_AZURE_TOKEN: Final = re.compile(r"AuthenticationException\w*: ([^\n]*)")
_SECRET: Final = re.compile(r"(?<=sig=)[^&\s']+")

_KINDS: Final = {"s3": "s3", "gs": "gs", "gcs": "gs", "az": "az", "abfs": "az", "abfss": "az"}
_CREDENTIALS: Final = {
    "s3": (
        "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, to credentials that may "
        "use it"
    ),
    "gs": (
        "set GOOGLE_APPLICATION_CREDENTIALS to the key file of an account that may use it, or run "
        "gcloud auth application-default login"
    ),
    "az": (
        "set AZURE_STORAGE_KEY, AZURE_STORAGE_SAS_TOKEN or AZURE_STORAGE_CONNECTION_STRING to "
        "credentials that may use it"
    ),
}


@contextmanager
def retry_timeout(seconds: float) -> Iterator[None]:
    """Limit how long operations in this thread wait for an unavailable store, in seconds. 0 fails
    at once.
    """
    token = _limit_s.set(seconds)
    try:
        yield
    finally:
        _limit_s.reset(token)


def outage_s() -> float:
    """Return how long the next operation may wait for its store, in seconds. Raises InputError for
    an invalid environment.
    """
    limit = _limit_s.get()
    if limit is not None:
        return limit
    text = os.environ.get("RAYREC_STORAGE_OUTAGE_S", "")
    if not re.fullmatch(r"\d*\.?\d+|", text):
        raise InputError(
            f"RAYREC_STORAGE_OUTAGE_S: must be a number of seconds such as 60, got {text!r}"
        )
    return float(text) if text else OUTAGE_S


def classify_error(error: Exception) -> ErrorKind:
    """Classify an error of a remote file system by its text, because pyarrow provides nothing
    else.
    """
    text = str(error)
    if match := _GOOGLE.search(text):
        return _classify_google(match[1], text)
    if match := _AZURE.search(text):
        return _classify_azure(match[1], match[2] or "", text)
    if _AZURE_TOKEN.search(text):
        return "denied"
    if "PERMANENT_REDIRECT" in text or "HTTP status 301" in text:
        return "region"
    match = _NAME.search(text)
    if not match:  # a truncated body, or an unknown file system
        is_specific = isinstance(
            error, FileNotFoundError | PermissionError | pa.ArrowException
        ) or getattr(error, "errno", None)
        return "other" if is_specific else "passing"
    name = match[1]
    status = match[2] or ""
    curl = _CURL.search(text)
    if curl and curl[1] in _CURL_CERTIFICATE:
        return "certificate"
    if name in _PASSING or _PASSING_STATUS.fullmatch(status):
        return "passing"
    if name in _DENIED or (status in _DENIED_STATUS and _OF_CREDENTIALS.match(match[3] or "")):
        return "denied"
    return "no bucket" if name == "NO_SUCH_BUCKET" else "other"


def _classify_google(code: str, text: str) -> ErrorKind:
    curl = _GOOGLE_CURL.search(text)
    if curl and curl[1] in _CURL_CERTIFICATE:
        return "certificate"
    if "Could not create a OAuth2 access token" in text:
        # No readable credentials: the last attempt resolves a host name that exists on Google's
        # machines only.
        return "denied" if code not in _GOOGLE_PASSING or (curl and curl[1] == "6") else "passing"
    if code in _GOOGLE_PASSING:
        return "passing"
    return "denied" if code in {"PERMISSION_DENIED", "UNAUTHENTICATED"} else "other"


def _classify_azure(code: str, status: str, text: str) -> ErrorKind:
    if not status:  # no response
        return "certificate" if "SSL" in text else "passing"
    if _PASSING_STATUS.fullmatch(status):
        return "passing"
    if code == "ContainerNotFound":
        return "no bucket"
    denied = status in {"401", "403"} or code in {
        "InvalidAuthenticationInfo",
        "NoAuthenticationInformation",
    }
    return "denied" if denied else "other"


def cause_of(error: Exception) -> str:
    """Return the relevant words of an error: no keys, no request IDs, no line breaks."""
    text = str(error)
    if google := _GOOGLE.search(text):
        curl = _GOOGLE_CURL.search(text)
        message = _GOOGLE_JSON.search(google[2])
        reason = google[2].partition("The underlying error message was: ")[2] or google[2]
        words = message[1] if message else reason.partition("with a last message of ")[2] or reason
        name = google[1].lower().replace("_", " ")
        cause = (
            f"{curl[2][:1].lower()}{curl[2][1:]}"
            if curl
            else f"{name}: {words.partition(' error_info=')[0]}"
        )
    elif azure := _AZURE.search(text):
        name = " ".join(filter(None, (azure[2] and f"HTTP status {azure[2]}", azure[1])))
        cause = ": ".join(filter(None, (name, azure[3].strip())))
    elif token := _AZURE_TOKEN.search(text):
        cause = token[1]
    elif curl := _CURL.search(text):
        cause = f"{curl[2][:1].lower()}{curl[2][1:]}"
    elif match := _NAME.search(text):
        name = f"HTTP status {match[2]}" if match[2] else match[1].lower().replace("_", " ")
        cause = f"{name}: " + re.sub(
            r"\(Request ID: [^)]*\)|No response body\.", "", match[3] or ""
        )
    else:
        cause = text
    return " ".join(_SECRET.sub("...", cause).split()).rstrip(": .")


def explained(path: str, error: Exception, *, waited_s: float, hint: str) -> Exception:
    """Return an error line for `path`'s store: InputError if the user can fix it, else OSError.
    `hint`: its settings.
    """
    bucket = bucket_of(path)
    scheme = _KINDS.get(scheme_of(path), "s3")
    cause = cause_of(error)
    match classify_error(error):
        case "passing":
            fix = "Correct the endpoint, or try again when it answers"
            return OSError(
                f"{bucket}: the store was unavailable for {waited_s:.0f} s ({cause}); {hint}. {fix}"
            )
        case "denied":
            return InputError(f"{bucket}: access denied ({cause}); {_CREDENTIALS[scheme]} ({hint})")
        case "no bucket":
            return no_bucket(path, hint)
        case "region":
            return InputError(f"{bucket}: is in another region; set AWS_REGION to it ({hint})")
        case "certificate":
            fix = (
                "name its authority in AWS_CA_BUNDLE"
                if scheme == "s3"
                else "add its authority to this machine's"
            )
            return InputError(f"{bucket}: the store's certificate is not trusted ({cause}); {fix}")
    return OSError(f"{path}: the store rejected the request ({cause})")


def no_bucket(path: str, hint: str) -> InputError:
    """Return the error for a missing bucket."""
    kind = "container" if _KINDS.get(scheme_of(path)) == "az" else "bucket"
    return InputError(f"{bucket_of(path)}: {kind} not found; create it or fix its name ({hint})")


def retry(path: str, call: Callable[[], _Result], *, hint: Callable[[], str]) -> _Result:
    """Return a function's result, retrying with growing delays in outages of `path`'s store. `call`
    must be idempotent. Raises FileNotFoundError unchanged, and the errors of `explained`:
    InputError at once, OSError after `outage_s`.
    """
    start = time.monotonic()
    wait_s = _FIRST_WAIT_S
    limit_s = outage_s()
    warned = False
    while True:
        try:
            result = call()
        except FileNotFoundError:
            raise
        except (
            OSError,
            pa.ArrowException,
        ) as error:  # Google's and Azure's libraries also raise ArrowException
            waited_s = time.monotonic() - start
            if classify_error(error) != "passing" or waited_s >= limit_s:
                raise explained(path, error, waited_s=waited_s, hint=hint()) from None
            if waited_s > 2 and not warned:
                warned = True
                _logger.warning(
                    "Retrying %s for up to %.0f s (%s)", bucket_of(path), limit_s, cause_of(error)
                )
        else:
            if warned:
                _logger.warning(
                    "Reached the store of %s again after %.0f s",
                    bucket_of(path),
                    time.monotonic() - start,
                )
            return result
        time.sleep(
            min(random.uniform(0.5, 1.0) * wait_s, max(start + limit_s - time.monotonic(), 0.0))
        )
        wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
