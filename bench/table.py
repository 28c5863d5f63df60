#!/usr/bin/env python3
"""Tables of benchmark results, so that no figure is copied by hand.

    table.py [RESULTS]                    print every table in Markdown
    table.py [RESULTS] --write README.md  fill in the places that README marks
    table.py [RESULTS] --check README.md  exit 1 where README and the results differ

RESULTS (default: bench/results) is a folder that run.py wrote. README marks a table's place by two lines:

    <!-- bench:pair -->
    <!-- /bench:pair -->

FOLDER/pair is the table of another run, which RESULTS has in that folder.
"""

import argparse
import difflib
import json
import math
import pathlib
import re
import sys

NANOSECONDS = {"ns": 1, "us": 1e3, "ms": 1e6, "s": 1e9}
# Of fragmentation.cu, latency.cu and backing.cu.
COUNTERS = ("live", "ideal", "held", "mean", "p50", "p99", "p999", "max", "served")
PEERS = ("native", "rmm_pool", "rmm_arena", "rmm_binning", "rmm_cuda_async")  # of stream-ordered allocation
RANDOM = "BM_RandomAllocations/"
BY_STREAM = "`cudaMallocAsync`, shared runtime"  # heads the random table: whose program is linked so (CMakeLists.txt)


def read_results(folder, clock="real_time"):
    """Rows {program, api, benchmark, ns: {allocator: median}, counters: {allocator: {name: value}}} and errors, from
    Google Benchmark's JSON files.

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
                samples.setdefault(name, []).append((ns, entry))
        for name, values in samples.items():
            row = rows.setdefault((program, api, name), {"program": program, "api": api, "benchmark": name, "ns": {}})
            row["ns"][allocator], entry = sorted(values, key=lambda sample: sample[0])[len(values) // 2]
            if counters := {counter: entry[counter] for counter in COUNTERS if counter in entry}:
                row.setdefault("counters", {})[allocator] = counters
    return list(rows.values()), errors


def show_time(ns):
    if ns is None:
        return "–"
    for unit, size in (("ns", 1), ("µs", 1e3), ("ms", 1e6), ("s", 1e9)):
        if ns < 999.5 * size or unit == "s":
            value = ns / size
            return f"{value:.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f} {unit}"


def show_ratio(ratio):
    return "–" if ratio is None else f"{ratio:.{0 if ratio >= 9.95 else 2}f}×"


def show_fine(ratio):
    return "–" if ratio is None else f"{ratio:.3f}"


def quotient(numerator, denominator):
    return numerator / denominator if numerator and denominator else None


def mean(ratios):
    """The geometric mean of those that were measured."""
    known = [ratio for ratio in ratios if ratio is not None]
    return math.exp(sum(map(math.log, known)) / len(known)) if known else None


def grid(head, rows):
    head_line, *lines = ["| " + " | ".join(cells) + " |" for cells in [head, *rows]]
    return "\n".join([head_line, "|---" + "|---:" * (len(head) - 1) + "|", *lines])


class Results:
    """A summary, and what is asked of it."""

    def __init__(self, summary):
        self.titles = {name: allocator["title"] for name, allocator in summary["allocators"].items()}
        self.rows = summary["rows"]
        self.ns = {(row["program"], row["api"], row["benchmark"], allocator): ns
                   for row in self.rows for allocator, ns in row["ns"].items()}
        self.counters = {(row["program"], row["api"], row["benchmark"], allocator): counters
                         for row in self.rows for allocator, counters in row.get("counters", {}).items()}

    def of(self, program, api=None):
        return [row for row in self.rows if row["program"].startswith(program) and api in (None, row["api"])]

    def lead(self, row):
        """The best peer's time ÷ the pool's, of a row of the random table by stream.

        Native CUDA alone is no peer: without RMM's figures there is no lead.
        """
        times = row["ns"]
        peers = [times[name] for name in PEERS if name in times]
        has_rmm = any(name.startswith("rmm_") for name in times)
        return quotient(min(peers), times.get("pool")) if has_rmm else None


def speed_table(results, rows, head="benchmark", with_program=False, with_mean=False):
    """One line a workload: the time under every allocator, and native ÷ each of Cushion's."""
    present = [a for a in results.titles if any(a in row["ns"] for row in rows)]
    compared = [a for a in ("pool", "pool_deferred") if a in present and "native" in present]

    def ratios(row):
        return [quotient(row["ns"].get("native"), row["ns"].get(a)) for a in compared]

    lines = [[f"{row['program']} `{row['benchmark']}`" if with_program else f"`{row['benchmark']}`"]
             + [show_time(row["ns"].get(a)) for a in present] + [show_ratio(ratio) for ratio in ratios(row)]
             for row in rows]
    if with_mean:
        lines.append(["geometric mean"] + [""] * len(present)
                     + [show_ratio(mean(column)) for column in zip(*map(ratios, rows))])
    return grid([head] + [results.titles[a] for a in present]
                + ["native ÷ " + results.titles[a].split(", ")[1] for a in compared], lines)


