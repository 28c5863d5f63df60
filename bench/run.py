#!/usr/bin/env python3
"""Runs the benchmarks natively, under Cushion and under the null hook, in one go on one GPU.

    run.py BUILD_DIR OUT_DIR               the table, in at most 6 minutes
    run.py BUILD_DIR OUT_DIR --quick       fewer rows and shorter, in at most 90 seconds
    run.py BUILD_DIR OUT_DIR --complete    native cells too that take minutes each
    run.py BUILD_DIR OUT_DIR --emulator    without a GPU: the driver-API program over the emulated driver; CPU time,
                                           which says what Cushion costs and nothing about a GPU

OUT_DIR gets Google Benchmark's JSON for every program and allocator (PROGRAM.API.ALLOCATOR.json), machine.json
and summary.json: medians of the repetitions, and ratios within this run. Exit code: 0, 1 if a program failed or
ran out of time, 77 without a GPU. A missed goal is printed, not an error: machines differ.
"""

import argparse
import dataclasses
import datetime
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import tempfile
import time

sys.dont_write_bytecode = True  # a source tree stays clean
import table  # noqa: E402

ALL = ("native", "pool", "pool_deferred", "null")
REAL = ("native", "pool", "pool_deferred")  # where a kernel touches its block
ASYNC = ("native", "pool")  # FREE says nothing about cudaFreeAsync


@dataclasses.dataclass
class Program:
    name: str
    api: str = "both"  # the value of --api, or "both" for a program that has benchmarks of each
    allocators: tuple = ALL
    select: dict = dataclasses.field(default_factory=dict)  # allocator → regular expression of benchmark names
    settings: dict = dataclasses.field(default_factory=dict)  # Cushion's, where they are not the defaults


def plan(scale):
    if scale == "emulator":
        return [Program("driver_pairs")]
    native = {"quick": "/native/(1000/|10000/(1|4|64)/)", "full": "/native/(10000?/|100000/(1|4|64)/)"}.get(scale)
    no_kernels = {"null": "Pair/"}
    streams = dict.fromkeys(REAL, "/(1/1|4/4)/[01]/") if scale == "quick" else {}
    driver = dict.fromkeys(ALL, "Pair/") if scale == "quick" else {}
    reserved = {"CUSHION_INITIAL_SIZE": "256MiB"}  # a cold start is about order, not about the driver's allocations
    async_random = ASYNC if scale == "quick" else ASYNC + ("null",)
    return [
        Program("pair_static", select=no_kernels),
        Program("pair_shared", select=no_kernels),
        Program("driver_pairs", select=driver),
        Program("threads", allocators=REAL if scale == "quick" else ALL),
        Program("multi_stream_allocations", "async", ASYNC, streams, reserved),
        Program("multi_stream_allocations", "malloc", REAL, streams, reserved),
        Program("random_allocations", "async", async_random),
        Program("random_allocations", "malloc", REAL if scale == "quick" else ALL,
                {"native": native} if native else {}),
    ]


def environment(build, program, allocator, emulator):
    clean = {name: value for name, value in os.environ.items()
             if name != "LD_PRELOAD" and not name.startswith("CUSHION_")}
    clean.setdefault("CUDA_VISIBLE_DEVICES", "0")
    if emulator:
        clean["LD_LIBRARY_PATH"] = str(build / "emulator")
    if allocator == "null":
        clean["LD_PRELOAD"] = str(build / "bench/libnull_hook.so")
    elif allocator != "native":
        clean["LD_PRELOAD"] = str(build / "libcushion.so")
        clean["CUSHION_ALLOCATOR"] = "pool"
        clean["CUSHION_FREE"] = "deferred" if allocator == "pool_deferred" else "sync"
        clean |= program.settings
    return clean


def command_line(build, program, allocator, seconds, repetitions):
    line = [str(build / "bench" / program.name), f"--allocator={allocator}", f"--benchmark_min_time={seconds}",
            f"--benchmark_repetitions={repetitions}"]
    if program.api != "both":
        line.append(f"--api={program.api}")
    if allocator in program.select:
        line.append(f"--benchmark_filter={program.select[allocator]}")
    return line


def served(build, program, allocator, emulator):
    """How many calls Cushion's own report says it served: a preload without effect would time native CUDA."""
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "report.json"
        line = command_line(build, Program(program.name, program.api), allocator, 0.001, 1)
        subprocess.run(line + ["--benchmark_filter=/1048576"], check=True, timeout=60, capture_output=True,
                       env=environment(build, program, allocator, emulator) | {"CUSHION_REPORT": str(report)})
        return json.loads(report.read_text())["calls"]["served"] if report.exists() else 0


