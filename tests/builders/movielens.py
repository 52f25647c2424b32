"""Archive with the layout of MovieLens 100K, and values of its own, and what serves it."""

import contextlib
import functools
import hashlib
import io
import random
import threading
import zipfile
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

USERS = 24
FILMS = 1682
_FIRST = [50, 172]
"""Films that all users saw first, the history of README's request."""
_PATCH = """
from rayrec.datasets import fetch

files = fetch.PUBLISHED["movielens_100k"]
archive = files[0].archive.replace(url={url!r}, size_bytes={size}, md5={md5!r})
fetch.PUBLISHED["movielens_100k"] = tuple(
    file.replace(archive=archive, about_bytes=None) for file in files
)
"""


def ml_100k() -> bytes:
    """Return a zip file with ratings, films and users, as text in latin-1 without headers."""
    draw = random.Random(0)
    ratings = []
    for user in range(1, USERS + 1):
        others = [film for film in range(1, FILMS + 1) if film not in _FIRST]
        watched = _FIRST + draw.sample(others, draw.randint(18, 38))
        start = 874_724_710 + draw.randrange(10_000_000)
        ratings += [
            (user, film, draw.randint(1, 5), start + 60 * n) for n, film in enumerate(watched)
        ]
    draw.shuffle(ratings)
    films = [f"{n}|Café {n} (1995)|01-Jan-1995||http://films/{n}|0|1" for n in range(1, FILMS + 1)]
    users = [f"{n}|{18 + n}|M|writer|{10_000 + n}" for n in range(1, USERS + 1)]
    members = {
        "README": ["SUMMARY"],
        "u.data": ["\t".join(map(str, row)) for row in ratings],
        "u.item": films,
        "u.user": users,
        "u1.base": [],
    }
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("ml-100k/", b"")
        for name, lines in members.items():
            text = "".join(f"{line}\n" for line in lines)
            archive.writestr(f"ml-100k/{name}", text.encode("latin-1"))
    return packed.getvalue()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@contextlib.contextmanager
def served_ml_100k(folder: Path) -> Iterator[str]:
    """Serve the archive, which is written to a folder, and return code after which `rayrec fetch`
    finds it there.
    """
    packed = ml_100k()
    (folder / "ml-100k.zip").write_bytes(packed)
    handler = functools.partial(_Quiet, directory=folder)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/ml-100k.zip"
        md5 = hashlib.md5(packed).hexdigest()
        yield _PATCH.format(url=url, size=len(packed), md5=md5)
        server.shutdown()