def random_malloc_table(results):
    """cudaMalloc and cudaFree, beside RMM's pool, which is stream-ordered only."""
    rows = []
    for row in results.of("random_allocations", "malloc"):
        pool = results.ns.get(("random_allocations", "async", row["benchmark"], "rmm_pool"))
        rows.append(row | {"ns": row["ns"] | ({"rmm_pool": pool} if pool else {})})
    return rows and speed_table(results, rows, "`cudaMalloc`, shared runtime", with_mean=True)


def random_async_table(results):
    """Stream-ordered calls under every allocator, and the best peer against the pool."""
    rows = results.of("random_allocations", "async")
    present = [a for a in results.titles if any(a in row["ns"] for row in rows)]
    lines = [[f"`{row['benchmark']}`"] + [show_time(row["ns"].get(a)) for a in present]
             + [show_ratio(results.lead(row))] for row in rows]
    lines.append(["geometric mean"] + [""] * len(present) + [show_ratio(mean(map(results.lead, rows)))])
    return rows and grid([BY_STREAM] + [results.titles[a] for a in present] + ["best peer ÷ Cushion"], lines)


def tracking_table(results):
    """What each level of tracking costs, and RMM's tracking."""
    levels = {"tracking": ("pool", ("pool_track", "pool_sampled", "pool_stacks")),
              "random_allocations": ("rmm_pool", ("rmm_pool_track",))}
    pairs = [(off, on) for off, those in levels.values() for on in those if on in results.titles]
    rows = [row for program in levels for row in results.of(program, "async") if any(on in row["ns"] for on in levels[program][1])]
    columns = [[quotient(row["ns"].get(on), row["ns"].get(off)) for row in rows] for off, on in pairs]
    lines = [[f"`{row['benchmark']}`"] + [show_time(row["ns"].get(off)) for off, _ in levels.values()]
             + [show_fine(column[i]) for column in columns] for i, row in enumerate(rows)]
    return rows and grid([BY_STREAM] + [results.titles[off] for off, _ in levels.values()]
                         + [f"{results.titles[on]} ÷ off" for _, on in pairs], lines)


def held_table(results):
    """Peak of bytes held ÷ peak of bytes live, and what a best fit simulated on the host would hold."""
    rows = [row for row in results.rows if any("live" in c for c in row.get("counters", {}).values())]
    present = [a for a in results.titles if any("held" in row["counters"].get(a, {}) for row in rows)]
    lines = []
    for row in rows:
        trace = next(iter(row["counters"].values()))
        held = [row["counters"].get(a, {}).get("held") for a in present]
        lines.append([f"`{row['benchmark']}`", f"{trace['live'] / 2**20:.0f} MiB",
                      show_fine(trace["ideal"] / trace["live"])]
                     + [show_fine(quotient(bytes_held, trace["live"])) for bytes_held in held])
    head = ["held ÷ live, at peak", "live", "ideal best fit"]
    return rows and grid(head + [results.titles[a] for a in present], lines)


def backing_table(results):
    """What memory from the driver costs, and whether scattered memory serves a large request."""
    rows = [row | {"ns": {a: ns for a, ns in row["ns"].items() if row.get("counters", {}).get(a, {}).get("served", 1)}}
            for row in results.of("backing")]
    present = [a for a in results.titles if any(a in row["ns"] for row in results.of("backing"))]
    lines = [[f"`{row['benchmark']}`"] + [show_time(row["ns"].get(a)) for a in present] for row in rows]
    return rows and grid(["`cudaMalloc`; –: out of memory"] + [results.titles[a] for a in present], lines)


