"""Events as JSON lines: writing never fails and hides secrets, and reading detects damaged
lines.
"""

import json
import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rayrec.config import Config, InputError

# Kind of the event that marks the previous line as incomplete after a crash.
INCOMPLETE_LINE: Final = "torn_line"
_SECRET: Final = re.compile(r"password|passwd|secret|accesskey|apikey|credential|signature")
# Matches hf_token and token_file, but not tokenizer, tokens_per_s or tokens (of a text).
_TOKEN: Final = re.compile(r"token(_|$)|.tokens$")
_SECRET_VALUE: Final = re.compile(  # Key formats of well-known services, under any name.
    r"\b(?:(?:AKIA|ASIA)[0-9A-Z]{16}\b|gh[opsru]_\w{36,}|github_pat_\w{22,}"
    r"|hf_[A-Za-z0-9]{30,}|xox[abprs]-[\w-]{10,}"
    r"|sk-[\w-]{20,}|AIza[\w-]{35}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]+)"
)
_ASSIGNED: Final = re.compile(r"((?:^-*|[?&])([\w.-]+)=)([^&]*)")
"""Command-line flag or URL parameter with its value."""
_VARIABLES: Final = ("--cluster.env", "--env")
"""Flags with NAME=VALUE of environment variables."""
# User and password, up to the last @ before path and query.
_USER_OF_URL: Final = re.compile(r"(\b\w+://)[^/?#\s]+@")


def events_in(lines: Iterable[bytes], path: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a file's lines. Raises InputError for any invalid line except an
    incomplete last one.
    """
    return (event for _, event in lines_and_events(lines, path))


def lines_and_events(
    lines: Iterable[bytes], path: str | Path
) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield (line, event) pairs. See `events_in`."""
    # Number of the first invalid line that no torn_line event has explained yet.
    invalid: int | None = None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue  # Two writers may end the same incomplete line.
        event = _parsed(line)
        if event is None and not line.endswith(b"\n"):
            # The line is still being written. A growing file yields its rest as the next line.
            return
        if event is None:
            invalid = invalid or number
        elif event["kind"] == INCOMPLETE_LINE:
            invalid = None
        elif invalid is not None:
            raise _not_an_event(path, invalid)
        else:
            yield line, event
    if invalid is not None:
        raise _not_an_event(path, invalid)


def _not_an_event(path: str | Path, number: int) -> InputError:
    return InputError(f"{path}, line {number}: not an event. Delete the line, or restore the file.")


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "kind" in event else None


def encode_event(event: Mapping[str, Any]) -> bytes:
    """Encode an event as a line and hide secrets (see EventWriter.write)."""
    # ASCII without inner newlines: a truncated line is never valid.
    return json.dumps(_plain(event), separators=(",", ":"), allow_nan=False).encode() + b"\n"


def redact_credentials(text: str) -> str:
    """Replace user and password of each URL, and keys of well-known services, with ***. Library
    errors may contain them.
    """
    return _SECRET_VALUE.sub("***", _USER_OF_URL.sub(r"\1***@", text))


def redact_secrets(text: str) -> str:
    """Hide secrets in output of other programs: like `redact_credentials`, and also values assigned
    to secret names.
    """
    return re.sub(r"\S+", lambda word: _hidden(word[0]), text)


def command_line(arguments: Sequence[str]) -> str:
    """Join arguments into a shell command line, with *** for secrets of flags and URLs, and values
    of variables.
    """
    shown = []
    follows_secret = False
    sets_variables = False
    for argument in arguments:
        is_flag = argument.startswith("-")
        flag = argument.partition("=")[0]
        sets_variables = flag in _VARIABLES if is_flag else sets_variables
        if sets_variables and (not is_flag or argument != flag):
            argument = re.sub(r"^(-\S*?=)?(\w+=).*", r"\1\2***", argument, flags=re.DOTALL)
        shown.append("***" if follows_secret and not is_flag else _hidden(argument))
        follows_secret = is_flag and "=" not in argument and _is_secret(argument.strip("-"), "")
    return " ".join(text if "***" in text else shlex.quote(text) for text in shown)


def _hidden(argument: str) -> str:
    def value(match: re.Match[str]) -> str:
        return match[1] + (
            "***"
            if _is_secret(match[2], int(match[3]) if match[3].isdecimal() else match[3])
            else match[3]
        )

    return redact_credentials(_ASSIGNED.sub(value, argument))


def _plain(value: Any) -> Any:
    """Convert a value to plain JSON types without secrets. Never raises."""
    if isinstance(value, float):  # Includes np.float64.
        return float(value) if math.isfinite(value) else None
    if isinstance(value, str):
        return redact_credentials(value)
    if isinstance(value, bool | int) or value is None:
        return value
    if isinstance(value, Config):
        value = value.to_dict()
    if isinstance(value, Mapping):
        return {
            str(key): "***" if _is_secret(str(key), item) else _plain(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if hasattr(value, "detach"):  # A torch tensor, without importing torch.
        value = value.detach()
    if hasattr(value, "tolist"):  # NumPy scalar or array, torch tensor.
        return _plain(value.tolist())
    return redact_credentials(str(value))


def _is_secret(key: str, value: Any) -> bool:
    if value is None:
        return False  # Show that no password is set.
    # authToken: auth_token
    words = re.sub(r"[^a-z0-9]+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key).lower())
    is_number = isinstance(value, int | float) or hasattr(value, "tolist")
    return bool(_SECRET.search(words.replace("_", "")) or (_TOKEN.search(words) and not is_number))
