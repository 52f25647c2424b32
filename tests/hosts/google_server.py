"""gcp-storage-emulator on loopback with a bucket "logs", a thread a request: `python
google_server.py FOLDER PORT`.
"""

import sys
from functools import partial
from http.server import ThreadingHTTPServer

from gcp_storage_emulator.server import RequestHandler
from gcp_storage_emulator.storage import Storage


def main(folder: str, port: int) -> None:
    storage = Storage(data_dir=folder)
    if storage.get_bucket("logs") is None:
        storage.create_bucket("logs", {"name": "logs"})
    ThreadingHTTPServer.daemon_threads = True
    server = ThreadingHTTPServer(("127.0.0.1", port), partial(RequestHandler, storage))
    print("ready", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