def latency_table(results):
    lines = [[f"`{row['benchmark']}`, {row['api']}", results.titles[a]]
             + [show_time(row["counters"][a][counter]) for counter in ("mean", "p50", "p99", "p999", "max")]
             for row in results.of("latency") for a in results.titles if a in row.get("counters", {})]
    return lines and grid(["benchmark", "under", "mean", "p50", "p99", "p99.9", "max"], lines)


def settings_table(results, summary):
    """How every column was measured."""
    used = {a for row in results.rows for a in row["ns"]}
    lines = [[allocator["title"], allocator["settings"]] for name, allocator in summary["allocators"].items()
             if name in used and allocator["settings"]]
    lines += [[f"{program}, every Cushion", ", ".join(f"{key}={value}" for key, value in settings.items())]
              for program, settings in summary["settings"].items()]
    return grid(["column", "settings"], lines)


def machine_line(machine):
    facts = [machine.get("gpu"), machine.get("driver") and f"driver {machine['driver']}",
             machine.get("nvcc") and f"CUDA {machine['nvcc']}",
             machine.get("cpu") and f"{machine['cpu']} ({machine['cores']} cores)", machine.get("compiler"),
             machine.get("date"), machine.get("commit") and f"commit {machine['commit']}"]
    return "Measured on " + ", ".join(fact for fact in facts if fact) + "."


def goal_table(goals):
    return grid(["measure", "goal", "measured", ""],
                [[goal["measure"], goal["goal"], goal["measured"],
                  "reported" if goal["met"] is None else "met" if goal["met"] else "missed"] for goal in goals])


def goals(summary):
    """What the product promises of these numbers, each judged on the numbers of this one run, and what is reported
    beside it without a bound. What was not measured is left out; of the emulated driver only bytes count.
    """
    results = Results(summary)
    emulator = summary["scale"] == "emulator"
    judged = held_goals(results, *(("driver_pairs", "both", "Async") if emulator else ("fragmentation", "async", "")))
    if not emulator:
        judged = random_goals(results) + pair_goals(results) + stream_goals(results) + judged + backing_goals(results) + latency_goals(results)
    return [{"measure": measure, "goal": f"{sense} {show(bound)}" if sense else "–", "measured": show(value),
             "met": None if not sense else value >= bound if sense == "≥" else value <= bound}
            for measure, value, sense, bound, show in judged if value is not None]


def random_goals(results):
    hardest = f"{RANDOM}100000/1"
    malloc, stream = (results.of("random_allocations", api) for api in ("malloc", "async"))
    row = next((row["ns"] for row in stream if row["benchmark"] == hardest), {})
    best = min((row[name] for name in PEERS if name in row and name != "native"), default=None)
    leads = [lead for row in stream if (lead := results.lead(row)) is not None]
    tracking = [ratio for row in stream
                if (ratio := quotient(row["ns"].get("pool_track"), row["ns"].get("pool"))) is not None]
    usual = next((row["ns"] for row in results.of("tracking") if row["benchmark"] == f"{RANDOM}10000/1"), {})
    stack = (usual["pool_stacks"] - usual["pool"]) / 10000 if {"pool", "pool_stacks"} <= usual.keys() else None

    def speedups(allocator):
        return mean(quotient(row["ns"].get("native"), row["ns"].get(allocator)) for row in malloc)

    def beside(allocator):
        return mean(quotient(results.ns.get(("random_allocations", "async", row["benchmark"], "rmm_pool")),
                             row["ns"].get(allocator)) for row in malloc)

    return [
        (f"`{hardest}` by stream, RMM's pool ÷ Cushion's", quotient(row.get("rmm_pool"), row.get("pool")), "≥", 500,
         show_ratio),
        (f"`{hardest}` by stream, RMM's best ÷ Cushion's pool", quotient(best, row.get("pool")), "≥", 4, show_ratio),
        (f"random table by stream, best peer ÷ Cushion, the worst of {len(leads)} cells", min(leads, default=None),
         "≥", 1, show_ratio),
        (f"the same, geometric mean of {len(leads)} cells", mean(leads), "≥", 5, show_ratio),
        ("random table by malloc, native ÷ `sync`, geometric mean", speedups("pool"), "≥", 100, show_ratio),
        ("random table by malloc, native ÷ `deferred`, geometric mean", speedups("pool_deferred"), "≥", 100,
         show_ratio),
        ("random table, RMM's pool by stream ÷ `sync` by malloc, geometric mean", beside("pool"), None, None,
         show_ratio),
        ("random table, RMM's pool by stream ÷ `deferred` by malloc, geometric mean", beside("pool_deferred"), None,
         None, show_ratio),
        (f"`{RANDOM}10000/1` by stream, tracking on ÷ off", quotient(usual.get("pool_track"), usual.get("pool")), "≤",
         1.1, show_fine),
        ("the same, sampled ÷ off", quotient(usual.get("pool_sampled"), usual.get("pool")), "≤", 1.15, show_fine),
        ("the same, call stacks of depth 20: more for each allocation and its free", stack, "≤", 1000, show_time),
        ("random table by stream, tracking on ÷ off, geometric mean", mean(tracking), None, None, show_fine),
        ("the same, the worst cell", max(tracking, default=None), None, None, show_fine),
    ]


