"""Models by key inside Spark: rows per second on two cores, a driver that is killed: `python -m benchmarks.spark`.

Parts can be run alone: what is in `spark.json` of the other stays.
"""

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import opvi
from benchmarks.machine import machine

FEATURES, PARTICLES, BATCH, SEED = 10, 20, 20, 0
BUCKETS, FEW = 256, 16  # states: many are hard on what survives a kill, few are what 10,000 ids should have
WARM = 5  # triggers until workers have started, batches have filled, and programs are compiled
COLUMNS = [f"x{i}" for i in range(FEATURES)]
SCHEMA = "id long, " + ", ".join(f"{name} float" for name in COLUMNS) + ", y float, t long"


def keyed(batch_size: int) -> opvi.scale.Keyed:
    example = np.zeros((1, FEATURES), np.float32), np.zeros(1, np.float32)
    sampler = opvi.opvi(opvi.linear_regression(FEATURES), step=0.01)
    return opvi.scale.Keyed(sampler, SEED, example=example, batch_size=batch_size, particles=PARTICLES)


def table(rows: int, keys: int) -> pd.DataFrame:
    rng = np.random.default_rng(SEED)
    X = rng.standard_normal((rows, FEATURES)).astype(np.float32)
    y = X.sum(1) + rng.standard_normal(rows).astype(np.float32)
    columns = {name: X[:, i] for i, name in enumerate(COLUMNS)}
    return pd.DataFrame({"id": rng.integers(0, keys, rows), **columns, "y": y, "t": np.arange(rows)})


def write(folder: Path, rows: int, keys: int, trigger: int) -> None:
    """Write one file per trigger. Spark reads files in the order of their times, so these must differ."""
    (folder / "in").mkdir()
    whole, now = table(rows, keys), time.time()
    for begin in range(0, rows, trigger):
        path = folder / "in" / f"{begin:09d}.parquet"
        whole[begin : begin + trigger].to_parquet(path)
        os.utime(path, (now, now - rows / trigger + begin / trigger))


def run(folder: Path, partitions: int, batch_size: int, buckets: int = BUCKETS) -> list[dict[str, Any]]:
    """Learn all files that are new since the last time, one in each trigger; return Spark's progress report on each."""
    from opvi.adapters import spark as adapter

    spark = _session(partitions)
    source = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1)
    rows = source.parquet(str(folder / "in"))
    out = adapter.learn(
        rows, keyed(batch_size), id="id", inputs=COLUMNS, target="y", order="t", buckets=buckets, emit="rounds"
    )
    query = out.writeStream.format("noop").option("checkpointLocation", str(folder / "kept"))
    for trial in range(10):
        started = query.trigger(availableNow=True).start()
        try:
            started.awaitTermination()
            break
        except Exception as error:  # on a busy machine Spark's ten seconds for a worker to start may be too few
            if "failed to connect back" not in str(error) or trial == 9:
                raise
    return [dict(json.loads(progress.json)) for progress in started.recentProgress]


def _session(partitions: int) -> Any:
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    build = SparkSession.builder.master("local[2]").config("spark.sql.shuffle.partitions", partitions)
    build = build.config("spark.ui.enabled", "false").config("spark.driver.host", "127.0.0.1")
    return build.config("spark.log.level", "ERROR").getOrCreate()


def digest(folder: Path, batch_size: int) -> dict[str, Any]:
    """A hash of all models in the checkpoint, and how many rows they have seen or keep waiting."""
    from opvi.adapters import spark as adapter

    mine = keyed(batch_size)
    return _digest(mine, adapter.fleet(_session(1), folder / "kept", mine))


def _digest(mine: opvi.scale.Keyed, fleet: opvi.Fleet) -> dict[str, Any]:
    names = sorted(fleet.ids)
    records = np.concatenate([fleet._record(name) for name in names])
    rows = int(np.sum(mine.states(records).rows)) + int(records["waiting"].sum())
    return {"models": len(names), "rows": rows, "sha256": hashlib.sha256(records.tobytes()).hexdigest()}


