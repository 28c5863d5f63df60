#!/usr/bin/env python3
"""Runs the torture program on a real GPU: natively for a short while, then under Cushion with every allocator and every
way to free, and with the pool under pressure. No byte may be wrong, no thread may hang, no block may be left over.

    torture.py BUILD_DIR [--seconds S] [--json OUT] [--only PATTERN] [-- OPTIONS OF THE PROGRAM]

--seconds is for each setting. First it is shown that a wrong byte is found: a
run in which the program spoils one itself must fail and name it. Without a GPU the run prints SKIP and the reason, and
exits 77, which ctest counts as skipped.
"""

import argparse
import dataclasses
import fnmatch
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from no_gpu import SKIPPED, no_gpu

PATIENCE = 120  # seconds that a run may take beside its own


@dataclasses.dataclass
class Outcome:
    name: str
    env: dict
    code: int
    figures: dict  # of the closing line
    served: int
    live: int  # blocks that the report says were never freed
    why: str  # empty if it passed
    output: str


def values_of(build, option):
    """The valid words of an option, as the launcher tells them."""
    table = subprocess.run([build / "cushion", "options"], capture_output=True, text=True, check=True).stdout
    return re.search(rf"^CUSHION_{option} +\S+ +(\S+)", table, re.MULTILINE).group(1).split("|")


def settings(build):
    yield "native", None
    for allocator in values_of(build, "ALLOCATOR"):
        if allocator == "cuda":  # FREE has no effect
            yield allocator, {"CUSHION_ALLOCATOR": allocator}
            continue
        for free in values_of(build, "FREE"):
            yield f"{allocator}, {free}", {"CUSHION_ALLOCATOR": allocator, "CUSHION_FREE": free}
    pressure = {"CUSHION_MAX_SIZE": "1GiB", "CUSHION_SEGMENT_SIZE": "2MiB", "CUSHION_GROWTH_MAX": "64MiB",
                "CUSHION_MAGAZINE_SIZE": "1MiB", "CUSHION_RELEASE_THRESHOLD": "0"}
    for free in values_of(build, "FREE"):
        yield f"pool, {free}, pressure", {"CUSHION_FREE": free, **pressure}
        yield f"pool, {free}, vmm, pressure", {"CUSHION_FREE": free, **pressure, "CUSHION_BACKING": "vmm"}
    yield "arena, deferred, vmm", {"CUSHION_ALLOCATOR": "arena", "CUSHION_FREE": "deferred", "CUSHION_BACKING": "vmm"}
    yield "pool, deferred, junk, tracking", {"CUSHION_FREE": "deferred", "CUSHION_INIT": "junk", "CUSHION_TRACK": "on"}


def figures_of(output):
    closing = [line for line in output.splitlines() if line.startswith("torture: ")]
    if not closing:
        return {}
    return {name.replace(" ", "_"): float(value) if "." in value else int(value)
            for name, value in re.findall(r"([a-z ]+?) (\d[\d.]*)(?:, |$)", closing[-1].removeprefix("torture: "))}


def execute(build, name, extra, arguments, seconds):
    env = {key: value for key, value in os.environ.items() if not key.startswith("CUSHION_") and key != "LD_PRELOAD"}
    program = build / "tests" / "gpu" / "torture_legacy_static"
    with tempfile.TemporaryDirectory(prefix="cushion-") as scratch:
        report = Path(scratch) / "report.json"
        if extra is not None:
            env.update(LD_PRELOAD=str(build / "libcushion.so"), CUSHION_REPORT=str(report), **extra)
        try:
            run = subprocess.run([program, "--seconds", str(seconds), *arguments], env=env, stdin=subprocess.DEVNULL,
                                 stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                                 timeout=seconds + PATIENCE)
            code, output = run.returncode, run.stdout
        except subprocess.TimeoutExpired as late:
            code, output = 124, (late.stdout or b"").decode(errors="replace") + "\nno end"
        served = live = 0
        why = ""
        if extra is not None:
            try:
                said = json.loads(report.read_text())
                served, live = said["calls"]["served"], sum(group["count"] for group in said["live"])
                if live != 0 or not said["live_complete"]:
                    why = f"{live} blocks live at the end"
                if (served == 0) != (extra.get("CUSHION_ALLOCATOR") == "cuda"):
                    why = f"{served} allocations served"
            except (OSError, ValueError, KeyError) as error:
                why = f"no report: {error}"
        figures = figures_of(output)
        if code != 0 or figures.get("wrong_bytes") != 0 or not figures.get("bytes_verified"):
            why = f"exit code {code}, {figures.get('wrong_bytes', '?')} wrong bytes"
        return Outcome(name, extra or {}, code, figures, served, live, why, output)