def pair_goals(results):
    def pair(runtime, call, allocator):
        return results.ns.get((f"pair_{runtime}", "both", f"BM_{call}Pair/1048576", allocator))

    def host(allocator):
        return results.counters.get(("pair_static", "both", "BM_Chain/1048576", allocator), {}).get("host_ns")

    def scaling(allocator):
        one, many = (results.ns.get(("threads", "both", f"BM_ThreadsAsync/65536/threads:{count}", allocator))
                     for count in (1, 16))
        return quotient(one, many)

    return [
        ("malloc pair of 1 MiB, static runtime, native ÷ `sync`",
         quotient(pair("static", "MallocFree", "native"), pair("static", "MallocFree", "pool")), None, None,
         show_ratio),
        ("malloc pair of 1 MiB, static runtime, `sync`", pair("static", "MallocFree", "pool"), "≤", 700, show_time),
        ("malloc pair of 1 MiB, static runtime, `deferred` ÷ null hook",
         quotient(pair("static", "MallocFree", "pool_deferred"), pair("static", "MallocFree", "null")), "≤", 2.0,
         show_ratio),
        ("chain of malloc, kernel of 20 µs, free: the host's time, `sync` ÷ `auto`",
         quotient(host("pool"), host("pool_auto")), None, None, show_ratio),
        ("async pair of 1 MiB, static runtime, Cushion ÷ null hook",
         quotient(pair("static", "MallocFreeAsync", "pool"), pair("static", "MallocFreeAsync", "null")), "≤", 2.5,
         show_ratio),
        ("async pair of 1 MiB, shared runtime", pair("shared", "MallocFreeAsync", "pool"), "≤", 60, show_time),
        ("async pairs of 64 KiB, own streams, throughput of 16 threads ÷ 1", scaling("pool"), "≥", 10, show_ratio),
        ("the same of the null hook: the machine's own", scaling("null"), None, None, show_ratio),
    ]


def stream_goals(results):
    def streams(allocator, warm):
        return results.ns.get(("multi_stream_allocations", "async", f"BM_MultiStreamAllocations/4/4/{warm}", allocator))

    best = min((ns for peer in PEERS if (ns := streams(peer, 1))), default=None)
    judged = []
    for allocator in ("pool", "arena", "binning"):
        cold = streams(allocator, 0)
        judged += [(f"4 kernels on 4 streams, {allocator}, cold ÷ warm", quotient(cold, streams(allocator, 1)), "≤",
                    1.05, show_fine),
                   (f"4 kernels on 4 streams, {allocator}, cold ÷ best peer's warm", quotient(cold, best), "≤", 1.05,
                    show_fine)]
    kernels = [results.ns.get(("multi_stream_allocations", "async", f"BM_MultiStreamKernels/4/4/{warm}", "native"))
               for warm in (0, 1)]
    judged.append(("the same with no allocation at all, native: first step ÷ later", quotient(*kernels), None, None,
                   show_fine))
    return judged


