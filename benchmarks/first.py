"""What a new process waits for: imports, compilation, first answers. `python -m benchmarks.first --out bench-output`.

Every case runs in processes of its own: the first finds no compiled programs, the second those of the first. Processor
seconds, and the programs compiled; of the commands, seconds by the clock as well. A stream of River's is learnt again
in each process: "opvi" includes compiling or reading programs, "opvi, warm" is a new model that finds them loaded (the
middle one of three).
River's forest learns the same rows after them. The table at the end has what is asked for beside what was found.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.first_case import CASES, FIRST_ROWS, NEXT_ROWS, STREAMS
from benchmarks.machine import machine
from benchmarks.measure import Result

TURNS = {"empty": "nothing compiled yet", "again": "second process"}
LIMITS = {"empty": 4.0, "again": 1.5}  # processor seconds until the first answer
FIRST = "partial_fit(20)", "predict(20)"  # the steps up to the first answer
COMMANDS = "opvi learn, opvi predict"
ROWS, ASKED = 3000, 10  # of the table that the commands learn, and of the one they predict
# River's streams: whole process with a buffer of 20 rows, and learning alone with a buffer of 1, everything loaded
STREAM_LIMITS = {"ChickWeights": (4.0, 0.8), "Phishing": (4.0, 1.2), "ImageSegments": (6.0, 3.0)}


def environment(programs: str) -> dict[str, str]:
    return {**os.environ, "OPVI_PROGRAMS": programs, "OPENBLAS_NUM_THREADS": "1"}


def case(name: str, programs: str) -> dict[str, Any]:
    """Run a case in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.first_case", name]
    return json.loads(subprocess.check_output(command, env=environment(programs), text=True).splitlines()[-1])


def spent(command: list[str], programs: str) -> dict[str, float]:
    """Run a command; return its seconds, by the clock and of the processor, and its peak memory."""
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "opvi.app.cli", *command],
        env=environment(programs),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, status, used = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - began
    if status:
        raise RuntimeError(f"`opvi {' '.join(command)}` ended with {os.waitstatus_to_exitcode(status)}.")
    processor = used.ru_utime + used.ru_stime
    told = {"wall": seconds, "seconds": processor, "peak MB": used.ru_maxrss / 1024}
    return {name: round(value, 2) for name, value in told.items()}


def commands(folder: Path, programs: str, turn: str) -> dict[str, Any]:
    """`opvi learn` on a CSV, and `opvi predict` for a few rows."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(ROWS, 8))
    table = np.column_stack([X, np.sin(X[:, 0]) + X[:, 1] + 0.1 * rng.normal(size=ROWS)])
    names = [f"x{j}" for j in range(8)]
    for path, rows, columns in (("all.csv", ROWS, [*names, "y"]), ("new.csv", ASKED, names)):
        written = table[:rows, : len(columns)]
        np.savetxt(folder / path, written, "%.6g", ",", header=",".join(columns), comments="")
    run = folder / f"{turn}.run"
    learn = ["learn", str(folder / "all.csv"), "--target", "y", "--run", str(run)]
    predict = ["predict", str(run), str(folder / "new.csv"), "-o", str(folder / "out.csv")]
    steps = {"opvi --help": ["--help"], "opvi learn": learn, "opvi predict": predict}
    return {"steps": {name: spent(command, programs) for name, command in steps.items()}}


def measured(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run a case twice: the first process finds no compiled programs, the second finds those of the first."""
    with tempfile.TemporaryDirectory() as folder:
        programs = str(Path(folder) / "programs")
        for turn in TURNS:
            yield turn, commands(Path(folder), programs, turn) if name == COMMANDS else case(name, programs)


def first_answer(found: dict[str, Any]) -> float:
    return sum(found["steps"][step]["seconds"] for step in FIRST)


def programs(found: dict[str, Any], *steps: str) -> dict[str, Any]:
    """Return the programs that some steps compiled, or all of a life, with the seconds by the clock that each took."""
    told = [
        {"step": step, "program": program, "seconds": seconds}
        for step, one in found["steps"].items()
        if isinstance(one, dict) and (not steps or step in steps)
        for program, seconds in one["programs"]
    ]
    return {"programs": told if steps else told[: found["steps"]["programs to learn and predict"]]}


