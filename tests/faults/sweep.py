#!/usr/bin/env python3
"""The fault sweep: every driver call that Cushion makes fails at its n-th time, and the program must not suffer for it.

    sweep.py BUILD_DIR [--seconds S]                            as many points as there is time for, in a fixed order
    sweep.py BUILD_DIR --full                                   all of them
    sweep.py BUILD_DIR --setting NAME --point cuMemFree_v2:3:2  that one, with what the program said

A point is a setting of Cushion's and a plan for the emulated driver (EMU_FAIL): function, which call of it, code. The
functions are those of core/driver.def, the calls those that a run without faults makes of them, up to a bound. The
codes are out of memory, another plain one and a sticky one, and a plain one from that call on (out of memory, where a
function makes something).

After a run with a fault (program.cpp says what it does):
  - each step has the native result or the planned code, and a plain fault is seen by one step at most;
  - what failed works when it is called again, and frees never fail because an allocation of Cushion's did;
  - no byte is wrong, no capture mode or current context changed, the process ended by itself and in time;
  - the report is whole, and agrees with the program about what is live and with itself about the rest;
  - the driver has given out what the report says is held, and no more than a handful of events and streams besides.
"""

import argparse
import collections
import itertools
import json
import os
import queue
import random
import re
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

LIMIT_S = 30        # a run takes 0.02 s
OUT_OF_MEMORY, PLAIN, STICKY = 2, 999, 700
CODES = {OUT_OF_MEMORY, PLAIN, STICKY}
WITHOUT_CONTEXT = ("cuDriverGetVersion", "cuDevicePrimaryCtxRetain")  # they are no place to learn of a broken one
COMMON = {"EMU_MEMORY": "128M", "CUSHION_MAX_SIZE": "32MiB", "CUSHION_SEGMENT_SIZE": "2MiB"}
PATIENCE, LASTING_PATIENCE = "2s", "50ms"  # OOM_WAIT: for a busy machine; where no answer comes, no longer than needed
SETTINGS = {
    "pool": {},
    "deferred": {"CUSHION_FREE": "deferred"},
    "tracked": {"CUSHION_TRACK": "on", "CUSHION_INIT": "junk", "CUSHION_MAGAZINE_SIZE": "0"},
    "whole_device": {"CUSHION_MAX_SIZE": "100%", "CUSHION_SEGMENT_SIZE": "8MiB"},
    "vmm": {"CUSHION_BACKING": "vmm"},
    "vmm_whole_device": {"CUSHION_BACKING": "vmm", "CUSHION_MAX_SIZE": "100%", "CUSHION_MAGAZINE_SIZE": "0"},
    "arena": {"CUSHION_ALLOCATOR": "arena", "CUSHION_SUPERBLOCK_SIZE": "4MiB"},
    "arena_deferred": {"CUSHION_ALLOCATOR": "arena", "CUSHION_FREE": "deferred", "CUSHION_MAX_SIZE": "100%"},
    "binning": {"CUSHION_ALLOCATOR": "binning", "CUSHION_SUPERBLOCK_SIZE": "4MiB"},
    "guarded": {"CUSHION_GUARD": "100", "CUSHION_QUARANTINE": "256KiB"},
    "guarded_deferred": {"CUSHION_GUARD": "100", "CUSHION_QUARANTINE": "256KiB", "CUSHION_FREE": "deferred"},
    "async": {"CUSHION_ALLOCATOR": "async", "CUSHION_INIT": "zero"},
    "async_deferred": {"CUSHION_ALLOCATOR": "async", "CUSHION_FREE": "deferred"},
    "cuda": {"CUSHION_ALLOCATOR": "cuda", "CUSHION_TRACK": "on"},
    "driver_11": {"EMU_DRIVER_VERSION": "11040"},
    "driver_11_deferred": {"EMU_DRIVER_VERSION": "11040", "CUSHION_FREE": "deferred", "CUSHION_MAX_SIZE": "100%"},
    "driver_12_0": {"EMU_DRIVER_VERSION": "12000", "CUSHION_INIT": "zero"},
    "driver_12_5": {"EMU_DRIVER_VERSION": "12050", "CUSHION_ALLOCATOR": "arena"},
}
LASTING = ("cuMemAlloc_v2", "cuMemCreate", "cuMemAllocFromPoolAsync", "cuEventCreate", "cuStreamCreate")  # out of memory, for good
ALLOCATING = {*LASTING, "cuMemGetInfo_v2", "cuMemsetD8Async"}  # a free needs none of them
HANDFUL = 8         # streams and spare events more than without a fault; a leak in a lasting fault is more
FENCES = 32         # events of fences under way, FenceSet::kMost, that no query ends
SPARE = 1           # byte: what Cushion keeps back for frees on a full device (core/context.h)


