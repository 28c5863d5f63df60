#!/usr/bin/env python3
"""Runs GPU programs with Cushion preloaded under compute-sanitizer's memcheck, which must find nothing: as a user
would, when Cushion steps aside and says so, and with CUSHION_DISABLE=0, when it serves. First memcheck is shown to work:
it must find the invalid access of the scenario that makes one.

    sanitizer.py BUILD_DIR [--jobs N] [--only PATTERN]

compute-sanitizer is taken from PATH, from CUDA's folders, or from BUILD_DIR/../sanitizer (tools/sanitizer.sh). Without
it or a GPU the run prints SKIP and the reason, and exits 77.
"""

import argparse
import concurrent.futures
import fnmatch
import glob
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from no_gpu import SKIPPED, no_gpu

TIMEOUT = 150  # seconds
STEPS_ASIDE = "libsanitizer-collection.so is loaded: running on native CUDA"

# Programs whose every access is valid, and that wait for nothing that memcheck's order of launches would hold up.
# What they are refused on purpose (a second free, a pointer that is not theirs) is no invalid access.
PROGRAMS = {
    "values": ("errors", "double_free", "alignment", "kinds", "many", "reset"),
    "order": ("two_streams", "pinned", "hold_async", "hold_mixed", "handover"),
    "capture": ("nodes", "graph_owned", "outside", "relaxed"),
}


def find_sanitizer(build):
    places = [shutil.which("compute-sanitizer"), *sorted(glob.glob("/usr/local/cuda*/bin/compute-sanitizer")),
              build.parent / "sanitizer" / "compute-sanitizer"]
    return next((Path(place) for place in places if place and os.access(place, os.X_OK)), None)


def programs(build):
    folder = build / "tests" / "gpu"
    for source, scenarios in PROGRAMS.items():
        for linked in ("legacy_static", "per-thread_shared"):
            for scenario in scenarios:
                yield f"{source}.{scenario}.{linked}", [folder / f"{source}_{linked}", scenario]
    yield "torture", [folder / "torture_legacy_static", "--seconds", "5", "--threads", "4", "--live", "512"]


def execute(sanitizer, build, command, **options):
    """Exit code, output, and how many allocations Cushion served (None: no report)."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("CUSHION_") and key != "LD_PRELOAD"}
    with tempfile.TemporaryDirectory(prefix="cushion-") as scratch:
        report = Path(scratch) / "report.json"
        env.update(LD_PRELOAD=str(build / "libcushion.so"), CUSHION_REPORT=str(report), **options)
        try:
            run = subprocess.run([sanitizer, "--tool", "memcheck", "--report-api-errors", "no",
                                  "--error-exitcode", "99", *command], env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                 stderr=subprocess.STDOUT, text=True, errors="replace", timeout=TIMEOUT)
            code, output = run.returncode, run.stdout
        except subprocess.TimeoutExpired as late:
            code, output = 124, (late.stdout or b"").decode(errors="replace") + f"\nno end within {TIMEOUT} s"
        served = json.loads(report.read_text())["calls"]["served"] if report.exists() else None
        return code, output, served


def errors_in(output):
    summary = re.search(r"ERROR SUMMARY: (\d+) error", output)
    return int(summary.group(1)) if summary else None


def judge(sanitizer, build, name, command, serving):
    code, output, served = execute(sanitizer, build, command, CUSHION_DISABLE="0" if serving else "auto")
    aside = STEPS_ASIDE in output
    if errors_in(output) != 0 or code != 0:
        why = f"exit code {code}, {errors_in(output)} errors"
    elif serving and (aside or not served):
        why = "Cushion does not serve"
    elif not serving and (not aside or served is not None):
        why = "Cushion does not step aside, or does not say so"
    else:
        why = ""
    return name, "serving" if serving else "aside", served, why, output


def finds_nothing(sanitizer, build):
    """Why memcheck did not find an invalid access; empty if it did."""
    code, output, _ = execute(sanitizer, build, [build / "tests" / "gpu" / "order_legacy_static", "async_error"])
    return "" if errors_in(output) and "Invalid __global__ write" in output else f"exit code {code}\n{output[-2000:]}"


def main():
    parser = argparse.ArgumentParser(description="Runs GPU programs under compute-sanitizer's memcheck.")
    parser.add_argument("build", type=Path, help="the build directory")
    parser.add_argument("--jobs", type=int, default=4, help="processes at once")
    parser.add_argument("--only", default="*", help="only programs whose name matches, e.g. 'order.*'")
    args = parser.parse_args()
    build = args.build.resolve()
    sanitizer = find_sanitizer(build)
    reason = no_gpu() or ("" if sanitizer else "no compute-sanitizer (tools/sanitizer.sh fetches it)")
    if reason:
        print(f"SKIP: {reason}")
        return SKIPPED
    chosen = [each for each in programs(build) if fnmatch.fnmatch(each[0], args.only)]
    missing = [name for name, command in chosen if not os.access(command[0], os.X_OK)]
    if missing or not chosen:
        print(f"not built: {', '.join(missing)}" if missing else f"no program matches {args.only}", file=sys.stderr)
        return 2
    started = time.monotonic()
    why = finds_nothing(sanitizer, build)
    print(f"FAILED: memcheck does not find an invalid access: {why}" if why else "memcheck finds an invalid access")
    failed = 1 if why else 0
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as workers:
        runs = [workers.submit(judge, sanitizer, build, name, command, serving)
                for name, command in chosen for serving in (False, True)]
        for run in runs:
            name, mode, served, why, output = run.result()
            print(f"{name:<36} {mode:<8} {'-' if served is None else served:>8} served  "
                  f"{'FAILED: ' + why if why else '0 errors'}", flush=True)
            if why:
                failed += 1
                print("\n".join(output.splitlines()[-60:]), flush=True)
    print(f"memcheck: {len(runs)} runs, {failed} failed in {time.monotonic() - started:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
