"""Stores on loopback at s3://, gs:// and az:// for tests, which can be killed and started again
with what they stored.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from hosts.blob_server import ACCOUNT, KEY, BlobServer
from hosts.ports import free_ports
from pyarrow import fs

FOLDER = Path(__file__).parent
_AZURITE_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
"""Published by Microsoft, the same for every Azurite."""


class CloudStore(Protocol):
    """`environment` holds the standard variables by which the store is reached; who kills it starts
    it again.
    """

    port: int
    bucket: str
    environment: dict[str, str]

    def start(self) -> None: ...

    def kill(self) -> None: ...


@contextmanager
def outage(store: CloudStore, seconds: float) -> Iterator[None]:
    """Kill a store, and start it again after so many seconds, while the body runs."""
    store.kill()
    back = threading.Timer(seconds, store.start)
    back.start()
    try:
        yield
    finally:
        back.join()


class MotoStore:
    """moto's S3 in a process of its own: `kill` breaks its connections off and lets none begin; it
    keeps what it stored.
    """

    def __init__(self, *user: str) -> None:
        """`user`: access key and secret of S3; without them, it is Google's XML API."""
        self.port = free_ports(1)
        command = [sys.executable, str(FOLDER / "s3_server.py"), str(self.port), *user]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(self) -> None:
        self._tell("open")

    def kill(self) -> None:
        self._tell("close")

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def _tell(self, message: str) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{message}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "done\n"


class GoogleStore(MotoStore):
    """Google's XML API of moto."""

    bucket = "gs://logs"

    def __init__(self, folder: Path | None = None) -> None:
        super().__init__()
        self.environment = {"STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{self.port}"}


class S3Store(MotoStore):
    """Store of moto that checks signatures."""

    bucket = "s3://logs"

    def __init__(self, folder: Path | None = None) -> None:
        key = "tester"
        secret = "secret-word"
        super().__init__(key, secret)
        self.environment = {
            "AWS_ACCESS_KEY_ID": key,
            "AWS_SECRET_ACCESS_KEY": secret,
            "AWS_REGION": "us-east-1",
        }
        self.environment |= {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def url(self, bucket: str) -> str:
        """The URL of a bucket, which is made where it is missing; needs `environment`."""
        filesystem, _ = fs.FileSystem.from_uri(f"s3://{bucket}?allow_bucket_creation=true")
        filesystem.create_dir(bucket)
        return f"s3://{bucket}"


class AzureStore:
    """A BlobServer in this process."""

    bucket = "az://logs"

    def __init__(self, folder: Path) -> None:
        self.port = free_ports(1)
        self._server = BlobServer(self.port)
        self.environment = {"AZURE_STORAGE_CONNECTION_STRING": _connection(ACCOUNT, KEY, self.port)}

    def start(self) -> None:
        self._server.start()

    def kill(self) -> None:
        self._server.kill()


class Azurite:
    """Microsoft's emulator: RAYREC_TEST_AZURITE names its script
    (node_modules/azurite/dist/src/blob/main.js).
    """

    bucket = "az://logs"

    def __init__(self, folder: Path) -> None:
        self.port = free_ports(1)
        self.environment = {
            "AZURE_STORAGE_CONNECTION_STRING": _connection(
                "devstoreaccount1", _AZURITE_KEY, self.port
            )
        }
        script = os.environ["RAYREC_TEST_AZURITE"]
        self._command = [
            "node",
            script,
            "-l",
            str(folder),
            "--blobPort",
            str(self.port),
            "--skipApiVersionCheck",
        ]
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        while "successfully listens" not in self._process.stdout.readline():
            pass
        server = f"127.0.0.1:{self.port}"
        options = {f"{kind}_storage_authority": server for kind in ("blob", "dfs")}
        options |= {f"{kind}_storage_scheme": "http" for kind in ("blob", "dfs")}
        filesystem = fs.AzureFileSystem("devstoreaccount1", _AZURITE_KEY, **options)
        filesystem.create_dir("logs")

    def kill(self) -> None:
        """By SIGTERM: it writes to its disk what it has stored only now and then, and at the
        end.
        """
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                process.communicate(timeout=3)
            except subprocess.TimeoutExpired:
                # It waits for open connections to end, having written.
                process.kill()
                process.communicate()


def _connection(account: str, key: str, port: int) -> str:
    return f"AccountName={account};AccountKey={key};BlobEndpoint=http://127.0.0.1:{port}/{account}"


KINDS: dict[str, Callable[[Path], CloudStore]] = {
    "gs": GoogleStore,
    "az": AzureStore,
    "s3": S3Store,
}
if os.environ.get("RAYREC_TEST_AZURITE"):
    KINDS["azurite"] = Azurite
