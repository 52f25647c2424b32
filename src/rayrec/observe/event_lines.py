"""What an event is as a line of JSON: written so that nothing tears, shows a secret or fails; read so that damage shows."""

import json
import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rayrec.config import Config, InputError

TORN_LINE: Final = "torn_line"  # kind of the event that follows, and excuses, a line that a crash left incomplete
_SECRET: Final = re.compile(r"password|passwd|secret|accesskey|apikey|credential|signature")
# hf_token, token_file; not tokenizer, tokens_per_s, tokens (of a text)
_TOKEN: Final = re.compile(r"token(_|$)|.tokens$")
_SECRET_VALUE: Final = re.compile(  # what the keys of well-known services look like, whatever they are called here
    r"\b(?:(?:AKIA|ASIA)[0-9A-Z]{16}\b|gh[opsru]_\w{36,}|github_pat_\w{22,}|hf_[A-Za-z0-9]{30,}|xox[abprs]-[\w-]{10,}"
    r"|sk-[\w-]{20,}|AIza[\w-]{35}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]+)"
)
_ASSIGNED: Final = re.compile(r"((?:^-*|[?&])([\w.-]+)=)([^&]*)")
"""A flag of a command line, or a parameter of a URL, with its value."""
_USER_OF_URL: Final = re.compile(r"(\b\w+://)[^/?#\s]+@")  # with its password, up to the last @ before path and query


def events_in(lines: Iterable[bytes], path: str | Path) -> Iterator[dict[str, Any]]:
    """The events of a file's lines. Raises InputError for a line that is none, save an incomplete last one."""
    return (event for _, event in lines_and_events(lines, path))


def lines_and_events(lines: Iterable[bytes], path: str | Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """`events_in`, each with its line."""
    torn: int | None = None  # number of the first line that is no event and that nothing has excused yet
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue  # two writers may end the same torn line
        event = _parsed(line)
        if event is None and not line.endswith(b"\n"):
            return  # its writer is at work, and a file being read gives the rest of the line as a next one
        if event is None:
            torn = torn or number
        elif event["kind"] == TORN_LINE:
            torn = None
        elif torn is not None:
            raise _not_an_event(path, torn)
        else:
            yield line, event
    if torn is not None:
        raise _not_an_event(path, torn)


def _not_an_event(path: str | Path, number: int) -> InputError:
    return InputError(f"{path}, line {number}: not an event; delete the line, or restore the file from its origin")


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "kind" in event else None


def line_of(event: Mapping[str, Any]) -> bytes:
    """An event as a line, secrets hidden (see EventWriter.write)."""
    # ASCII and no newline inside: a torn line is never a different valid one.
    return json.dumps(_plain(event), separators=(",", ":"), allow_nan=False).encode() + b"\n"


def without_users(text: str) -> str:
    """The text, with *** for the user and password of every URL: errors of libraries name what they could not reach. Keys of
    well-known services are replaced as well."""
    return _SECRET_VALUE.sub("***", _USER_OF_URL.sub(r"\1***@", text))


def without_secrets(text: str) -> str:
    """Return the text of another program, with *** for what `without_users` hides and for values assigned to secret names."""
    return re.sub(r"\S+", lambda word: _hidden(word[0]), text)


def command_line(arguments: Sequence[str]) -> str:
    """A command line as one would type it, with *** for values of flags and URL parameters that look like secrets."""
    shown, follows_secret = [], False
    for argument in arguments:
        shown.append("***" if follows_secret and not argument.startswith("-") else _hidden(argument))
        follows_secret = argument.startswith("-") and "=" not in argument and _is_secret(argument.strip("-"), "")
    return " ".join(text if "***" in text else shlex.quote(text) for text in shown)


def _hidden(argument: str) -> str:
    def value(found: re.Match[str]) -> str:
        return found[1] + ("***" if _is_secret(found[2], int(found[3]) if found[3].isdecimal() else found[3]) else found[3])

    return without_users(_ASSIGNED.sub(value, argument))


def _plain(value: Any) -> Any:
    """What JSON can hold, with secrets removed; never raises for a strange value."""
    if isinstance(value, float):  # np.float64 is one, too
        return float(value) if math.isfinite(value) else None
    if isinstance(value, str):
        return without_users(value)
    if isinstance(value, bool | int) or value is None:
        return value
    if isinstance(value, Config):
        value = value.to_dict()
    if isinstance(value, Mapping):
        return {str(key): "***" if _is_secret(str(key), item) else _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if hasattr(value, "detach"):  # a torch tensor, not importing torch
        value = value.detach()
    if hasattr(value, "tolist"):  # NumPy scalar or array, torch tensor
        return _plain(value.tolist())
    return without_users(str(value))


def _is_secret(key: str, value: Any) -> bool:
    if value is None:
        return False  # that no password is set is worth knowing
    words = re.sub(r"[^a-z0-9]+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key).lower())  # authToken: auth_token
    is_number = isinstance(value, int | float) or hasattr(value, "tolist")
    return bool(_SECRET.search(words.replace("_", "")) or (_TOKEN.search(words) and not is_number))
