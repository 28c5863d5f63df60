#!/usr/bin/env python3
"""Differential runs on a real GPU: each program natively, then under Cushion with each free mode that it is legal
under and with mapped memory. Output and exit code must be the same; the exit report must say that the pool served.

    run.py BUILD_DIR [--json OUT] [--jobs N] [--only PATTERN]

A line of output that begins with DIFF-OK states an allowed difference: it must be there in both runs, its text is
not compared. A process that does not end within its time is a failure (a deadlock), not a hang. Programs that want
much of the device's memory run one at a time, after the others, so that none fails for what another one took. Without
a GPU the run prints SKIP and the reason, and exits 77, which ctest counts as skipped.
"""

import argparse
import concurrent.futures
import dataclasses
import fnmatch
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from no_gpu import SKIPPED, no_gpu

MODES = {"sync": {"CUSHION_FREE": "sync"}, "deferred": {"CUSHION_FREE": "deferred"}, "vmm": {"CUSHION_BACKING": "vmm"}}
HERE = Path(__file__).resolve().parent

# How a program is linked: against which runtime, with which default stream. The first two have every runtime and every
# default stream between them, and run everything; the others run BASIC, under FREE=sync.
BUILDS = ("legacy_static", "per-thread_shared", "legacy_shared", "per-thread_static")
BASIC = {"errors", "double_free", "kinds", "attributes", "host_function", "two_streams", "async_error", "gate_sync",
         "hold_async", "hold_mixed", "handover", "nodes", "outside", "relaxed"}

IPC_REFUSED = ("cushion: cuIpcGetMemHandle answers error 1: the driver exports no memory of CUSHION_BACKING=vmm; "
               "CUSHION_ALLOCATOR=cuda shares memory natively")


@dataclasses.dataclass(frozen=True)
class Program:
    name: str
    command: tuple
    env: tuple = ()
    code: int = 0  # the exit code that it ends with natively
    deferred: bool = True  # runs under FREE=deferred, too: needs nothing of cudaFree's wait but safe reuse
    says_mapped: str = ""  # the one line that Cushion prints to stderr under BACKING=vmm
    mapped: bool = True  # runs under BACKING=vmm, too
    alone: bool = False  # takes, or looks at, much of the device's memory
    timeout: int = 30  # seconds