class Plan:
    """What fails: one call of a function, or from it on all."""

    def __init__(self, text):
        self.text = text
        self.function, call, code = text.split(":")
        self.lasts = call.endswith("+")
        self.code = int(code)
        # A capture in a broken context cannot be ended, and then refuses the thread's other calls. Memory that cannot
        # be freed, or is not known to be free, is missed elsewhere.
        self.answers = {code, "900", "901", "2"} if self.code == STICKY else {code, "2"} if self.lasts else {code}


def point(function, call, code, lasts=False):
    return f"{function}:{call}{'+' if lasts else ''}:{code}"


class Run:
    """What one run of the program left behind."""

    LINE = re.compile(r"(\d+) (.*?)( again)?: (.*)")
    FULL = re.compile(r"cushion: [^\n]* is out of device memory: [^\n]*\n(?:  [^\n]*\n)*")

    def __init__(self, status, folder):
        self.status = status
        # A full device is told where allocations are tracked, maybe in the middle of a line of the program's.
        self.text = self.FULL.sub("", (folder / "out").read_text(errors="replace"))
        self.steps, self.again, self.strange, self.left = {}, {}, [], None
        told = False  # of a wrong free, which the program makes: its stacks follow
        for line in self.text.splitlines():
            match = self.LINE.fullmatch(line)
            told = line.startswith("cushion: cuMemFree") or (told and line.startswith("  "))
            if told:
                continue
            if match:
                number, what, again, value = match.groups()
                (self.again if again else self.steps)[int(number)] = (what, value)
            elif line.startswith("left "):
                self.left = tuple(int(figure) for figure in line.split()[1:])
            else:
                self.strange.append(line)
        self.calls = dict(self.figures(folder / "calls", 1))
        self.kept = {kind: (objects, size) for kind, (objects, size) in self.figures(folder / "kept", 2)}
        try:
            self.report = json.loads((folder / "report.json").read_text())
        except (OSError, ValueError) as error:
            self.report = str(error)

    @staticmethod
    def figures(path, count):
        for line in path.read_text().splitlines() if path.exists() else ():
            name, *numbers = line.split()
            numbers = tuple(int(number) for number in numbers)
            yield name, numbers if count > 1 else numbers[0]


class Server:
    """A process that runs the program again and again, each time in a fresh child."""

    def __init__(self, build, folder, preload):
        self.folder = folder
        env = {name: os.environ[name] for name in ("PATH", "TMPDIR") if name in os.environ}
        env |= {"LD_LIBRARY_PATH": str(build / "emulator"), "ASAN_OPTIONS": "verify_asan_link_order=0:detect_leaks=0"}
        if preload:
            env["LD_PRELOAD"] = str(build / "libcushion.so")
        self.process = subprocess.Popen([build / "tests" / "faults" / "program", "--serve"], env=env, text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=1)

    def run(self, variables):
        for old in self.folder.iterdir():
            old.unlink()
        here = {"EMU_COUNT": self.folder / "calls", "EMU_LEFT": self.folder / "kept",
                "CUSHION_REPORT": self.folder / "report.json"}
        settings = " ".join(f"{name}={value}" for name, value in {**COMMON, **variables, **here}.items())
        self.process.stdin.write(f"{LIMIT_S} {self.folder / 'out'} {settings}\n")
        return Run(self.process.stdout.readline().strip(), self.folder)

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def complaints(setting, plan, run, native, healthy):
    """What is wrong with a run, natively without faults `native`, and under this setting without faults `healthy`."""
    found = []
    if run.status != "0":
        status = "no end in time" if run.status == "timeout" else f"wait status {run.status}"
        found.append(f"ended badly: {status}, after {run.text.splitlines()[-1:]}")
        return found
    said = "cushion: CUSHION_BACKING=vmm has no effect: "  # where the driver would not say whether it can
    found += [f"unexpected line {line!r}" for line in run.strange if not line.startswith(said) or plan is None]
    if run.left is None:
        return [f"the program did not get to its end, but to {run.text.splitlines()[-1:]}"]
    found += steps_of(setting, plan, run, native)
    if isinstance(run.report, str):
        return found + [f"no report: {run.report}"]
    return found + list(books_of(setting, plan, run, healthy))


