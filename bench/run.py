#!/usr/bin/env python3
"""Runs the benchmarks natively, under Cushion, under the null hook and with RMM, in one go on one GPU.

    run.py BUILD_DIR OUT_DIR               the whole table, in about 8 minutes
    run.py BUILD_DIR OUT_DIR --goals       what the goals are judged on, the most important first, in 450 s
    run.py BUILD_DIR OUT_DIR --complete    cells of native CUDA and RMM too that take minutes each
    run.py BUILD_DIR OUT_DIR --emulator    without a GPU: the driver-API program over the emulated driver. Bytes held,
                                           and CPU time, which says what Cushion costs and nothing about a GPU

    --only PROGRAM,...                     these programs; what OUT_DIR has of the others stays
    --rounds N                             3 by default

Machines change speed while they measure, so no allocator is measured in one go: in each round of a program all its
allocators run once, briefly and in turn, and medians are over all rounds. Benchmarks too slow for that run in the first
round only.

OUT_DIR gets Google Benchmark's JSON for every program and allocator (PROGRAM.API.ALLOCATOR.json), machine.json
and summary.json: medians, bytes held, goals. The commit is CUSHION_COMMIT, or the checkout's where there is git. Exit
code: 0, 1 if a program failed, 77 without a GPU. A missed goal is printed, and so is what the time did not suffice for:
neither is an error, because machines differ. Programs linked with RMM are left out where they were not built.
"""

import argparse
import dataclasses
import datetime
import functools
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

HERE = pathlib.Path(__file__).resolve().parent


@dataclasses.dataclass(frozen=True)
class Allocator:
    """A column of the tables: how a program runs, so that this allocator serves it."""
    title: str
    preload: str = ""  # in the build folder
    settings: dict = dataclasses.field(default_factory=dict)  # Cushion's
    suffix: str = ""  # of the program's name


def cushion(title, **settings):
    return Allocator(title, "libcushion.so", {f"CUSHION_{name.upper()}": value for name, value in settings.items()})


def rmm(title):
    return Allocator(title, suffix="_rmm")  # the program knows the settings, its output says them


ALLOCATORS = {  # in the order of the columns; the first is what the others are compared with
    "native": Allocator("native"),
    "pool": cushion("Cushion, `sync`", allocator="pool", free="sync"),
    "pool_deferred": cushion("Cushion, `deferred`", allocator="pool", free="deferred"),
    "pool_vmm": cushion("Cushion, `vmm`", allocator="pool", free="sync", backing="vmm"),
    "pool_auto": cushion("Cushion, `auto`", allocator="pool", free="auto"),
    "pool_track": cushion("Cushion, tracking", allocator="pool", free="sync", track="on"),
    "pool_sampled": cushion("Cushion, sampled stacks", allocator="pool", free="sync", track="sampled:64MiB"),
    "pool_stacks": cushion("Cushion, stacks", allocator="pool", free="sync", track="stacks", stack_depth="20"),
    "arena": cushion("Cushion, arena", allocator="arena", free="sync"),
    "binning": cushion("Cushion, binning", allocator="binning", free="sync"),
    "async": cushion("Cushion, driver's pool", allocator="async", free="sync"),
    "null": Allocator("null hook", "bench/libnull_hook.so"),
    "rmm_pool": rmm("RMM pool"),
    "rmm_pool_track": rmm("RMM pool, tracking"),
    "rmm_arena": rmm("RMM arena"),
    "rmm_binning": rmm("RMM binning"),
    "rmm_cuda_async": rmm("RMM cuda_async"),
    "torch": Allocator("PyTorch", suffix="_torch"),
    "torch_expandable": Allocator("PyTorch, expandable segments", suffix="_torch"),
}
ALL = ("native", "pool", "pool_deferred", "null")
REAL = ("native", "pool", "pool_deferred")  # where a kernel touches its block
TRACKED = ("pool", "pool_track", "pool_sampled", "pool_stacks")
BESIDE = ("pool", "arena", "binning", "rmm_pool", "rmm_arena", "rmm_binning", "rmm_cuda_async", "native")


# Of the benchmarks, further rounds run neither those of which an iteration takes longer than SLOW_CELL seconds, nor any
# of a process that takes longer than SLOW_TURN with the rest.
SLOW_CELL, SLOW_TURN = 1, 15