def find_spoilt_byte(build):
    """Why the program did not find the byte that it spoilt itself; empty if it did."""
    spoilt = execute(build, "spoilt", None, ["--spoil"], 5)
    if spoilt.code != 1 or not spoilt.figures.get("wrong_bytes"):
        return f"a spoilt byte is not found: exit code {spoilt.code}\n{spoilt.output[-2000:]}"
    if "WRONG at" not in spoilt.output or "spoil (no part of the program)" not in spoilt.output:
        return f"a spoilt byte is found, but its history does not say who wrote it\n{spoilt.output[-2000:]}"
    return ""


def main():
    parser = argparse.ArgumentParser(description="Runs the torture program under every setting.")
    parser.add_argument("build", type=Path, help="the build directory")
    parser.add_argument("--seconds", type=int, default=5, help="for each setting (5)")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--only", default="*", help="only settings whose name matches, e.g. 'pool*'")
    parser.add_argument("arguments", nargs="*", help="options of the program, after --")
    args = parser.parse_args()
    reason = no_gpu()
    if reason:
        print(f"SKIP: {reason}")
        return SKIPPED
    build = args.build.resolve()
    if not os.access(build / "tests" / "gpu" / "torture_legacy_static", os.X_OK):
        print("SKIP: torture_legacy_static is not built (no nvcc?)")
        return SKIPPED
    chosen = [(name, extra) for name, extra in settings(build) if fnmatch.fnmatch(name, args.only)]
    if not chosen:
        print(f"no setting matches {args.only}", file=sys.stderr)
        return 2
    why = find_spoilt_byte(build)
    print(f"FAILED: {why}" if why else "a byte that the program spoils itself is found, and its history names it")

    started = time.monotonic()
    print(f"{'setting':<32} {'s':>6} {'operations':>11} {'launches':>10} {'graphs':>7} {'streams':>8} "
          f"{'verified':>12} {'wrong':>6} {'served':>9} {'no memory':>9}")
    outcomes = []
    for name, extra in chosen:
        one = execute(build, name, extra, args.arguments, args.seconds)
        f = one.figures
        print(f"{name:<32} {f.get('seconds', 0):>6.1f} {f.get('operations', 0):>11} {f.get('launches', 0):>10} "
              f"{f.get('graphs', 0):>7} {f.get('streams', 0):>8} {f.get('bytes_verified', 0) / 2**30:>8.1f} GiB "
              f"{f.get('wrong_bytes', '?'):>6} {one.served:>9} {f.get('out_of_memory', 0):>9}"
              f"{'  FAILED: ' + one.why if one.why else ''}", flush=True)
        if one.why:
            print("\n".join(one.output.splitlines()[-80:]), flush=True)
        outcomes.append(one)
    cushion = [one for one in outcomes if one.name != "native"]
    total = {key: sum(one.figures.get(key, 0) for one in cushion)
             for key in ("operations", "launches", "graphs", "streams", "bytes_verified", "wrong_bytes")}
    failed = [one.name for one in outcomes if one.why]
    print(f"under Cushion: {total['operations']} operations, {total['bytes_verified'] / 2**40:.2f} TiB verified, "
          f"{total['wrong_bytes']} wrong bytes; {len(outcomes) - len(failed)} settings passed, {len(failed)} failed in "
          f"{time.monotonic() - started:.0f} s")
    if args.json:
        rows = [{"setting": one.name, "environment": one.env, "code": one.code, "served": one.served,
                 "live": one.live, "failed": one.why, **one.figures} for one in outcomes]
        args.json.write_text(json.dumps({"schema": "cushion-gpu-torture", "version": 1,
                                         "finds_a_spoilt_byte": not why, "under_cushion": total, "failed": failed,
                                         "runs": rows}, indent=1) + "\n")
    return 1 if failed or why else 0


if __name__ == "__main__":
    sys.exit(main())