def steps_of(setting, plan, run, native):
    # Before 12.5 a free waits by freeing a byte kept for it: it needs the driver to give that byte back.
    old_driver = int(SETTINGS[setting].get("EMU_DRIVER_VERSION", 13000)) < 12050
    lasting = plan is not None and (plan.lasts or plan.code == STICKY)
    failed = []
    for number, (what, value) in native.steps.items():
        name, seen = run.steps.get(number, (None, None))
        if name != what:
            yield f"step {number} ({what}) is missing"
        elif seen == value:
            continue
        elif plan is not None and seen in plan.answers:
            failed.append((number, what))
        elif plan is not None and (value, seen) == (str(OUT_OF_MEMORY), "0"):
            pass  # the program did not get all of the device before
        elif seen != "skipped":
            yield f"step {number} ({what}): {seen}, natively {value}"
    skipped = [number for number, (_, seen) in run.steps.items() if seen == "skipped"]
    if len(failed) > 1 and not lasting:
        yield f"one fault, and {len(failed)} steps failed: {failed}"
    if not failed and plan is not None and len(skipped) > sum(v == "skipped" for _, v in native.steps.values()):
        yield "steps were skipped and none failed"
    if plan is not None and plan.function in ALLOCATING and plan.code != STICKY and not (plan.lasts and old_driver):
        wrong = [step for step in failed if step[1].startswith("free")]
        if wrong:
            yield f"frees failed: {wrong}"
    for number, (what, value) in run.again.items():
        if value != native.steps.get(number, (None, "0"))[1] and not lasting:
            yield f"step {number} ({what}) failed again: {value}"
    beyond = {number: step for number, step in run.steps.items() if number not in native.steps}
    for number, (what, value) in beyond.items():  # after a broken context was reset
        if value not in ("0", "kept"):
            yield f"step {number} ({what}) after the reset: {value}"
    if run.left != native.left and not lasting:
        yield f"left {run.left}, natively {native.left}"


