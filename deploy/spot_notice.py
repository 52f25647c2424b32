"""Pass the notice that this spot machine ends on to Ray, or to a command: `spot_notice.py
aws|google|azure [COMMAND ...]`.

Without a command it runs beside `ray start`, tells Ray, and ends: the workers of the run save and
restart elsewhere. With one, such as torchrun, it runs the command and sends it SIGTERM at the
notice: the workers save. It then waits for the machine to end, so that no scheduler starts the
command here again. Needs the standard library only. See docs/spot.md.
"""

import email.utils
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from datetime import datetime

SECONDS_OF_NOTICE = 30.0
"""Time between Google's notice and the end, and the shortest one on Azure."""
LATE_S = 60.0
"""Time after the announced end in which the machine still counts as ending."""


def _get(
    url: str, *, method: str = "GET", timeout_s: float = 2.0, **headers: str
) -> tuple[str, str]:
    """Return the text of an answer and its ETag, empty if there is nothing (404)."""
    fields = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(url, headers=fields, method=method)
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
            request, timeout=timeout_s
        ) as answer:
            return answer.read().decode(), answer.headers.get("ETag", "")
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return "", ""
        raise


def aws(base: str) -> float | None:
    """Return when the machine ends, in seconds since 1970, or None without a notice. Instance
    metadata, version 2.
    """
    token, _ = _get(
        f"{base}/latest/api/token", method="PUT", X_aws_ec2_metadata_token_ttl_seconds="60"
    )
    notice, _ = _get(
        f"{base}/latest/meta-data/spot/instance-action", X_aws_ec2_metadata_token=token
    )
    return datetime.fromisoformat(json.loads(notice)["time"]).timestamp() if notice else None


def google() -> Callable[[str], float | None]:
    """Return the question for Google, which answers when the value changes, or after a minute."""
    tag = ""

    def ask(base: str) -> float | None:
        nonlocal tag
        wait = f"?wait_for_change=true&timeout_sec=60&last_etag={tag}" if tag else ""
        url = f"{base}/computeMetadata/v1/instance/preempted{wait}"
        preempted, tag = _get(url, timeout_s=70.0, Metadata_Flavor="Google")
        return time.time() + SECONDS_OF_NOTICE if preempted.strip() == "TRUE" else None

    return ask


def azure(base: str) -> float | None:
    """Return when the machine ends: its event Preempt among the scheduled events, which are also
    those of its neighbors.
    """
    name, _ = _get(
        f"{base}/metadata/instance/compute/name?api-version=2021-02-01&format=text", Metadata="true"
    )
    events, _ = _get(
        f"{base}/metadata/scheduledevents?api-version=2020-07-01", Metadata="true", timeout_s=120.0
    )
    for event in json.loads(events)["Events"] if events else ():
        if event["EventType"] == "Preempt" and name in event["Resources"]:
            at = event["NotBefore"]  # Empty once it has begun
            return (
                email.utils.parsedate_to_datetime(at).timestamp()
                if at
                else time.time() + SECONDS_OF_NOTICE
            )
    return None


CLOUDS: dict[str, tuple[Callable[[str], float | None], str, float]] = {
    "aws": (aws, "http://169.254.169.254", 5.0),
    "google": (google(), "http://metadata.google.internal", 1.0),
    "azure": (azure, "http://169.254.169.254", 1.0),
}
"""Question, address and seconds between questions of each cloud."""


def notices(cloud: str) -> Iterator[float | None]:
    """Yield when the machine ends, or None, after each question."""
    ask, base, every_s = CLOUDS[cloud]
    base, every_s = (
        os.environ.get("RAYREC_METADATA_URL", base),
        float(os.environ.get("RAYREC_NOTICE_EVERY_S", every_s)),
    )
    while True:
        try:
            end_s = ask(base)
        except (OSError, ValueError, KeyError) as error:
            print(f"{time.strftime('%F %T')}  {cloud} does not answer: {error}", flush=True)
            end_s = None
        yield end_s
        time.sleep(every_s)


def tell_ray(cloud: str) -> int:
    """Announce the end of this node to Ray, until Ray has accepted it."""
    for end_s in notices(cloud):
        if end_s is None:
            continue
        left_s = max(1, int(end_s - time.time()))
        print(f"{time.strftime('%F %T')}  {cloud} takes this machine in {left_s} s", flush=True)
        words = [
            f"--address={os.environ.get('RAY_ADDRESS', 'auto')}",
            "--reason=DRAIN_NODE_REASON_PREEMPTION",
        ]
        words += [
            f"--reason-message={cloud} takes this spot machine",
            f"--deadline-remaining-seconds={left_s}",
        ]
        if subprocess.run(["ray", "drain-node", *words], check=False).returncode == 0:
            return 0
    raise AssertionError("notices never end")


def run(cloud: str, command: list[str]) -> int:
    """Run a command, with SIGTERM at the notice, and return its status."""
    child = subprocess.Popen(command)
    ends = []
    signal.signal(signal.SIGTERM, lambda number, frame: child.send_signal(number))

    def watch() -> None:
        ends.append(next(end_s for end_s in notices(cloud) if end_s is not None))
        print(
            f"{time.strftime('%F %T')}  {cloud} takes this machine: SIGTERM to {command[0]}",
            flush=True,
        )
        child.terminate()

    threading.Thread(target=watch, daemon=True).start()
    status = child.wait()
    if ends:
        time.sleep(max(0.0, ends[0] + LATE_S - time.time()))
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in CLOUDS:
        sys.exit(f"usage: spot_notice.py {'|'.join(CLOUDS)} [COMMAND ...]")
    sys.exit(run(sys.argv[1], sys.argv[2:]) if sys.argv[2:] else tell_ray(sys.argv[1]))
