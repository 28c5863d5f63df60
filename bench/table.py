#!/usr/bin/env python3
"""Tables of benchmark results, so that no figure is copied by hand.

    table.py [RESULTS]                    print every table in Markdown
    table.py [RESULTS] --write README.md  fill in the places that README marks
    table.py [RESULTS] --check README.md  exit 1 where README and the results differ

RESULTS (default: bench/results) is a folder that run.py wrote. README marks a table's place by two lines:

    <!-- bench:pair -->
    <!-- /bench:pair -->
"""

import argparse
import difflib
import json
import math
import pathlib
import re
import sys

ALLOCATORS = {  # in column order; the first is what the others are compared with
    "native": "native",
    "pool": "Cushion, `sync`",
    "pool_deferred": "Cushion, `deferred`",
    "null": "null hook",
}
NANOSECONDS = {"ns": 1, "us": 1e3, "ms": 1e6, "s": 1e9}


def read_results(folder, clock="real_time"):
    """Rows {program, api, benchmark, ns: {allocator: median}} and errors, from Google Benchmark's JSON files.

    The files are called PROGRAM.API.ALLOCATOR.json. A benchmark's name loses its allocator and what the library
    appends, so that one row is one workload. For several threads it is wall-clock time ÷ pairs of all threads.
    """
    rows, errors = {}, []
    for path in sorted(pathlib.Path(folder).glob("*.*.*.json")):
        program, api, allocator = path.name.removesuffix(".json").split(".")
        samples = {}
        for entry in json.loads(path.read_text())["benchmarks"]:
            name = entry["run_name"].replace(f"/{allocator}/", "/", 1)
            name = re.sub(r"/(real_time|manual_time|iterations:\d+|repeats:\d+)", "", name)
            if entry.get("error_occurred"):
                errors.append(f"{path.name}: {name}: {entry['error_message']}")
            elif entry["run_type"] == "iteration":
                if "/threads:" in name:
                    ns = 1e9 / entry["items_per_second"]
                else:
                    ns = entry[clock] * NANOSECONDS[entry["time_unit"]]
                samples.setdefault(name, []).append(ns)
        for name, values in samples.items():
            row = rows.setdefault((program, api, name), {"program": program, "api": api, "benchmark": name, "ns": {}})
            row["ns"][allocator] = sorted(values)[len(values) // 2]
    return list(rows.values()), errors


def show_time(ns):
    if ns is None:
        return "–"
    for unit, size in (("ns", 1), ("µs", 1e3), ("ms", 1e6), ("s", 1e9)):
        if ns < 999.5 * size or unit == "s":
            value = ns / size
            return f"{value:.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f} {unit}"


def show_ratio(ratio):
    return "–" if ratio is None else f"{ratio:.{0 if ratio >= 9.95 else 1 if ratio >= 0.995 else 2}f}×"


def speedup(row, allocator):
    times = row["ns"]
    return times["native"] / times[allocator] if "native" in times and allocator in times else None


def speed_table(rows, with_program=False, mean=False):
    """One line a workload: the time under every allocator, and native ÷ each of Cushion's."""
    present = [a for a in ALLOCATORS if any(a in row["ns"] for row in rows)]
    compared = [a for a in present if a.startswith("pool") and "native" in present]
    head = ["benchmark"] + [ALLOCATORS[a] for a in present]
    head += ["native ÷ " + ALLOCATORS[a].split(", ")[1] for a in compared]
    lines = ["| " + " | ".join(head) + " |", "|---" + "|---:" * (len(head) - 1) + "|"]
    for row in rows:
        name = f"{row['program']} `{row['benchmark']}`" if with_program else f"`{row['benchmark']}`"
        cells = [name] + [show_time(row["ns"].get(a)) for a in present]
        cells += [show_ratio(speedup(row, a)) for a in compared]
        lines.append("| " + " | ".join(cells) + " |")
    if mean:
        cells = ["geometric mean"] + [""] * len(present)
        for allocator in compared:
            ratios = [r for r in (speedup(row, allocator) for row in rows) if r is not None]
            cells.append(show_ratio(math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def machine_line(machine):
    facts = [machine.get("gpu"), machine.get("driver") and f"driver {machine['driver']}",
             machine.get("nvcc") and f"CUDA {machine['nvcc']}",
             machine.get("cpu") and f"{machine['cpu']} ({machine['cores']} cores)", machine.get("compiler"),
             machine.get("date"), machine.get("commit") and f"commit {machine['commit']}"]
    return "Measured on " + ", ".join(fact for fact in facts if fact) + "."


def goal_table(goals):
    lines = ["| measure (pairs of 1 MiB) | goal | measured | |", "|---|---:|---:|---|"]
    for goal in goals:
        verdict = "met" if goal["met"] else "missed"
        lines.append(f"| {goal['measure']} | {goal['goal']} | {goal['measured']} | {verdict} |")
    return "\n".join(lines)


def goals(rows):
    """What the product promises of these numbers, each judged on the numbers of this one run.

    A goal whose rows were not measured is left out.
    """
    times = {(row["program"], row["api"], row["benchmark"], allocator): ns
             for row in rows for allocator, ns in row["ns"].items()}

    def pair(runtime, call, allocator):
        return times.get((f"pair_{runtime}", "both", f"BM_{call}Pair/1048576", allocator))

    def threads(count):
        return times.get(("threads", "both", f"BM_ThreadsAsync/65536/threads:{count}", "pool"))

    def streams(prewarm):
        return times.get(("multi_stream_allocations", "async", f"BM_MultiStreamAllocations/4/4/{prewarm}", "pool"))

    def mean_speedup(allocator):
        ratios = [ratio for row in rows if (row["program"], row["api"]) == ("random_allocations", "malloc")
                  and (ratio := speedup(row, allocator)) is not None]
        return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None

    def quotient(numerator, denominator):
        return numerator / denominator if numerator and denominator else None

    judged = [
        ("malloc pair, static runtime, native ÷ `sync`",
         quotient(pair("static", "MallocFree", "native"), pair("static", "MallocFree", "pool")), "≥", 100, show_ratio),
        ("malloc pair, static runtime, `sync`", pair("static", "MallocFree", "pool"), "≤", 700, show_time),
        ("malloc pair, static runtime, `deferred` ÷ null hook",
         quotient(pair("static", "MallocFree", "pool_deferred"), pair("static", "MallocFree", "null")), "≤", 2.0,
         show_ratio),
        ("async pair, static runtime, Cushion ÷ null hook",
         quotient(pair("static", "MallocFreeAsync", "pool"), pair("static", "MallocFreeAsync", "null")), "≤", 2.5,
         show_ratio),
        ("async pair, shared runtime", pair("shared", "MallocFreeAsync", "pool"), "≤", 60, show_time),
        ("random allocations by malloc, geometric mean, native ÷ `sync`", mean_speedup("pool"), "≥", 100, show_ratio),
        ("random allocations by malloc, geometric mean, native ÷ `deferred`", mean_speedup("pool_deferred"), "≥", 100,
         show_ratio),
        ("4 kernels on 4 streams, cold ÷ warm", quotient(streams(0), streams(1)), "≤", 1.05,
         lambda ratio: f"{ratio:.3f}×"),
        ("async pairs, throughput of 16 threads ÷ 1", quotient(threads(1), threads(16)), "≥", 10, show_ratio),
    ]
    return [{"measure": measure, "goal": f"{sense} {show(bound)}", "measured": show(value),
             "met": value >= bound if sense == "≥" else value <= bound}
            for measure, value, sense, bound, show in judged if value is not None]


def tables(summary):
    """Markdown by name; a table without rows is left out."""

    def of(program, api=None):
        return [row for row in summary["rows"] if row["program"].startswith(program) and api in (None, row["api"])]

    made = {
        "pair": (of("pair_static") + of("pair_shared"), {"with_program": True}),
        "random_malloc": (of("random_allocations", "malloc"), {"mean": True}),
        "random_async": (of("random_allocations", "async"), {"mean": True}),
        "multi_stream_malloc": (of("multi_stream", "malloc"), {}),
        "multi_stream_async": (of("multi_stream", "async"), {}),
        "threads": (of("threads"), {}),
        "driver": (of("driver"), {}),
    }
    found = {name: speed_table(rows, **options) for name, (rows, options) in made.items() if rows}
    if summary["goals"]:
        found["goals"] = goal_table(summary["goals"])
    found["machine"] = machine_line(summary["machine"])
    return found


def fill(text, made):
    """`text` with every marked place filled. An unknown or unclosed mark, or none at all, is an error."""
    marks = re.findall(r"^<!-- bench:(\w+) -->$", text, re.MULTILINE)
    if not marks:
        raise ValueError("it marks no place for a table (<!-- bench:NAME -->)")
    for name in marks:
        if name not in made:
            raise ValueError(f"there are no results for bench:{name}, only for {', '.join(made)}")
        place = re.compile(rf"(<!-- bench:{name} -->\n).*?(<!-- /bench:{name} -->)", re.DOTALL)
        if not place.search(text):
            raise ValueError(f"bench:{name} is not closed by <!-- /bench:{name} -->")
        text = place.sub(lambda match: f"{match[1]}{made[name]}\n{match[2]}", text)
    return text


def main():
    parser = argparse.ArgumentParser(description="Tables of benchmark results, in Markdown.")
    parser.add_argument("results", nargs="?", type=pathlib.Path, default=pathlib.Path(__file__).parent / "results")
    parser.add_argument("--write", metavar="README", type=pathlib.Path, help="fill in the marked places")
    parser.add_argument("--check", metavar="README", type=pathlib.Path, help="exit 1 where it and the results differ")
    arguments = parser.parse_args()
    try:
        made = tables(json.loads((arguments.results / "summary.json").read_text()))
        target = arguments.write or arguments.check
        if target is None:
            print("\n\n".join(f"### {name}\n\n{table}" for name, table in made.items()))
            return 0
        old = target.read_text()
        new = fill(old, made)
    except (OSError, ValueError) as problem:
        print(f"{arguments.write or arguments.check or arguments.results}: {problem}", file=sys.stderr)
        return 2
    if arguments.write:
        target.write_text(new)
        return 0
    sys.stderr.writelines(difflib.unified_diff(old.splitlines(True), new.splitlines(True), str(target), "the results"))
    return int(new != old)


if __name__ == "__main__":
    sys.exit(main())