def programs(build):
    gpu, preload = build / "tests" / "gpu", build / "tests" / "preload"
    # What only cudaFree's own wait orders, or completes.
    need_wait = {"two_streams", "pinned", "device_printf", "elapsed", "async_error"}
    scenarios = {
        "values": ("errors", "double_free", "alignment", "kinds", "attributes", "reset", "many", "host_function",
                   "memory_info"),
        "order": ("two_streams", "pinned", "device_printf", "elapsed", "async_error", "gate_sync", "gate_async",
                  "hold_sync", "hold_async", "hold_mixed", "handover", "stress"),
        "capture": ("nodes", "graph_owned", "outside", "relaxed", "beside_thread_local", "beside_relaxed", "refused"),
    }
    for linked in BUILDS:
        everything = linked in BUILDS[:2]
        for source, names in scenarios.items():
            for name in names:
                if everything or name in BASIC:
                    yield Program(f"{source}.{name}.{linked}", (gpu / f"{source}_{linked}", name),
                                  code=5 if name == "device_printf" else 0,
                                  deferred=everything and name not in need_wait,
                                  says_mapped=IPC_REFUSED if name == "attributes" else "", alone=name == "memory_info")
        yield Program(f"lifetime.{linked}", (gpu / f"lifetime_{linked}",), code=3, deferred=everything)
        yield Program(f"driver_entry.{linked}", (gpu / f"driver_entry_{linked}",), deferred=False)
    for linked in ("legacy_static", "legacy_shared"):
        yield Program(f"thrust_sort.{linked}", (gpu / f"thrust_sort_{linked}",))
    yield Program("cublas_gemm.legacy_shared", (gpu / "cublas_gemm_legacy_shared",))

    for route in ("dlsym", "proc_address_v2", "proc_address", "proc_address_nested", "per_thread", "linked", "dlvsym",
                  "rtld"):
        yield Program(f"driver.route_{route}", (preload / f"route_{route}",), deferred=False)
    yield Program("driver.lifetime", (preload / "lifetime",), code=9)
    for scenario, code in (("fork_before", 7), ("fork_after", 10), ("threads", 13), ("main_thread_exits", 0)):
        yield Program(f"driver.{scenario}", (preload / "process", scenario), code=code)

    # A framework with a pool of its own asks for memory too rarely to tell one way to free from the other.
    def python(name, program, *args, deferred=False, mapped=True, **env):
        return Program(f"python.{name}", (sys.executable, HERE / "python" / program, *args), tuple(env.items()),
                       deferred=deferred, mapped=mapped, alone=True, timeout=60)

    yield python("torch", "torch_program.py")
    yield python("torch_uncached", "torch_program.py", deferred=True, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    yield python("torch_async", "torch_program.py", PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync")
    yield python("torch_ipc", "torch_ipc.py", mapped=False)
    yield python("cupy", "cupy_program.py")
    yield python("cupy_no_pool", "cupy_program.py", "--no-pool", deferred=True)
    yield python("cupy_async_pool", "cupy_program.py", "--async-pool")
    yield python("jax_platform", "jax_program.py", XLA_PYTHON_CLIENT_ALLOCATOR="platform",
                 XLA_PYTHON_CLIENT_PREALLOCATE="false")
    yield python("jax_growing", "jax_program.py", XLA_PYTHON_CLIENT_PREALLOCATE="false")
    yield python("jax", "jax_program.py")  # begins by taking three quarters of the device
    yield python("numba", "numba_program.py", deferred=True)


@dataclasses.dataclass
class Run:
    code: int
    out: str
    err: str
    seconds: float
    served: int = 0
    forwarded: int = 0
    reports: int = 0


def execute(program, shim=None, mode=None):
    env = {name: value for name, value in os.environ.items() if not name.startswith("CUSHION_") and name != "LD_PRELOAD"}
    env.update(program.env)
    with tempfile.TemporaryDirectory(prefix="cushion-") as scratch:
        if shim:
            env.update(LD_PRELOAD=str(shim), CUSHION_ALLOCATOR="pool", **MODES[mode],
                       CUSHION_REPORT=f"{scratch}/%p.json")
        started = time.monotonic()
        process = subprocess.Popen([str(part) for part in program.command], env=env, stdin=subprocess.DEVNULL,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
                                   start_new_session=True)
        try:
            out, err = process.communicate(timeout=program.timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            err += f"\nno end within {program.timeout} s"
        run = Run(process.returncode, out, err, time.monotonic() - started)
        for path in Path(scratch).glob("*"):
            calls = json.loads(path.read_text())["calls"]
            run.served += calls["served"]
            run.forwarded += calls["forwarded"]
            run.reports += 1
        return run


def comparable(out):
    return ["DIFF-OK" if line.startswith("DIFF-OK") else line for line in out.splitlines()]


def difference(program, mode, native, cushion):
    """Why this run is not like the native one; empty if it is."""
    if native.code != cushion.code:
        last = (cushion.err.strip().splitlines() or ["nothing on stderr"])[-1]
        return f"exit code {native.code} natively, {cushion.code} under Cushion ({last})"
    ours, theirs = comparable(cushion.out), comparable(native.out)
    for line, (a, b) in enumerate(zip(theirs, ours), 1):
        if a != b:
            return f"line {line}: natively `{a}`, under Cushion `{b}`"
    if len(ours) != len(theirs):
        return f"{len(theirs)} lines natively, {len(ours)} under Cushion"
    said = [line for line in cushion.err.splitlines() if line.startswith("cushion:")]
    if said != ([program.says_mapped] if program.says_mapped and mode == "vmm" else []):
        return f"stderr: {said[0] if said else 'Cushion does not say what it should'}"
    if cushion.reports == 0:
        return "no report was written"
    if cushion.served == 0:
        return "nothing was served by the pool"
    return ""


def judge(program, shim):
    """One row for each mode: (program, mode, outcome, why, native, cushion)."""
    if not os.access(program.command[0], os.X_OK):
        return [(program, "native", "skipped", f"{program.command[0].name} is not built", None, None)]
    native = execute(program)
    if native.code == SKIPPED and native.out.startswith("SKIP"):
        return [(program, "native", "skipped", native.out.strip().removeprefix("SKIP: "), native, None)]
    if native.code != program.code:
        last = (native.err.strip().splitlines() or native.out.strip().splitlines() or ["no output"])[-1]
        why = f"natively: exit code {native.code}, expected {program.code} ({last})"
        return [(program, "native", "failed", why, native, None)]
    rows = []
    for mode in MODES:
        if (mode == "deferred" and not program.deferred) or (mode == "vmm" and not program.mapped):
            continue
        cushion = execute(program, shim, mode)
        why = difference(program, mode, native, cushion)
        rows.append((program, mode, "failed" if why else "passed", why, native, cushion))
    return rows


def main():
    parser = argparse.ArgumentParser(description="Differential runs of real programs on a GPU.")
    parser.add_argument("build", type=Path, help="the build directory")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--jobs", type=int, default=max(1, min(4, (os.cpu_count() or 2) // 2)), help="processes at once")
    parser.add_argument("--only", default="*", help="only programs whose name matches, e.g. 'order.*'")
    args = parser.parse_args()
    reason = no_gpu()
    if reason:
        print(f"SKIP: {reason}")
        return SKIPPED
    build = args.build.resolve()
    shim = build / "libcushion.so"
    if not shim.exists():
        parser.error(f"{shim} is not built")
    chosen = [program for program in programs(build) if fnmatch.fnmatch(program.name, args.only)]
    if not chosen:
        parser.error(f"no program is named like {args.only}")

    started = time.monotonic()
    print(f"{'program':<42} {'free':<9} {'result':<8} {'served':>8} {'forwarded':>9} {'native s':>9} {'cushion s':>9}")
    rows = []

    def show(of_program):
        for program, mode, outcome, why, native, cushion in of_program:
            counts = f"{cushion.served:>8} {cushion.forwarded:>9}" if cushion else f"{'-':>8} {'-':>9}"
            times = "".join(f" {run.seconds:>9.2f}" if run else f" {'-':>9}" for run in (native, cushion))
            print(f"{program.name:<42} {mode:<9} {outcome:<8} {counts}{times}{'  ' + why if why else ''}", flush=True)
        rows.extend(of_program)

    with concurrent.futures.ThreadPoolExecutor(args.jobs) as workers:
        for of_program in workers.map(lambda program: judge(program, shim), [each for each in chosen if not each.alone]):
            show(of_program)
    together = time.monotonic()
    for program in chosen:
        if program.alone:
            show(judge(program, shim))
    ended = time.monotonic()

    tally = {outcome: sum(row[2] == outcome for row in rows) for outcome in ("passed", "failed", "skipped")}
    if args.json:
        runs = [{"program": program.name, "free": mode, "outcome": outcome, "why": why,
                 "native": native and {"code": native.code, "seconds": round(native.seconds, 3)},
                 "cushion": cushion and {"code": cushion.code, "seconds": round(cushion.seconds, 3),
                                         "served": cushion.served, "forwarded": cushion.forwarded}}
                for program, mode, outcome, why, native, cushion in rows]
        args.json.write_text(json.dumps({"schema": "cushion-gpu-programs", "version": 1, **tally,
                                         "seconds": round(ended - started, 1), "runs": runs}, indent=1) + "\n")
    for program, mode, outcome, why, native, cushion in rows:
        if outcome == "failed":
            print(f"\nFAILED {program.name} {mode}: {why}")
            for title, run in (("native", native), ("cushion", cushion)):
                if run:
                    tail = (run.out + run.err).splitlines()[-12:]
                    print("\n".join([f"--- {title}, exit code {run.code}", *tail]))
    print(f"{tally['passed']} passed, {tally['failed']} failed, {tally['skipped']} skipped in {ended - started:.0f} s: "
          f"{together - started:.0f} s {args.jobs} at once, {ended - together:.0f} s one at a time")
    return 1 if tally["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