def held_goals(results, program, api, call):
    judged = []
    for column in (1, 4, 64):
        counters = results.counters.get((program, api, f"BM_Fragmentation{call}/uniform_{column}", "pool"), {})
        judged.append((f"random table by stream, column of {column} MiB, held ÷ live at peak",
                       quotient(counters.get("held"), counters.get("live")), "≤", 1.1, show_fine))
    return judged


def backing_goals(results):
    def growth(allocator, bytes_):
        return results.ns.get(("backing", "malloc", f"BM_Growth/{bytes_}", allocator))

    def hit(call, allocator):
        return results.ns.get(("pair_static", "both", f"BM_{call}Pair/1048576", allocator))

    def held(allocator):
        counters = results.counters.get(("fragmentation", "async", "BM_Fragmentation/training", allocator), {})
        return quotient(counters.get("held"), counters.get("live"))

    scattered = {a: results.counters.get(("backing", "malloc", "BM_Scattered", a), {}) for a in ("native", "pool_vmm")}
    return [
        ("a block of half of all freed memory, scattered in pieces of 64 MiB: natively (1: served)",
         scattered["native"].get("served"), None, None, show_fine),
        ("the same under `BACKING=vmm`", scattered["pool_vmm"].get("served"), "≥", 1, show_fine),
        *((f"growth by {bytes_ >> 20} MiB, `vmm` ÷ native cudaMalloc",
           quotient(growth("pool_vmm", bytes_), growth("native", bytes_)), "≤" if bytes_ <= 64 << 20 else None,
           1 if bytes_ <= 64 << 20 else None, show_fine) for bytes_ in (2 << 20, 8 << 20, 64 << 20, 256 << 20, 1 << 30,
                                                                       4 << 30)),
        ("async pair of 1 MiB, static runtime, `vmm` ÷ `driver`",
         quotient(hit("MallocFreeAsync", "pool_vmm"), hit("MallocFreeAsync", "pool")), "≤", 1.05, show_fine),
        ("training loop, held ÷ live at peak, `vmm`", held("pool_vmm"), "≤", 1.05, show_fine),
        ("the same, PyTorch", held("torch"), None, None, show_fine),
        ("the same, PyTorch's expandable segments", held("torch_expandable"), None, None, show_fine),
    ]


def latency_goals(results):
    native = results.counters.get(("latency", "malloc", "BM_OneAllocation/65536", "native"), {}).get("mean")

    def slowest(api, allocator):
        counters = results.counters.get(("latency", api, "BM_PairWhileGrowing/65536", allocator), {})
        return quotient(counters.get("p999"), native)

    return [(f"p99.9 of a pair while another thread grows the pool ÷ one native cudaMalloc, {what}",
             slowest(api, allocator), "≤", 1, show_ratio)
            for what, api, allocator in (("by stream", "async", "pool"), ("malloc, `sync`", "malloc", "pool"),
                                         ("malloc, `deferred`", "malloc", "pool_deferred"))]


def tables(summary):
    """Markdown by name; a table without rows is left out."""
    results = Results(summary)
    timed = {
        "pair": (results.of("pair_static") + results.of("pair_shared"), {"with_program": True}),
        "multi_stream_malloc": (results.of("multi_stream", "malloc"), {}),
        "multi_stream_async": (results.of("multi_stream", "async"), {}),
        "threads": (results.of("threads"), {}),
        "driver": ([row for row in results.of("driver") if "Fragmentation" not in row["benchmark"]], {}),
    }
    found = {name: speed_table(results, rows, **options) for name, (rows, options) in timed.items() if rows}
    found |= {"random_malloc": random_malloc_table(results), "random_async": random_async_table(results),
              "tracking": tracking_table(results), "held": held_table(results), "backing": backing_table(results),
              "latency": latency_table(results),
              "goals": summary["goals"] and goal_table(summary["goals"]),
              "settings": settings_table(results, summary), "machine": machine_line(summary["machine"])}
    return {name: table for name, table in found.items() if table}


def fill(text, made):
    """`text` with every marked place filled. An unknown or unclosed mark, or none at all, is an error."""
    marks = re.findall(r"^<!-- bench:([\w/]+) -->$", text, re.MULTILINE)
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
        for other in sorted(arguments.results.glob("*/summary.json")):
            run = tables(json.loads(other.read_text()))
            made |= {f"{other.parent.name}/{name}": table for name, table in run.items()}
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