@dataclasses.dataclass
class Program:
    name: str
    api: str = "both"  # the value of --api, or "both" for a program that has benchmarks of each
    allocators: tuple = ALL
    select: dict = dataclasses.field(default_factory=dict)  # allocator → regular expression of benchmark names
    settings: dict = dataclasses.field(default_factory=dict)  # Cushion's, where they are not the allocator's
    repetitions: int = 1  # in a round
    series: str = ""  # what its results are called, where that is not its name
    rounds: int = 0  # of its own; 0: the run's
    pinned: bool = True  # to the CPU that is fastest just then: it has one busy thread
    # Allocator → regular expression of the benchmarks that count bytes held. They run once, each in a process of its own,
    # because what a process holds it keeps, and under Cushion its report says how much. An allocator that is here and
    # not in `select` is not timed.
    held: dict = dataclasses.field(default_factory=dict)

    def label(self, allocator):
        return f"{self.series or self.name}.{self.api}.{allocator}"


def plan(scale):
    """What to run, the most important first: time runs out for the last."""
    loops = dict.fromkeys(ALL, "Pair|Random|Threads")
    if scale == "emulator":
        return [Program("driver_pairs", "both", ALL, loops,
                        held=dict.fromkeys(("pool", "pool_deferred"), "BM_Fragmentation"))]
    goals = scale == "goals"
    random_malloc, random_async = {}, {}
    if scale != "complete":  # without the cells that take more than 15 s each
        random_malloc["native"] = "/native/(10000?/|100000/(1|4|64)/)"
        random_async["rmm_arena"] = "/(10000?/|100000/(64|256|1024|4096)/)"
    held = dict.fromkeys(("pool", "pool_vmm", "rmm_pool", "rmm_binning", "native", "torch", "torch_expandable"),
                         "BM_Fragmentation")
    streams = {} if scale == "complete" else dict.fromkeys(BESIDE + REAL, "/(1/1|4/4)/[01]/")
    if goals:  # of the driver's own pool and of tracked RMM without the cells that take more than a second
        random_malloc["native"] = "/native/(1000/|10000/(1|4|64)/|100000/(1|4|64)/)"
        random_async |= dict.fromkeys(("native", "rmm_cuda_async", "async"),
                                      "/(1000|10000/(1|4|64|256|1024)|100000/(1|4|64|256))/")
        random_async["rmm_pool_track"] = "/(10000?/|100000/(64|256|1024|4096)/)"
        held["native"] = "/uniform_(1|4|64)/"
        streams = dict.fromkeys(BESIDE + REAL, "/4/4/[01]/") | dict.fromkeys(("native", "pool"), "/(1/1/1|4/4/[01])/")
    else:
        held |= dict.fromkeys(("arena", "binning"), "BM_Fragmentation")
    reserved = {"CUSHION_INITIAL_SIZE": "256MiB"}  # a cold start is about order, not about the driver's allocations
    programs = [
        *(Program(f"pair_{runtime}", allocators=("native", "pool", "pool_vmm", "pool_deferred", "pool_auto", "null"),
                  select={"null": "Pair/", "pool_vmm": "Pair/", "pool_auto": "MallocFreePair/|MallocKernelFree/|Chain/"})  # no second stream
          for runtime in ("static", "shared")),
        Program("threads", pinned=False),
        Program("multi_stream_allocations", "async", BESIDE, streams, reserved, repetitions=3),
        Program("random_allocations", "async", TRACKED, dict.fromkeys(TRACKED, "/10000/(1|64)/"), series="tracking",
                rounds=30),
        Program("latency", "malloc", REAL, dict.fromkeys(REAL[1:], "Growing"), pinned=False),
        Program("latency", "async", ("native", "pool", "rmm_pool"), dict.fromkeys(("pool", "rmm_pool"), "Growing"),
                pinned=False),
        Program("random_allocations", "async",
                ("pool", "rmm_binning", "rmm_pool", "rmm_cuda_async", "pool_track", "native"), random_async),
        Program("fragmentation", "async", tuple(held), held=held),
        Program("backing", "malloc", ("native", "pool", "pool_vmm"), settings={"CUSHION_RELEASE_THRESHOLD": "0"}),
        Program("random_allocations", "malloc", ("pool", "pool_deferred", "native"), random_malloc),
        Program("random_allocations", "async",
                ("arena", "binning", "async", "rmm_arena", "rmm_pool_track") + (() if goals else ("null",)),
                random_async),
        Program("multi_stream_allocations", "malloc", REAL, streams, reserved, repetitions=3),
    ]
    if not goals:
        programs.append(Program("driver_pairs", select=loops))
    return programs