def of_estimator(name: str, turn: str, found: dict[str, Any]) -> Iterator[Result]:
    """What is asked of an estimator's first calls."""
    size, steps = TURNS[turn], found["steps"]
    if turn == "empty":
        yield Result("import opvi", name, steps["import opvi"]["seconds"], "s", 0.8)
    limit, extra = LIMITS[turn], programs(found, *FIRST)
    yield Result(f"first answer of the {name}", size, first_answer(found), "s", limit, extra=extra)
    for step in ("partial_fit(5)", "predict(2000)") if turn == "again" else ():
        yield Result(f"{name}: then {step}", size, steps[step]["seconds"], "s", 0.3)
    if turn == "empty":
        count, extra = steps["programs to learn and predict"], programs(found)
        yield Result(f"{name}: programs of a life", size, count, "programs", 4, extra=extra)
    if turn == "again":
        ratio = steps[FIRST_ROWS]["seconds"] / steps[NEXT_ROWS]["seconds"]
        yield Result(f"{name}: 1,000 rows, the first by the next", "a new model", ratio, "times", 2.0)
    memory = 600.0 if name == "regressor" else None
    yield Result(f"the {name}'s process, peak memory", size, steps["peak MB"], "MB", memory)


def of_stream(name: str, buffer: int, turn: str, found: dict[str, Any]) -> Iterator[Result]:
    """What is asked of a stream of River's."""
    if turn == "empty":
        return
    steps, (whole, alone) = found["steps"], STREAM_LIMITS[name]
    forest = steps["forest"]["seconds"]
    if buffer == 20:
        yield Result(f"{name}, a buffer of 20", "whole process", steps["process"], "s", whole)
    else:
        warm = steps["opvi, warm"]["seconds"]
        yield Result(f"{name}, a buffer of 1", f"warm; the forest {forest:.2f}", warm, "s", alone)


def of_commands(turn: str, found: dict[str, Any]) -> Iterator[Result]:
    """What is asked of the commands."""
    for step, limit in (("opvi learn", 5.0), ("opvi predict", 1.5)) if turn == "again" else ():
        yield Result(step, "second time, by the clock", found["steps"][step]["wall"], "s", limit)


def asked(report: dict[str, Any]) -> Iterator[Result]:
    """What was asked for, beside what was found."""
    for name, turns in report.items():
        for turn, found in turns.items() if name != "machine" else ():
            task, _, setting = name.partition(", ")
            if name == COMMANDS:
                yield from of_commands(turn, found)
            elif task in STREAMS:
                yield from of_stream(task, int(setting.removeprefix("buffer=")), turn, found)
            elif not setting:
                yield from of_estimator(task, turn, found)
            elif turn == "empty":  # another setting costs the same again
                yield Result(f"first answer of the {task}", setting, first_answer(found), "s", LIMITS["empty"])


def results() -> Iterator[Result]:
    """First answers of the estimators, for `make bench`."""
    for name in ("regressor", "classifier"):
        for turn, found in measured(name):
            yield from of_estimator(name, turn, found)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench-output"), help="folder for first.json")
    parser.add_argument("--only", action="append", metavar="WORD", help="cases whose name holds a word")
    options = parser.parse_args()
    report: dict[str, Any] = {"machine": machine("python -m benchmarks.first")}
    for name in (*CASES, COMMANDS):
        if options.only and not any(word in name for word in options.only):
            continue
        for turn, found in measured(name):
            report.setdefault(name, {})[turn] = found
            short = {step: one["seconds"] for step, one in found["steps"].items() if isinstance(one, dict)}
            print(f"{name}, {TURNS[turn]}: {short}", flush=True)
    table = [
        {"what": one.what, "size": one.size, "found": one.value, "unit": one.unit, "asked": one.target, "met": one.met}
        for one in asked(report)
    ]
    for row in table:
        said = "" if row["asked"] is None else f"asked {row['asked']:g}: {'met' if row['met'] else 'MISSED'}"
        print(f"{row['what']:44} {row['size']:28} {row['found']:8.2f} {row['unit']:8} {said}")
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "first.json").write_text(json.dumps({**report, "asked": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