def books_of(setting, plan, run, healthy):
    report, calls = run.report, run.report["calls"]
    if not report["live_complete"]:
        yield "the report's list of live blocks is not complete"
    total = collections.Counter()
    for device in report["devices"]:
        for figure in ("requested", "handed_out", "held", "forwarded"):
            total[figure] += device[figure]["current"]
            if device[figure]["peak"] < device[figure]["current"]:
                yield f"{figure}: peak below current"
    live = collections.Counter()
    driver_bytes, driver_pool = 0, 0  # of what the driver serves: cuMemAlloc's bytes, blocks of its pools
    for row in report["live"]:
        live["bytes"] += row["size"] * row["count"]
        live[row["served_by"]] += row["count"]
        if row["served_by"] == "driver" and row["api"] in ("cuMemAlloc", "cuMemAllocPitch"):
            driver_bytes += row["size"] * row["count"]
        elif row["served_by"] == "driver" and row["api"].endswith("Async"):
            driver_pool += row["count"]
    size, blocks, perhaps_size, perhaps_blocks = run.left
    known = ((size, blocks), (size + perhaps_size, blocks + perhaps_blocks))
    if (live["bytes"], live["pool"] + live["driver"]) not in known:
        yield f"live in the report {dict(live)}, in the program {run.left}"
    if total["requested"] + total["forwarded"] != live["bytes"]:
        yield f"bytes in use {dict(total)}, live {dict(live)}"
    if calls["served"] != calls["frees_served"] + calls["reset_blocks"] + live["pool"]:
        yield f"served {calls['served']}, freed {calls['frees_served']}, lost in resets {calls['reset_blocks']}, " \
              f"live {live['pool']}"
    pooled = SETTINGS[setting].get("CUSHION_ALLOCATOR") not in ("async", "cuda")
    if pooled and not total["requested"] <= total["handed_out"] <= total["held"]:
        yield f"not requested <= handed out <= held: {dict(total)}"
    if plan is not None and plan.code == STICKY and run.left[1] < healthy.left[1]:
        return  # broken at its end: the driver's side says nothing
    given = run.kept["device"][1] + run.kept["handles"][1]
    if not 0 <= given - total["held"] - driver_bytes <= SPARE:
        yield f"the driver has given {given} bytes, the report knows of {dict(total)}"
    unknown = run.kept["pool"][0] - driver_pool - (live["pool"] if not pooled else 0)
    # What the async allocator took and could not use goes back with its next allocation, if the driver then takes it.
    refused = plan is not None and plan.function == "cuMemFreeAsync" and not pooled
    if unknown < 0 or (unknown > 0 and not refused):
        yield f"the driver's pool has given {run.kept['pool']}, live are {dict(live)}"
    for kind, more in (("graph", 1), ("managed", 1), ("host", 0), ("streams", HANDFUL), ("events", FENCES + HANDFUL)):
        if run.kept[kind][0] > healthy.kept[kind][0] + more:
            yield f"{kind}: {run.kept[kind][0]} left, {healthy.kept[kind][0]} without a fault"


def own_functions(root):
    return re.findall(r"^CUSHION_DRIVER\((\w+)", (root / "core" / "driver.def").read_text(), re.M)


def points_of(setting, healthy, functions, bound):
    for function in functions:
        for call in range(1, min(healthy.calls.get(function, 0), bound) + 1):
            for code in CODES if function not in WITHOUT_CONTEXT else CODES - {STICKY}:
                yield setting, point(function, call, code)
            # Mapped memory is full when there are no handles; a byte for frees is there then.
            mapped = function == "cuMemAlloc_v2" and SETTINGS[setting].get("CUSHION_BACKING") == "vmm"
            if function not in WITHOUT_CONTEXT and not mapped:
                yield setting, point(function, call, OUT_OF_MEMORY if function in LASTING else PLAIN, lasts=True)


def in_turn(points):
    """Each function of each setting has its turn before any has the next: what is called seldom is tried early."""
    groups = collections.defaultdict(list)
    for setting, text in points:
        groups[setting, text.split(":")[0]].append((setting, text))
    shuffled = random.Random(1)
    for group in groups.values():
        shuffled.shuffle(group)
    turns = itertools.zip_longest(*groups.values())
    return [one for turn in turns for one in turn if one is not None]


def variables_of(setting, plan):
    patience = LASTING_PATIENCE if plan is not None and plan.lasts else PATIENCE
    fault = {"EMU_FAIL": plan.text} if plan is not None else {}
    return {"CUSHION_OOM_WAIT": patience} | SETTINGS[setting] | fault