def quietest_cpu():
    """The CPU that is fastest just now. On a shared machine they differ by a factor of two, and change in seconds."""
    mine = os.sched_getaffinity(0)
    times = {}
    for cpu in mine:
        os.sched_setaffinity(0, {cpu})
        begin = time.perf_counter()
        sum(range(50_000))
        times[cpu] = time.perf_counter() - begin
    os.sched_setaffinity(0, mine)
    return min(times, key=times.get)


class Skip(Exception):
    pass


class Series:
    """What the rounds of a program under one allocator gave so far, and what the next is to run."""

    def __init__(self, program, allocator):
        self.program, self.allocator, self.label = program, allocator, program.label(allocator)
        self.rounds = 0  # begun
        self.timed = allocator not in program.held or allocator in program.select  # whether the next times anything
        self.selection = program.select.get(allocator)
        self.results = None  # Google Benchmark's JSON, the runs of all rounds in it

    def add(self, results, held):
        for entry in results["benchmarks"]:
            entry["round"] = self.rounds
            if held is not None:
                entry["held"] = held
        if self.results is not None:
            results["benchmarks"] = self.results["benchmarks"] + results["benchmarks"]
        self.results = results

    def select_next(self, results, seconds):
        """Leaves to the next round what is quick of these results, which took `seconds`."""
        slow, quick = 0, []
        for entry in results["benchmarks"]:
            if entry.get("error_occurred"):
                continue
            iteration = entry["real_time"] * table.NANOSECONDS[entry["time_unit"]] / 1e9
            if iteration > SLOW_CELL:
                slow += iteration * entry["iterations"]
            else:
                quick.append(entry["run_name"])
        self.selection = f"^({'|'.join(dict.fromkeys(quick))})$"
        self.timed = bool(quick) and seconds - slow < SLOW_TURN


