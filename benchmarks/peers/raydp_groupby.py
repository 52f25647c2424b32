"""Counting categories the way Spark offers it, on executors inside the Ray cluster (RayDP): typed
CSV, all categories as (column, token) rows, groupBy, count. Runs as a program in RayDP's own
environment and prints seconds of each round, without start-up.
"""

import json
import os
import sys
import time

SPARSE = [f"cat_{i}" for i in range(26)]
COLUMNS = [
    ("label", "int"),
    *((f"int_{i}", "long") for i in range(13)),
    *((name, "string") for name in SPARSE),
]


def main(address: str, path: str, rounds: int) -> None:
    import ray
    import raydp
    from pyspark.sql import functions

    from rayrec.ingest.spark_driver import settings

    environment = {"PYSPARK_PYTHON": sys.executable, "PYTHONPATH": os.environ["PYTHONPATH"]}
    ray.init(
        address=address,
        log_to_driver=False,
        runtime_env={"env_vars": environment, "py_executable": sys.executable},
    )
    folder = os.environ["RAYDP_FOLDER"]
    conf = settings(
        {"folder": folder, "ray_address": address},
        logging=os.path.join(folder, "log4j2.properties"),
    )
    conf["spark.sql.shuffle.partitions"] = "8"
    session = raydp.init_spark("groupby", 1, 2, "3g", configs=conf)
    log = session.read.csv(
        path, sep="\t", schema=", ".join(f"{name} {kind}" for name, kind in COLUMNS)
    )
    pairs = log.select(
        functions.posexplode(
            functions.array(*[functions.coalesce(name, functions.lit("")) for name in SPARSE])
        ).alias("column", "token")
    )
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        pairs.groupBy("column", "token").count().write.mode("overwrite").parquet(
            os.path.join(folder, "counts")
        )
        seconds.append(time.perf_counter() - start)
    raydp.stop_spark()
    ray.shutdown()
    print(json.dumps(seconds))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