class Sweep:
    def __init__(self, args):
        self.args = args
        self.native, self.healthy = {}, {}
        self.tried, self.bad = collections.Counter(), []
        self.lock = threading.Lock()

    def try_point(self, server, setting, text):
        plan = Plan(text)
        run = server.run(variables_of(setting, plan))
        found = complaints(setting, plan, run, self.native[setting], self.healthy[setting])
        with self.lock:
            self.tried[setting] += 1
            if found:
                self.bad.append((setting, text))
                print(f"FAILED --setting {setting} --point {text}: " + "\n    ".join(found), flush=True)
        return run

    def learn(self, native, server):
        """The run without faults, natively and under Cushion: they must agree."""
        for setting in self.args.setting or SETTINGS:
            base = {name: value for name, value in SETTINGS[setting].items() if name.startswith("EMU_")}
            self.native[setting] = native.run(base)
            self.healthy[setting] = server.run(variables_of(setting, None))
            for _ in range(4):  # what is kept at the end depends on who was faster
                other = server.run(variables_of(setting, None))
                for kind in ("streams", "events"):
                    self.healthy[setting].kept[kind] = max(other.kept[kind], self.healthy[setting].kept[kind])
            found = complaints(setting, None, self.healthy[setting], self.native[setting], self.healthy[setting])
            if found:
                self.bad.append((setting, "no fault"))
                print(f"FAILED --setting {setting} without a fault: " + "\n    ".join(found))

    def unlisted(self, functions):
        """Calls that Cushion makes and core/driver.def does not name: they would not be tried."""
        allowed = {*functions, "cuGetProcAddress", "cuGetProcAddress_v2"}
        return sorted({name for setting, run in self.healthy.items() for name, count in run.calls.items()
                       if count > self.native[setting].calls.get(name, 0) and name not in allowed})


def work(build, folder, todo, sweep, deadline):
    folder.mkdir()
    server = Server(build, folder, preload=True)
    while time.monotonic() < deadline:
        try:
            sweep.try_point(server, *todo.get_nowait())
        except queue.Empty:
            break
    server.close()


def main():
    parser = argparse.ArgumentParser(description="Fails every driver call that Cushion makes (emulated driver only).")
    parser.add_argument("build", type=Path, help="the build directory")
    parser.add_argument("--seconds", type=float, default=45, help="time for the points (default: 45)")
    parser.add_argument("--full", action="store_true", help="all points, however long it takes")
    parser.add_argument("--bound", type=int, default=300, help="the most calls of one function (default: 300)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time (default: processors)")
    parser.add_argument("--setting", action="append", choices=SETTINGS, help="only this setting (may be given again)")
    parser.add_argument("--function", action="append", help="only this driver function (may be given again)")
    parser.add_argument("--point", action="append", help="only this fault, FUNCTION:CALL[+]:CODE; shows the run")
    args = parser.parse_args()
    build, root = args.build.resolve(), Path(__file__).resolve().parents[2]
    functions = own_functions(root)
    sweep = Sweep(args)
    with tempfile.TemporaryDirectory(prefix="cushion-") as scratch:
        scratch = Path(scratch)
        for name in ("native", "learning"):
            (scratch / name).mkdir()
        native = Server(build, scratch / "native", preload=False)
        server = Server(build, scratch / "learning", preload=True)
        sweep.learn(native, server)
        unlisted = sweep.unlisted(functions)
        if unlisted:
            sweep.bad.append(("all", "unlisted calls"))
            print(f"FAILED: Cushion calls {unlisted}, which core/driver.def does not name")
        if args.point:
            for setting in sweep.healthy:
                for text in args.point:
                    run = sweep.try_point(server, setting, text)
                    print(run.text, json.dumps(run.report, indent=1), run.kept, sep="\n")
                    print("environment:", shlex.join(f"{name}={value}" for name, value in
                                                     {**COMMON, **variables_of(setting, Plan(text))}.items()))
            points = []
        else:
            points = [point for setting, run in sweep.healthy.items()
                      for point in points_of(setting, run, args.function or functions, args.bound)]
        native.close()
        server.close()
        todo = queue.Queue()
        for one in in_turn(points):
            todo.put(one)
        start = time.monotonic()
        deadline = start + (float("inf") if args.full else args.seconds)
        workers = [threading.Thread(target=work, args=(build, scratch / str(i), todo, sweep, deadline))
                   for i in range(max(args.jobs, 1))]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    for setting, count in sorted(sweep.tried.items()):
        print(f"{setting}: {count} points")
    print(f"{sum(sweep.tried.values())} fault points tried of {len(points)} in {len(sweep.healthy)} settings, "
          f"{time.monotonic() - start:.0f} s: {len(sweep.bad)} failed")
    return 1 if sweep.bad else 0


if __name__ == "__main__":
    sys.exit(main())