class Bench:
    """One run: the build it is of, where its results go, and the time it has."""

    def __init__(self, build, out, scale, rounds):
        self.build, self.out, self.scale, self.rounds = build, out, scale, rounds
        self.emulator = scale == "emulator"
        self.budget = {"goals": 450, "full": 540, "complete": 3600, "emulator": 120}[scale]
        self.limit = self.budget / 4  # for one process: a slow one must not cost all the others their turn
        self.seconds = {"goals": 0.02, "full": 0.1, "complete": 0.2, "emulator": 0.02}[scale]
        self.deadline = time.monotonic() + self.budget
        self.failures, self.left_out = [], []

    def environment(self, allocator, settings, report=None):
        clean = {name: value for name, value in os.environ.items()
                 if name != "LD_PRELOAD" and not name.startswith("CUSHION_")}
        clean.setdefault("CUDA_VISIBLE_DEVICES", "0")
        if self.emulator:
            clean |= {"LD_LIBRARY_PATH": str(self.build / "emulator"), "EMU_MEMORY": "64G"}
        chosen = ALLOCATORS[allocator]
        if chosen.preload:
            clean["LD_PRELOAD"] = str(self.build / chosen.preload)
        clean |= chosen.settings
        if chosen.settings:
            clean |= settings | ({"CUSHION_REPORT": str(report)} if report else {})
        return clean

    def binary(self, program, allocator):
        return self.build / "bench" / (program.name + ALLOCATORS[allocator].suffix)

    def execute(self, program, allocator, selection, flags=(), report=None, timeout=60):
        line = [str(self.binary(program, allocator)), f"--allocator={allocator}", *flags]
        if program.api != "both":
            line.append(f"--api={program.api}")
        if selection:
            line.append(f"--benchmark_filter={selection}")
        if program.pinned:
            line = ["taskset", "--cpu-list", str(quietest_cpu())] + line
        return subprocess.run(line, env=self.environment(allocator, program.settings, report), timeout=timeout,
                              capture_output=True, text=True, check=False)

    @functools.cache
    def refusal(self, allocator):
        """Why Cushion does not serve as asked, by its own report: a preload without effect would time native CUDA."""
        wanted = ALLOCATORS[allocator].settings
        if not wanted:
            return None
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "report.json"
            result = self.execute(Program("driver_pairs" if self.emulator else "pair_static"), allocator,
                                  "Pair/.*/1048576", ["--benchmark_min_time=0.001"], path)
            if result.returncode == 77:
                raise Skip(result.stderr.strip())
            if result.returncode != 0 or not path.exists():
                said = [line for line in result.stderr.splitlines() if line.startswith("cushion")]
                return f"no report, exit code {result.returncode}: {' '.join(said) or result.stderr.strip()[-300:]}"
            report = json.loads(path.read_text())
        for name, value in wanted.items():
            if report["options"][name.removeprefix("CUSHION_")] != value:
                return f"{name} is {report['options'][name.removeprefix('CUSHION_')]}"
        if report["calls"]["served"] == 0 and allocator != "async":  # whose calls the driver serves
            return "it served no call"
        return None

    def processes(self, series):
        """What to run of a program in this round: (regular expression of benchmark names, whether for bytes held)."""
        if series.timed:
            yield series.selection, False
        if series.rounds == 1 and series.allocator in series.program.held:
            listed = self.execute(series.program, series.allocator, series.program.held[series.allocator],
                                  ["--benchmark_list_tests"])
            if listed.returncode == 77:
                raise Skip(listed.stderr.strip())
            for name in listed.stdout.split():
                yield f"^{name}$", True

    def measure(self, series):
        """One more round of a program under an allocator. Its JSON is written at once, so that nothing costs it."""
        program, allocator = series.program, series.allocator
        series.rounds += 1
        ran = False
        with tempfile.TemporaryDirectory() as folder:
            out, report = pathlib.Path(folder) / "out.json", pathlib.Path(folder) / "report.json"
            for selection, counts_held in self.processes(series):
                ran = True
                repetitions = 1 if counts_held else program.repetitions
                flags = [f"--benchmark_min_time={self.seconds}", f"--benchmark_repetitions={repetitions}",
                         f"--benchmark_out={out}", "--benchmark_out_format=json"]
                reports = counts_held and bool(ALLOCATORS[allocator].settings)
                what = f"{series.label}: round {series.rounds}: " + (f"{selection}: " if counts_held else "")
                begin = time.monotonic()
                allowed = min(max(self.deadline - begin, 0.1), self.limit)
                try:
                    result = self.execute(program, allocator, selection, flags, report if reports else None, allowed)
                except subprocess.TimeoutExpired:
                    series.timed = False
                    if allowed < self.limit:
                        self.left_out.append(f"{what}cut off, the {self.budget} s of the whole run are used up")
                    else:
                        self.failures.append(f"{what}cut off, it may run {self.limit:.0f} s")
                    break
                if result.returncode == 77:
                    raise Skip(result.stderr.strip())
                if result.returncode != 0:
                    series.timed = False
                    self.failures.append(f"{what}exit code {result.returncode}: {result.stderr.strip()[-500:]}")
                    continue
                results = json.loads(out.read_text())
                results["benchmarks"] = [entry for entry in results["benchmarks"] if entry["run_type"] == "iteration"]
                results["context"]["executable"] = os.path.relpath(self.binary(program, allocator), HERE.parent)
                if not counts_held and series.rounds == 1:
                    series.select_next(results, time.monotonic() - begin)
                held = None
                if reports:
                    held = sum(device[kind]["peak"] for device in json.loads(report.read_text())["devices"]
                               for kind in ("held", "forwarded"))
                    report.unlink()
                series.add(results, held)
        if not ran:
            self.failures.append(f"{series.label}: it has no such benchmark")
        if series.results is not None:
            (self.out / f"{series.label}.json").write_text(json.dumps(series.results, indent=1) + "\n")

    def run(self, programs):
        """Runs the programs: all rounds of one before the next."""
        for program in programs:
            running = [Series(program, allocator) for allocator in program.allocators
                       if not ALLOCATORS[allocator].suffix or self.binary(program, allocator).exists()]
            for number in range(1, (program.rounds or self.rounds) + 1):
                for series in running:
                    self.turn(series, number)
                running = [series for series in running if series.timed]

    def turn(self, series, number):
        if self.deadline - time.monotonic() < 1:
            series.timed = False
            self.left_out.append(f"{series.label}: from round {number} on, "
                                 f"the {self.budget} s of the whole run are used up")
            return
        begin, failures = time.monotonic(), len(self.failures)
        if reason := self.refusal(series.allocator):
            series.timed = False
            self.failures.append(f"{series.label}: {reason}")
        else:
            self.measure(series)
        print(f"{series.label:45} round {number} {time.monotonic() - begin:6.1f} s"
              f"{'  FAILED' * (len(self.failures) > failures)}", file=sys.stderr, flush=True)


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
    commit = os.environ.get("CUSHION_COMMIT") or output_of("git", "-C", str(HERE), "rev-parse", "HEAD")
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit[:12] if commit else None,
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