def rates(rows: int, keys: int, trigger: int) -> dict[str, Any]:
    """Rows per second, and rows per second of processor time, after some triggers that start workers and compile."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, rows, keys, trigger)
        (folder / "in").rename(folder / "all")
        (folder / "in").mkdir()
        told = []
        for files in (slice(WARM), slice(WARM, None)):
            for path in sorted((folder / "all").iterdir())[files]:
                shutil.copy2(path, folder / "in" / path.name)
            used = processor_seconds()
            told = [one for one in run(folder, 2, BATCH, FEW) if one["numInputRows"]]
            used = processor_seconds() - used
    seconds = [one["durationMs"]["triggerExecution"] / 1000 for one in told]
    return {
        "rows a trigger": trigger,
        "keys": keys,
        "buckets": FEW,
        "seconds of each trigger": seconds,
        "rows per second": trigger / float(np.median(seconds)),
        "processor seconds of each trigger": used / len(told),
        "rows per second of processor time": trigger * len(told) / used,
    }


def processor_seconds() -> float:
    """Return the processor seconds of this process and its descendants: Java and its workers."""
    mine, total = os.getsid(0), 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except OSError:  # it has ended
            continue
        if int(fields[3]) == mine:
            total += sum(map(int, fields[11:15]))  # also of children that have ended
    return total / os.sysconf("SC_CLK_TCK")


def child(folder: Path, *given: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.spark", "--child", str(folder), *map(str, given)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)


def killed(kills: int, partitions: int, rows: int = 30_000, keys: int = 500, trigger: int = 1000) -> dict[str, Any]:
    """Kill the driver, Java and workers at random moments; compare the checkpoint with an undisturbed fleet."""
    rng, done = np.random.default_rng(partitions), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, rows, keys, trigger)
        for life in range(kills + 1):
            with child(folder, "run", partitions) as process:
                before = _commits(folder)
                while life < kills and process.poll() is None and _commits(folder) == before:
                    time.sleep(0.05)
                if life < kills:
                    time.sleep(rng.uniform(0, 3))
                    os.killpg(process.pid, signal.SIGKILL)
            done.append(_commits(folder))
            print(f"{partitions} partitions, life {life}: {done[-1]} triggers", flush=True)
        with child(folder, "digest", partitions) as process:
            found = json.loads(process.communicate()[0].splitlines()[-1])
    mine, whole = keyed(4), table(rows, keys)
    calm = opvi.Fleet.of(mine)
    calm.learn(whole["id"].tolist(), (whole[COLUMNS].to_numpy(), whole["y"].to_numpy()))
    expected = _digest(mine, calm)
    same = found == expected and found["rows"] == rows
    return {"kills": kills, "partitions": partitions, "triggers after each life": done, "found": found, "same": same}


def _commits(folder: Path) -> int:
    return len(list((folder / "kept" / "commits").glob("[0-9]*")))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.spark", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench-output"), help="folder for spark.json")
    parser.add_argument("--kills", type=int, default=5, help="of the driver, for 2 and for 5 partitions; 0: none")
    parser.add_argument("--triggers", type=int, default=13, help="the first 5 do not count; 0: none")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        folder, what, partitions = given.child
        said = run(Path(folder), int(partitions), 4) if what == "run" else digest(Path(folder), 4)
        print(json.dumps(len(said) if what == "run" else said))
        return
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / "spark.json"
    result: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    about = machine("python -m benchmarks.spark")
    with contextlib.suppress(PermissionError):  # a job of a shell's own
        os.setsid()  # so that what is started here is known by its session
    if given.triggers:
        result["rates"] = {"machine": about, **rates(50_000 * given.triggers, 10_000, 50_000)}
        print(result["rates"], flush=True)
        path.write_text(json.dumps(result, indent=1) + "\n")
    if given.kills:
        result["killed"] = {"machine": about, "drivers": [killed(given.kills, partitions) for partitions in (2, 5)]}
        print(result["killed"], flush=True)
        path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
