"""Starts an S3-compatible server on loopback: OpenStack Swift with its s3api, one process, objects in a folder.

Usage: python s3_server.py FOLDER PORT USER SECRET, in an environment that has Swift; access key acct:USER. The ports that
follow PORT are used too. Unlike a mock it checks signatures and keeps what it stores.
"""

import eventlet

eventlet.monkey_patch()

import logging  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402

from eventlet import wsgi as eventlet_wsgi  # noqa: E402
from swift.common import utils  # noqa: E402
from swift.common.ring import RingBuilder  # noqa: E402
from swift.common.wsgi import SwiftHttpProtocol, loadapp  # noqa: E402

PLAIN_FILTERS = ("catch_errors", "gatekeeper", "listing_formats", "bulk", "copy", "slo", "dlo")


def main(folder: str, port: int, user: str, secret: str) -> None:
    settings = os.path.join(folder, "etc")
    os.makedirs(settings, exist_ok=True)
    os.makedirs(os.path.join(folder, "devices", "disk"), exist_ok=True)

    def write(name: str, text: str) -> str:
        path = os.path.join(settings, name)
        with open(path, "w") as file:
            file.write(text)
        return path

    utils.SWIFT_CONF_FILE = write(
        "swift.conf",
        "[swift-hash]\nswift_hash_path_prefix = a\nswift_hash_path_suffix = b\n"
        "[storage-policy:0]\nname = only\ndefault = yes\n",
    )
    utils.set_swift_dir(settings)
    utils.validate_configuration()
    shared = (
        f"[DEFAULT]\nswift_dir = {settings}\ndevices = {folder}/devices\nmount_check = false\nbind_ip = 127.0.0.1\n"
        "log_level = WARNING\nlog_address = /nonexistent\ndisable_fallocate = true\nfallocate_reserve = 0\n"
    )
    servers = {}
    for offset, kind in enumerate(("account", "container", "object"), start=1):
        servers[kind] = port + offset
        if not os.path.exists(os.path.join(settings, f"{kind}.ring.gz")):
            ring = RingBuilder(4, 1, 1)
            place = {"ip": "127.0.0.1", "port": port + offset, "device": "disk", "region": 1, "zone": 1, "weight": 1}
            ring.add_dev({**place, "replication_ip": "127.0.0.1", "replication_port": port + offset})
            ring.rebalance()
            ring.get_ring().save(os.path.join(settings, f"{kind}.ring.gz"))
        write(
            f"{kind}.conf",
            f"{shared}bind_port = {port + offset}\n[pipeline:main]\npipeline = {kind}-server\n"
            f"[app:{kind}-server]\nuse = egg:swift#{kind}\n",
        )
    filters = "".join(f"[filter:{name}]\nuse = egg:swift#{name}\n" for name in PLAIN_FILTERS)
    write(
        "proxy.conf",
        f"{shared}bind_port = {port}\n"
        "[pipeline:main]\n"
        "pipeline = catch_errors gatekeeper listing_formats bulk s3api tempauth copy slo dlo proxy-server\n"
        "[app:proxy-server]\nuse = egg:swift#proxy\naccount_autocreate = true\nallow_account_management = true\n"
        f"{filters}"
        "[filter:s3api]\nuse = egg:swift#s3api\nlocation = us-east-1\ns3_acl = false\n"
        f"[filter:tempauth]\nuse = egg:swift#tempauth\nuser_acct_{user} = {secret} .admin\n",
    )
    quiet = logging.getLogger("quiet")
    quiet.addHandler(logging.NullHandler())
    quiet.propagate = False
    threads = []
    for kind, at in {**servers, "proxy": port}.items():
        application = loadapp(os.path.join(settings, f"{kind}.conf"), global_conf={"log_name": kind})
        socket = eventlet.listen(("127.0.0.1", at), backlog=1024)
        threads.append(
            eventlet.spawn(
                eventlet_wsgi.server,
                socket,
                application,
                log=quiet,
                log_output=False,
                protocol=SwiftHttpProtocol,
                custom_pool=eventlet.GreenPool(256),
                capitalize_response_headers=False,
            )
        )
    print("ready", flush=True)
    for thread in threads:
        thread.wait()


if __name__ == "__main__":
    main(os.path.abspath(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