def describe_allocators(out):
    """Titles and settings, the latter for RMM as its programs' output says them."""
    settings = {name: ", ".join(f"{key}={value}" for key, value in allocator.settings.items())
                for name, allocator in ALLOCATORS.items()}
    for path in sorted(out.glob("*.*.rmm_*.json")):
        said = json.loads(path.read_text())["context"].get("allocator_settings")
        program, _, name, _ = path.name.split(".")
        known = settings[name].split("; ") if settings[name] else []
        settings[name] = "; ".join(known + [f"{program}: {said}"])
    return {name: {"title": allocator.title, "settings": settings[name]} for name, allocator in ALLOCATORS.items()}


def main():
    parser = argparse.ArgumentParser(description="Runs the benchmarks natively, under Cushion and with RMM.")
    parser.add_argument("build", type=lambda text: pathlib.Path(text).resolve())
    parser.add_argument("out", type=lambda text: pathlib.Path(text).resolve())
    parser.add_argument("--only", metavar="PROGRAM,...", type=lambda text: text.split(","))
    parser.add_argument("--rounds", metavar="N", type=int, default=3)
    scales = parser.add_mutually_exclusive_group()
    for scale in ("goals", "complete", "emulator"):
        scales.add_argument(f"--{scale}", dest="scale", action="store_const", const=scale, default="full")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error("--rounds: at least 1")
    build, out, scale = arguments.build, arguments.out, arguments.scale
    programs = plan(scale)
    if arguments.only:
        if unknown := set(arguments.only) - {program.series or program.name for program in programs}:
            parser.error(f"--only: there is no {', '.join(sorted(unknown))} in this scale")
        programs = [program for program in programs if (program.series or program.name) in arguments.only]
    bench = Bench(build, out, scale, arguments.rounds)
    needed = {build / ALLOCATORS[a].preload for program in programs for a in program.allocators}
    needed |= {build / "bench" / program.name for program in programs}
    if bench.emulator:
        needed.add(build / "emulator/libcuda.so.1")
    missing = [str(path) for path in sorted(needed) if not path.exists()]
    if missing:
        print(f"not built: {', '.join(missing)}", file=sys.stderr)
        return 1
    out.mkdir(parents=True, exist_ok=True)
    for program in programs if arguments.only else [Program("*", "*")]:
        for old in out.glob(program.label("*") + ".json"):
            old.unlink()
    machine = describe_machine(build, bench.emulator)
    try:
        bench.run(programs)
    except Skip as reason:
        print(reason)
        return 77
    except (OSError, subprocess.SubprocessError) as problem:
        print(problem, file=sys.stderr)
        return 1
    rows, errors = table.read_results(out, "cpu_time" if bench.emulator else "real_time")
    summary = {"schema": "cushion-bench", "version": 2, "scale": scale, "machine": machine,
               "rounds": bench.rounds, "allocators": describe_allocators(out),
               "settings": {f"{p.name}.{p.api}": p.settings for p in plan(scale) if p.settings}, "rows": rows,
               "failures": bench.failures + errors, "left_out": bench.left_out}
    summary = json.loads(json.dumps(summary))  # as a reader of the file sees it
    summary["goals"] = table.goals(summary)
    (out / "machine.json").write_text(json.dumps(machine, indent=1) + "\n")
    (out / "summary.json").write_text(json.dumps(summary, indent=1, ensure_ascii=False) + "\n")
    print("\n\n".join(table.tables(summary).values()))
    for reason in summary["left_out"]:
        print(f"LEFT OUT {reason}")
    for failure in summary["failures"]:
        print(f"FAILED {failure}")
    return 1 if summary["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