def output_of(*command):
    """A command's standard output, empty if it is missing or fails: what describes the machine is never required."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def describe_machine(build, emulator):
    cache = {}
    if (build / "CMakeCache.txt").exists():
        cache = dict(re.findall(r"^(\w+):\w+=(.*)$", (build / "CMakeCache.txt").read_text(), re.MULTILINE))
    cpu = re.search(r"^model name\s*: (.*)$", pathlib.Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    gpu = driver = memory = None
    if not emulator:
        devices = output_of("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
        gpu, driver, memory = devices.splitlines()[0].split(", ") if devices else (None, None, None)
    nvcc = os.path.join(cache.get("CUDAToolkit_BIN_DIR", ""), "nvcc")
    release = re.search(r"release ([\d.]+)", output_of(nvcc, "--version"))
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": output_of("git", "-C", str(pathlib.Path(__file__).parent), "rev-parse", "--short=12", "HEAD") or None,
        "gpu": gpu or ("emulated driver" if emulator else None),
        "gpu_memory": memory,
        "driver": driver,
        "nvcc": release[1] if release else None,
        "cpu": cpu[1] if cpu else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "compiler": output_of(cache.get("CMAKE_CXX_COMPILER", "c++"), "--version").split("\n")[0] or None,
        "build_type": cache.get("CMAKE_BUILD_TYPE"),
        "load_at_start": os.getloadavg()[0],
    }


class Skip(Exception):
    pass


def run_all(build, out, scale):
    """Runs the plan; returns what failed. Cheap and important programs come first, so that time runs out last."""
    emulator = scale == "emulator"
    budget = {"quick": 90, "full": 360, "complete": 3600, "emulator": 120}[scale]
    seconds = {"quick": 0.02, "full": 0.1, "complete": 0.2, "emulator": 0.02}[scale]
    deadline = time.monotonic() + budget
    failures, verified = [], set()
    for program in plan(scale):
        for allocator in program.allocators:
            label = f"{program.name}.{program.api}.{allocator}"
            remaining = deadline - time.monotonic()
            if remaining < 1:
                failures.append(f"{label}: not run, the {budget} s of this run are used up")
                continue
            if allocator.startswith("pool") and allocator not in verified:
                if served(build, program, allocator, emulator) == 0:
                    raise RuntimeError(f"libcushion.so served no call of {program.name}: the preload has no effect")
                verified.add(allocator)
            slow = program.name == "random_allocations" and allocator == "native"
            line = command_line(build, program, allocator, seconds, 1 if slow else 3)
            line += [f"--benchmark_out={out / label}.json", "--benchmark_out_format=json"]
            begin = time.monotonic()
            try:
                result = subprocess.run(line, env=environment(build, program, allocator, emulator), timeout=remaining,
                                        capture_output=True, text=True, check=False)
            except subprocess.TimeoutExpired:
                (out / f"{label}.json").unlink(missing_ok=True)  # cut off in the middle
                failures.append(f"{label}: cut off, the {budget} s of this run are used up")
                continue
            if result.returncode == 77:
                raise Skip(result.stderr.strip())
            if result.returncode != 0:
                (out / f"{label}.json").unlink(missing_ok=True)
                failures.append(f"{label}: exit code {result.returncode}: {result.stderr.strip()[-500:]}")
            print(f"{label:45} {time.monotonic() - begin:6.1f} s", file=sys.stderr, flush=True)
    return failures


def main():
    parser = argparse.ArgumentParser(description="Runs the benchmarks natively, under Cushion and the null hook.")
    parser.add_argument("build", type=lambda text: pathlib.Path(text).resolve())
    parser.add_argument("out", type=lambda text: pathlib.Path(text).resolve())
    scales = parser.add_mutually_exclusive_group()
    for scale in ("quick", "complete", "emulator"):
        scales.add_argument(f"--{scale}", dest="scale", action="store_const", const=scale, default="full")
    arguments = parser.parse_args()
    build, out, scale = arguments.build, arguments.out, arguments.scale
    needed = [build / "libcushion.so", build / "bench/libnull_hook.so"]
    needed += sorted({build / "bench" / program.name for program in plan(scale)})
    if scale == "emulator":
        needed.append(build / "emulator/libcuda.so.1")
    missing = [str(path) for path in needed if not path.exists()]
    if missing:
        print(f"not built: {', '.join(missing)}", file=sys.stderr)
        return 1
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("*.*.*.json"):
        old.unlink()
    machine = describe_machine(build, scale == "emulator")
    try:
        failures = run_all(build, out, scale)
    except Skip as reason:
        print(reason)
        return 77
    except (RuntimeError, OSError, subprocess.SubprocessError) as problem:
        print(problem, file=sys.stderr)
        return 1
    rows, errors = table.read_results(out, "cpu_time" if scale == "emulator" else "real_time")
    for row in rows:
        row["speedup"] = {a: ratio for a in row["ns"] if a != "native" and (ratio := table.speedup(row, a)) is not None}
    summary = {"schema": "cushion-bench", "version": 1, "scale": scale, "machine": machine,
               "settings": {f"{p.name}.{p.api}": p.settings for p in plan(scale) if p.settings}, "rows": rows,
               "goals": [] if scale == "emulator" else table.goals(rows), "failures": failures + errors}
    (out / "machine.json").write_text(json.dumps(machine, indent=1) + "\n")
    (out / "summary.json").write_text(json.dumps(summary, indent=1, ensure_ascii=False) + "\n")
    print("\n\n".join(table.tables(summary).values()))
    for failure in summary["failures"]:
        print(f"FAILED {failure}")
    return 1 if summary["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
