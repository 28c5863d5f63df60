#!/usr/bin/env python3
"""Tests of `cushion report` over real reports (programs under the preload, emulated driver) and over samples/.

    run.py BUILD_DIR CASE...     runs the named cases (all without a name)
    run.py --list                prints the cases' names, one a line

Exit code 77 means skipped, as ctest understands it: a case that needs a checker of somebody else's (jsonschema,
protobuf or Go for profiles, Chromium) says so where it is not there.
"""

import argparse
import collections
import gzip
import html
import json
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

SKIPPED = 77
TIMEOUT_S = 60
HERE = Path(__file__).resolve().parent
SCHEMA = HERE.parent.parent / "tools" / "report.schema.json"
FULL = HERE / "samples" / "full.json"  # a report with every optional section


class Skip(Exception):
    """This case cannot be run here; the text says why."""


def check(condition, message):
    if not condition:
        raise AssertionError(message)


def equal(found, expected, what):
    check(found == expected, f"{what}: {found!r}, expected {expected!r}")


class Setting:
    """Where the build is, and an empty folder for this case's files."""

    def __init__(self, build, scratch):
        self.build = build
        self.scratch = scratch

    def sanitized(self):
        libraries = subprocess.run(["ldd", str(self.build / "cushion")], capture_output=True, text=True).stdout
        return re.search("lib[at]san", libraries) is not None

    def cushion(self, *arguments, code=0, **environment):
        """`cushion report`: stdout as bytes, and stderr; fails if it exits otherwise."""
        command = [str(self.build / "cushion"), "report", *map(str, arguments)]
        done = subprocess.run(command, env={**os.environ, **environment}, cwd=self.scratch, capture_output=True,
                              stdin=subprocess.DEVNULL, timeout=TIMEOUT_S)
        err = done.stderr.decode()
        equal(done.returncode, code, f"exit code of {command}; it said {err!r}")
        return done.stdout, err

    def text(self, *arguments, **options):
        out, err = self.cushion(*arguments, **options)
        equal(err, "", "stderr")
        return out.decode()

    def real(self, name, *command, **options):
        """The report that a program of this build writes at exit."""
        path = self.scratch / name
        env = {"PATH": os.environ.get("PATH", ""), "LD_LIBRARY_PATH": str(self.build / "emulator"),
               "LD_PRELOAD": str(self.build / "libcushion.so"), "CUSHION_REPORT": str(path), "CUSHION_TRACK": "on",
               "ASAN_OPTIONS": "verify_asan_link_order=0:detect_leaks=0", **options}
        program = [str(self.build / "tests" / command[0]), *command[1:]]
        subprocess.run(program, env=env, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                       timeout=TIMEOUT_S)
        return path

    def leaks(self, name="leaks.json", more=4, **options):
        return self.real(name, "report/leaks", str(more), **options)

    def write(self, name, value):
        path = self.scratch / name
        path.write_text(value if isinstance(value, str) else json.dumps(value))
        return path


def full():
    return json.loads(FULL.read_text())


def live_bytes(report):
    return sum(group["size"] * group["count"] for group in report["live"])


def refused(setting, path, *words):
    """Exit code 2, nothing on stdout, and one line that names the file and holds these words."""
    out, err = setting.cushion(path, code=2)
    equal(out, b"", "stdout")
    check(err.startswith(f"cushion: {path}:") and err.count("\n") == 1, f"not one line about {path}: {err!r}")
    for word in words:
        check(word in err, f"no {word!r} in {err!r}")
    return err


CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


# --- the schema -------------------------------------------------------------------------------------------

def validator(strict=False):
    try:
        import jsonschema
    except ImportError as error:
        raise Skip("no jsonschema (Debian: python3-jsonschema, PyPI: jsonschema)") from error
    if not hasattr(jsonschema, "Draft202012Validator"):
        raise Skip("this jsonschema knows no draft 2020-12 (4.0 and later do)")
    schema = json.loads(SCHEMA.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)

    def close(node):
        for value in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
            close(value)
        if isinstance(node, dict) and node.get("type") == "object":
            node.setdefault("additionalProperties", False)

    if strict:
        close(schema)
    return jsonschema.Draft202012Validator(schema)


def errors(schema, report):
    return [f"/{'/'.join(map(str, e.absolute_path))}: {e.message}" for e in schema.iter_errors(report)]


@case
def schema_describes_real_reports(setting):
    """All that programs' reports hold is in the schema, to the last field."""
    schema = validator(strict=True)
    for path in (setting.leaks("tracked.json"), setting.leaks("untracked.json", CUSHION_TRACK="off"),
                 setting.leaks("auto.json", CUSHION_FREE="auto"), setting.leaks("cuda.json", CUSHION_ALLOCATOR="cuda"),
                 setting.real("demo.json", "driver_demo", "5"), FULL,
                 setting.real("holes.json", "report/holes", setting.scratch / "blocks")):
        report = json.loads(path.read_text())
        equal(errors(schema, report), [], f"{path.name} against the schema")
    equal(len(json.loads((setting.scratch / "tracked.json").read_text())["live"]), 4, "groups of live blocks")


def changed(*path, to=None, remove=False):
    report = full()
    node = report
    for step in path[:-1]:
        node = node[step]
    if remove:
        del node[path[-1]]
    else:
        node[path[-1]] = to
    return report, "/" + "/".join(map(str, path))


@case
def schema_and_reader_refuse_the_same(setting):
    """What the schema calls wrong the reader refuses, naming the value; and both take the sample as it is."""
    schema = validator()
    equal(errors(schema, full()), [], "the sample against the schema")
    setting.text(FULL)
    wrong = [changed("schema", to="another-report"), changed("schema", remove=True), changed("version", to="1"),
             changed("version", to=0), changed("version", remove=True), changed("program", to=[]),
             changed("program", "pid", to=-1), changed("program", "name", to=None), changed("program", "rank", to="0"),
             changed("options", "TRACK", to=True), changed("devices", to={}), changed("devices", 0, "held", to=5),
             changed("devices", 0, "held", "peak", to="5"), changed("devices", 0, "device", to=1.5),
             changed("calls", "served", remove=True), changed("calls", "by_function", "cuMemAlloc", "served", to=-5),
             changed("driver", "seconds", to="soon"), changed("waits", remove=True),
             changed("live_complete", to="yes"), changed("live", to=None), changed("live", to={}),
             changed("live", 3, "size", to="big"), changed("live", 4, "count", to=-2),
             changed("live", 0, "stack", to="0"), changed("live", 2, "stream", to=7), changed("stacks", to=3),
             changed("stacks", 1, to=[1, 2]), changed("stacks", 1, "frames", to=7),
             changed("stacks", 1, "frames", 2, to="1"), changed("stacks", 0, "frames", 0, to=-1),
             changed("stacks", 2, "interval", remove=True), changed("stacks", 3, "live_bytes", to=-4),
             changed("stacks", 4, "wait_s", to="long"), changed("modules", to={}),
             changed("modules", 0, "path", to=3), changed("modules", 1, "build_id", remove=True),
             changed("frames", to=0), changed("frames", 5, to="f"), changed("frames", 2, "line", to=-3),
             changed("frames", 0, "offset", to=0.5), changed("frames", 0, "module", to="libc.so.6"),
             changed("devices", 0, "fragmentation", "free", to=-1), changed("waits", "free_seconds", to="1"),
             changed("timeline", 7, "live", remove=True),
             changed("peak_map", to=[]), changed("peak_map", "time_s", to="0"), changed("peak_map", "live", to=-1),
             changed("peak_map", "cell", to=0), changed("peak_map", "left_out", remove=True),
             changed("peak_map", "segments", 0, to="9"), changed("peak_map", "segments", 0, "address", to="0x7f"),
             changed("peak_map", "segments", 1, "used", remove=True), changed("peak_map", "segments", 2, "cells", to=9),
             changed("peak_map", "segments", 2, "cells", to="90a"),
             changed("timeline", 3, to=[0, 1, 2]), changed("size_histogram", 0, "from", to="0"),
             changed("lifetime_histogram", 1, "count", remove=True)]
    for report, path in wrong:
        check(errors(schema, report), f"the schema takes a wrong {path}")
        refused(setting, setting.write("wrong.json", report), f": {path}: ")
    # What a schema cannot say: a stack, frame or module that is named exists.
    for path, what, of in ((("live", 0, "stack"), "stack", "stacks"), (("stacks", 1, "frames", 2), "frame", "frames"),
                           (("frames", 1, "module"), "module", "modules")):
        for index in (len(full()[of]), 2**64 - 1):
            report, name = changed(*path, to=index)
            refused(setting, setting.write("wrong.json", report),
                    f": {name}: there is no {what} {index}: the file has {len(full()[of])}")


# --- damaged files ----------------------------------------------------------------------------------------

@case
def truncated_at_every_place(setting):
    text = FULL.read_bytes()
    path = setting.scratch / "cut.json"
    for size in [*range(0, len(text) - 2, 997), *range(len(text) - 12, len(text) - 2)]:
        path.write_bytes(text[:size])
        if size == 0:
            refused(setting, path, f"{path}:1:1: the file is empty")
            continue
        line = text[:size].count(b"\n") + 1
        found = refused(setting, path)
        # A cut word, number or escape is no JSON by itself: that may be what is said.
        within = re.search(rb"(\\\w*|\b[a-z]+|[-+.e])$", text[:size])
        check("the file is cut off" in found or (within and "invalid " in found), f"cut after {size} bytes: {found!r}")
        check(found.startswith(f"cushion: {path}:{line}:"), f"cut after {size} bytes, in line {line}: {found!r}")
    path.write_bytes(text[:-2])  # without the last brace
    refused(setting, path, "the file is cut off")


@case
def damage_is_named_by_line_and_column(setting):
    def damaged(content, place, *words):
        path = setting.scratch / "damaged.json"
        path.write_bytes(content)
        refused(setting, path, f"{path}:{place}: ", *words)

    damaged(b'{"schema": "cushion-report",\n "version": oops}', "2:13")
    damaged(b'{"schema": "cushion-report",\n "version": 1,,}', "2:15")
    damaged(b'{"a": 1e999}', "1:11", "1e999")
    damaged(b'{"a": "\xff"}', "1:8", "UTF-8")
    damaged(b'{"a": "\x1b[31m"}', "1:8")
    damaged(b"\x7fELF\x02\x01\x01\x00", "1:1")
    damaged(b"{}{}", "1:3")
    nested = setting.scratch / "nested.json"
    nested.write_text("[" * 1_000_000)
    refused(setting, nested, f"{nested}:1:1000001: the file is cut off")


@case
def files_that_are_no_reports(setting):
    refused(setting, setting.write("list.json", [1, 2]), "no Cushion report")
    refused(setting, setting.write("other.json", {"schema": "other", "version": 1}), "/schema: no Cushion report")
    refused(setting, setting.write("bench.json", {"benchmarks": []}), "/schema: no Cushion report")
    refused(setting, setting.scratch, "directory")
    refused(setting, setting.scratch / "missing.json", "No such file")
    refused(setting, Path("/dev/zero"), "a device, not a report")
    err = refused(setting, setting.write("new.json", {**full(), "version": 2, "live": [{"other": "form"}]}),
                  "/version: a report of version 2; this cushion reads up to 1")
    check("/live" not in err, f"complains of what a newer version may hold: {err!r}")
    # Every bad file is named, and the good one is not shown without them.
    out, err = setting.cushion(FULL, "missing-1", "missing-2", code=2)
    equal((out, err.count("\n")), (b"", 2), "stdout and lines on stderr")


@case
def fields_of_later_versions_are_passed_over(setting):
    report = full()
    plain_text = setting.text(setting.write("a.json", report))
    report["colour"] = {"deep": [1, {"live": [{}]}]}
    report["live"][0]["mood"] = [{}]
    report["calls"]["hits"] = {"ratio": 0.5}
    equal(setting.text(setting.write("a.json", report)), plain_text, "text with unknown fields")


@case
def nothing_of_a_file_reaches_the_terminal_raw(setting):
    report = full()
    evil = "\x1b]0;owned\x07\x9b31m\r\n<script>alert(1)</script>\"'&"
    report["program"].update(name=evil, command=evil, host=evil, end=evil)
    report["options"]["TRACK"] = evil
    report["live"][0].update(api=evil, stream=evil)
    report["frames"][0].update(function=evil, file=evil)
    report["modules"][2].update(path=evil, build_id=evil)
    report["calls"]["by_function"] = {evil: {"served": 1, "forwarded": 0}}
    path = setting.write("evil.json", report)
    for arguments in ([path], [path, FULL], ["--diff", path, FULL]):
        raw = sorted({c for c in setting.text(*arguments) if (ord(c) < 32 and c != "\n") or 127 <= ord(c) < 160})
        equal(raw, [], f"control characters in the text of {arguments}")
    setting.text(path, "--html", "evil.html")
    page = (setting.scratch / "evil.html").read_text()
    equal(page.count("<script>"), 1, "scripts in the page: its own")
    check("alert(1)&lt;/script&gt;" in page, "the name is not in the page")
    for form in ("folded", "speedscope", "pprof", "perfetto", "memory-viz"):
        setting.cushion(path, "--format", form)


@case
def figures_that_do_not_fit_stay_at_the_highest(setting):
    report = full()
    most = 2**64 - 1
    report["live"][0].update(size=most, count=most)
    report["devices"] *= 2
    report["devices"][0]["held"]["peak"] = most
    for stack in report["stacks"]:
        stack.update({key: most for key in stack if key not in ("frames", "interval", "wait_s")})
    path = setting.write("large.json", report)
    text = setting.text(path, path)
    check("16.00 EiB" in text, text)
    for form in ("folded", "speedscope", "pprof", "memory-viz"):
        setting.cushion(path, "--format", form)
    setting.text(path, "--html", "large.html")


# --- text -------------------------------------------------------------------------------------------------

@case
def text_of_a_real_report(setting):
    path = setting.leaks()
    report = json.loads(path.read_text())
    text = setting.text(path)
    check(text.startswith(f"leaks (pid {report['program']['pid']} on "), text)
    for line in ("  options  REPORT=", "213 by Cushion, 0 passed to the driver (100.0 % served)",
                 "200  frees of the pool's blocks", "requested by the program   14.55 MiB  191.69 MiB",
                 "Never freed: 13 blocks, 14.55 MiB\n"):
        check(line in text, f"no {line!r} in\n{text}")
    rows = [line.split()[:6] for line in text[text.index("Never freed"):].splitlines()[2:]]
    equal(rows, [["14.31", "MiB", "5", "2.86", "MiB", "cuMemAlloc"],
                 ["205.08", "KiB", "3", "68.36", "KiB", "cuMemAllocAsync"],
                 ["48.22", "KiB", "4", "12.06", "KiB", "cuMemAlloc"],
                 ["1000", "B", "1", "1000", "B", "cuMemAllocAsync"]], "rows of what was never freed")
    check("Sizes asked for" in text, text)
    for section in ("Lifetimes", "by call stack"):
        check(section not in text, f"{section!r} of a report that has none")
    top = setting.text(path, "--top", "1")
    check("2.86 MiB  cuMemAlloc " in top and "68.36" not in top and "and 3 more (--top 4 shows all)" in top, top)
    check("Never freed: nothing" in setting.text(setting.real("demo.json", "driver_demo", "2")), "no word of no leak")


@case
def text_of_every_section(setting):
    text = setting.text(FULL)
    for line in ("train.py (pid 4711 on node07) ended by exit after 41.25 s",
                 "     2.00 MiB to 8.00 MiB  5 100  " + "█" * 30,
                 "        8.00 GiB and more      2", "below 10.0 µs    120  █", "\nMost bytes at the peak, by call stack\n       bytes  blocks\n    1.12 GiB      18\n",
                 "\n  allocations       bytes\n        9 000    8.79 GiB\n      load_batch & <shuffle>  ",
                 "\n  temporary  of all\n      8 800  97.8 %\n      load_batch & <shuffle>  ",
                 "\nWhere cudaFree waited, by call stack\n      time  waits\n    1.50 s     12\n",
                 "waits    322, 2.50 s in all, 2.25 s of it in cudaFree: what FREE=deferred could save",
                 "805.00 MiB free in the pool, at most 512.00 MiB in one piece; fragmentation 0.57",
                 "\n  map at peak  3 segments, 2.21 GiB, 72.3 % used, largest free run 256.00 MiB; 1.58 GiB live, after "
                 "31.50 s\n",
                 "\n      0x7ffff7",
                 "      forward  /home/someone/projects/language-model/model/attention.py:77",
                 "libcublasLt.so.13+0x51f2c0", "Never freed: 72 blocks, 1.43 GiB"):
        check(line in text, f"no {line!r} in\n{text}")
    report = full()
    report["live_complete"] = False
    check("Never freed: known in part only" in setting.text(setting.write("part.json", report)), "no word of the part")


@case
def map_at_the_peak(setting):
    """It is where the program says that its blocks were: at its end, and at the peak before everything was freed."""
    for allocator in ("pool", "arena", "binning"):
        for how in ([], ["freed"]):
            what, at = f"{allocator} {how}", setting.scratch / "blocks"
            path = setting.real("holes.json", "report/holes", at, *how, CUSHION_ALLOCATOR=allocator)
            report = json.loads(path.read_text())
            found, blocks = report["peak_map"], [tuple(map(int, line.split())) for line in at.read_text().splitlines()]
            equal(found["live"], sum(size for _, size in blocks), f"{what}: live bytes")
            check(found["live"] >= report["devices"][0]["requested"]["peak"] - 512, f"{what}: {report['devices']}")
            check(0 < found["time_s"] < report["program"]["duration_s"] + 1e-6, f"{what}: {found['time_s']}")
            equal(found["left_out"], 0, what)
            segments, cell = found["segments"], found["cell"]
            check(segments == sorted(segments, key=lambda s: s["address"]), f"{what}: not in order")
            equal(sum(s["size"] for s in segments), report["devices"][0]["held"]["peak"], f"{what}: bytes held")
            equal(sum(s["used"] for s in segments), sum(size for _, size in blocks), f"{what}: bytes used")
            for s in segments:
                start, end, used = s["address"], s["address"] + s["size"], [0] * (-(-s["size"] // cell))
                inside = [(address, size) for address, size in blocks if start <= address < end]
                for address, size in inside:
                    for i in range((address - start) // cell, -(-(address + size - start) // cell)):
                        low, high = start + i * cell, min(start + (i + 1) * cell, end)
                        used[i] += min(high, address + size) - max(low, address)
                whole = [min(cell, s["size"] - i * cell) for i in range(len(used))]
                digits = ["9" if u == all_of_it else str(-(-8 * u // all_of_it)) for u, all_of_it in zip(used, whole)]
                equal(s["cells"], "".join(digits), f"{what}: cells at {start:#x}")
                borders = [start, *(b for address, size in inside for b in (address, address + size)), end]
                equal(s["largest_free_run"], max(b - a for a, b in zip(borders[::2], borders[1::2])), f"{what}: run")
            check(sum(len(s["cells"]) for s in segments) <= 4096, f"{what}: too many cells")
            text = setting.text(path)
            check(re.search(rf"\n  map at peak  {len(segments)} segments, .* MiB; 152.06 MiB live, after ", text), text)
    check("peak_map" not in json.loads(setting.leaks("off.json", CUSHION_TRACK="off").read_text()), "without tracking")
    check("peak_map" not in json.loads(setting.leaks("cuda.json", CUSHION_ALLOCATOR="cuda").read_text()), "of no pool")


def on_terminal(setting, columns, *arguments, code=0, **environment):
    """What `cushion report` prints to a terminal of so many columns."""
    import fcntl
    import termios
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    env = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS")}
    process = subprocess.Popen([str(setting.build / "cushion"), "report", *map(str, arguments)], stdout=follower,
                               stdin=subprocess.DEVNULL, cwd=setting.scratch,
                               env={**env, "TERM": "xterm", **environment})
    os.close(follower)
    out = b""
    try:
        while part := os.read(leader, 65536):
            out += part
    except OSError:  # the other end is closed
        pass
    os.close(leader)
    equal(process.wait(TIMEOUT_S), code, "exit code")
    return out.decode().replace("\r\n", "\n")


@case
def terminal_has_colour_and_short_lines(setting):
    text = on_terminal(setting, 80, FULL)
    check("\x1b[1;31mNever freed" in text, "no colour")
    lines = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()
    equal([line for line in lines if len(line) > 80], [], "lines wider than the terminal")
    narrow = [line for line in on_terminal(setting, 60, FULL, NO_COLOR="1").splitlines() if ".py:" in line]
    equal([line for line in narrow if len(line) > 60], [], "paths wider than a narrow terminal")
    check(any("…" in line and line.endswith("attention.py:77") for line in narrow), "a path lost its end")
    check("\x1b" not in on_terminal(setting, 80, FULL, NO_COLOR="1"), "colour with NO_COLOR")
    check("\x1b" in on_terminal(setting, 80, FULL, NO_COLOR=""), "no colour with an empty NO_COLOR")
    check("\x1b" not in on_terminal(setting, 80, FULL, TERM="dumb"), "colour on a dumb terminal")
    long = setting.write("a-name-that-is-longer-than-any-terminal-has-room-for-" * 2 + ".json", full() | {"program": {
        **{k: v for k, v in full()["program"].items() if k != "rank"}}})
    wide = on_terminal(setting, 120, long, long, NO_COLOR="1").splitlines()
    equal([line for line in wide if len(line) > 120], [], "lines of two reports wider than the terminal")
    for form in ("pprof", "memory-viz"):
        equal(on_terminal(setting, 80, FULL, "--format", form, code=1), "", "binary output")
    check("\x1b" not in setting.text(FULL) and "…" not in setting.text(FULL), "shortened where it is no terminal")


@case
def ranks_are_merged(setting):
    paths = []
    for rank in (3, 0, 1):
        report = full()
        report["devices"] = report["devices"][:1]
        report["devices"][0]["uuid"] = "one" if rank == 3 else "other"
        report["program"]["rank"] = rank
        if rank == 1:  # other sizes from the same call stack
            report["live"][0]["size"] += 2**20
        paths.append(setting.write(f"r{rank}.json", report))
    text = setting.text(*paths)
    rows = [line.split() for line in text.splitlines() if " rank " in line]
    equal([row[:3] for row in rows], [["0", "rank", "0"], ["1", "rank", "1"], ["2", "rank", "3"]], "order of the ranks")
    report = full()
    total = 3 * live_bytes(report) + (report["live"][0]["count"] << 20)
    summed = next(line for line in text.splitlines() if "peaks added" in line)
    check(summed.split()[-2:] == f"{total / 2**30:.2f} GiB".split(), summed)
    check(f"{3 * report['calls']['served']}" in summed, summed)
    held = report["devices"][0]["held"]["peak"]
    gpus = {line.split()[0]: line for line in text.splitlines() if line.startswith(("  one ", "  other "))}
    check(re.search(r"^  one +2 ", gpus["one"]) and re.search(r"^  other +0-1 ", gpus["other"]), f"{gpus}")
    check(f" {2 * held / 2**30:.2f} GiB" in gpus["other"], f"{held} {gpus}")
    check("Never freed: 216 blocks" in text, text)
    check(re.search(r"2\.26 GiB +36 +64\.00 MiB to 65\.00 MiB +cuMemAlloc +0-2\n", text), text)
    check(re.search(r"1\.12 GiB +72 +16\.00 MiB +cuMemAlloc +0-2\n", text), text)
    two = setting.text(setting.leaks("a.json", 0), setting.leaks("b.json", 4))
    check(re.search(r"48\.22 KiB +4 +12\.06 KiB +cuMemAlloc +1\n", two), two)
    check(re.search(r"0 +a\.json .*\n +1 +b\.json", two), two)


@case
def difference_of_two(setting):
    text = setting.text("--diff", setting.leaks("a.json", 2), setting.leaks("b.json", 5))
    check(re.search(r"grew +\+36\.17 KiB +2 +5 +12\.06 KiB +cuMemAlloc\n", text), text)
    equal(len(re.findall(r"^  (grew|new|gone|shrank)", text, re.M)), 1, "changes")
    check(re.search(r"calls served +211 +214 +\+3\n", text), text)
    before, after = full(), full()
    after["live"][0]["stack"] = 2  # the same blocks from elsewhere: gone here, new there
    after["live"][1]["count"] -= 4
    after["live"][2].update(device=1, stream="99")  # where it ran is no difference
    text = setting.text("--diff", setting.write("c.json", before), setting.write("d.json", after))
    changes = re.findall(r"^  (grew|new|gone|shrank) +(\S+) ", text, re.M)
    equal(changes, [("new", "+768.00"), ("gone", "-768.00"), ("shrank", "-64.00")], "changes")
    check("Never freed: the same in both" in setting.text("--diff", FULL, FULL), "a difference to itself")
    for wrong in (["--diff", FULL], ["--diff", FULL, FULL, FULL], ["--diff", FULL, FULL, "--format", "folded"],
                  [FULL, "--format", "svg"], [FULL, "-o", "x"], [FULL, "--top", "0"], []):
        _, err = setting.cushion(*wrong, code=2)
        check(err, f"no word about {wrong}")


@case
def output_that_cannot_be_written(setting):
    (setting.scratch / "file").touch()
    for arguments in (["--html", "file/page.html"], ["--format", "folded", "-o", "file/out"]):
        _, err = setting.cushion(FULL, *arguments, code=1)
        check("file/" in err and "Not a directory" in err and err.count("\n") == 1, err)
    mine = setting.write("mine.json", full())
    for arguments in (["--html", mine], ["--format", "folded", "-o", mine]):
        _, err = setting.cushion(mine, *arguments, code=2)
        check("it is one of the reports" in err and err.count("\n") == 1, err)
        check(json.loads(mine.read_text()) == full(), "the report was replaced")
    if os.path.exists("/dev/full"):
        _, err = setting.cushion(FULL, "--html", "/dev/full", code=1)
        check("No space left" in err, err)


# --- exports ----------------------------------------------------------------------------------------------

@case
def folded_holds_every_byte(setting):
    setting.text(FULL, "--format", "folded", "-o", "full.folded")
    lines = (setting.scratch / "full.folded").read_text().splitlines()
    stacks = {tuple(frames.split(";")): int(value) for frames, value in (line.rsplit(" ", 1) for line in lines)}
    equal(sum(stacks.values()), live_bytes(full()), "bytes in all")
    loader = ("<module>", "train_one_epoch", "load_batch & <shuffle>", "cuMemAlloc")
    equal(stacks[loader], 3 << 20, "bytes of one stack")
    out, err = setting.cushion(setting.leaks(), "--format", "folded")
    equal(sorted(out.decode().splitlines()),
          ["leaks;cuMemAlloc;12.06 KiB 49380", "leaks;cuMemAlloc;2.86 MiB 15000000",
           "leaks;cuMemAllocAsync;1000 B 1000", "leaks;cuMemAllocAsync;68.36 KiB 210000"],
          "stacks of a report without any")
    check("no call stacks" in err and err.count("\n") == 1, err)
    out, _ = setting.cushion(FULL, FULL, "--format", "folded")
    total = sum(int(line.rsplit(b" ", 1)[1]) for line in out.splitlines())
    equal(total, 2 * live_bytes(full()), "bytes of two reports")


@case
def speedscope_holds_every_byte(setting):
    """Against what speedscope's importer relies on: github.com/jlfwong/speedscope, file-format-spec."""
    out, err = setting.cushion(FULL, "--format", "speedscope")
    equal(err, "", "stderr")
    file = json.loads(out)
    equal(file["$schema"], "https://www.speedscope.app/file-format-schema.json", "$schema")
    frames = file["shared"]["frames"]
    check(all(set(f) <= {"name", "file", "line", "col"} and f["name"] for f in frames), f"frames: {frames}")
    equal(len({json.dumps(f) for f in frames}), len(frames), "frames that differ")
    check({"name": "step", "file": "/home/someone/projects/language-model/optim/adam.py", "line": 58} in frames, frames)
    equal([p["name"] for p in file["profiles"]], ["never freed", "at the peak"], "profiles")
    for profile, total in zip(file["profiles"], (live_bytes(full()), sum(
            stack["peak_bytes"] for stack in full()["stacks"]))):
        equal((profile["type"], profile["unit"], profile["startValue"]), ("sampled", "bytes", 0), "kind of profile")
        equal(len(profile["samples"]), len(profile["weights"]), "samples and weights")
        equal((sum(profile["weights"]), profile["endValue"]), (total, total), "bytes")
        check(all(0 <= i < len(frames) for stack in profile["samples"] for i in stack), "a frame that does not exist")
        # Outermost frame first.
        equal({frames[stack[0]]["name"] for stack in profile["samples"]}, {"<module>"}, "outermost frames")


# profile.proto (github.com/google/pprof), field numbers and kinds: s strings, i int64, u uint64, b bool; R repeated.
PROFILE = {
    "ValueType": [("type", 1, "i"), ("unit", 2, "i")],
    "Sample": [("location_id", 1, "Ru"), ("value", 2, "Ri")],
    "Mapping": [("id", 1, "u"), ("filename", 5, "i"), ("build_id", 6, "i"), ("has_functions", 7, "b"),
                ("has_filenames", 8, "b"), ("has_line_numbers", 9, "b"), ("has_inline_frames", 10, "b")],
    "Line": [("function_id", 1, "u"), ("line", 2, "i")],
    "Location": [("id", 1, "u"), ("mapping_id", 2, "u"), ("address", 3, "u"), ("line", 4, "RLine")],
    "Function": [("id", 1, "u"), ("name", 2, "i"), ("system_name", 3, "i"), ("filename", 4, "i")],
    "Profile": [("sample_type", 1, "RValueType"), ("sample", 2, "RSample"), ("mapping", 3, "RMapping"),
                ("location", 4, "RLocation"), ("function", 5, "RFunction"), ("string_table", 6, "Rs"),
                ("time_nanos", 9, "i"), ("duration_nanos", 10, "i"), ("period_type", 11, "ValueType"),
                ("period", 12, "i"), ("default_sample_type", 14, "i")],
}


def profile_message():
    """The message class of profile.proto, made by protobuf's own library."""
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    except ImportError as error:
        raise Skip("no protobuf for Python (Debian: python3-protobuf, PyPI: protobuf)") from error
    file = descriptor_pb2.FileDescriptorProto(name="profile.proto", package="p", syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto
    scalars = {"s": kinds.TYPE_STRING, "i": kinds.TYPE_INT64, "u": kinds.TYPE_UINT64, "b": kinds.TYPE_BOOL}
    for name, fields in PROFILE.items():
        message = file.message_type.add(name=name)
        for field, number, kind in fields:
            bare = kind[1:] if kind[0] == "R" else kind
            added = message.field.add(name=field, number=number, type=scalars.get(bare, kinds.TYPE_MESSAGE),
                                      label=kinds.LABEL_REPEATED if kind[0] == "R" else kinds.LABEL_OPTIONAL)
            if bare not in scalars:
                added.type_name = f".p.{bare}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    descriptor = pool.FindMessageTypeByName("p.Profile")
    if hasattr(message_factory, "GetMessageClass"):
        return message_factory.GetMessageClass(descriptor)()
    return message_factory.MessageFactory(pool).GetPrototype(descriptor)()


@case
def pprof_is_read_by_protobuf(setting):
    profile = profile_message()
    out, err = setting.cushion(FULL, "--format", "pprof")
    equal(err, "", "stderr")
    profile.ParseFromString(gzip.decompress(out))
    strings = list(profile.string_table)
    equal(strings[0], "", "the first string")
    equal([(strings[t.type], strings[t.unit]) for t in profile.sample_type],
          [("inuse_objects", "count"), ("inuse_space", "bytes")], "values of a sample")
    equal(strings[profile.default_sample_type], "inuse_space", "what is shown first")
    report = full()
    equal(sum(s.value[0] for s in profile.sample), sum(g["count"] for g in report["live"]), "blocks")
    equal(sum(s.value[1] for s in profile.sample), live_bytes(report), "bytes")
    functions = {f.id: f for f in profile.function}
    locations = {location.id: location for location in profile.location}
    equal((len(functions), len(locations)), (len(profile.function), len(profile.location)), "ids that differ")
    mappings = {m.id: (strings[m.filename], strings[m.build_id]) for m in profile.mapping}

    def frame(number):
        line = locations[number].line[0]
        return strings[functions[line.function_id].name], strings[functions[line.function_id].filename], line.line

    adam = next(s for s in profile.sample if s.value[1] == 31 * 8388608)
    equal([frame(i)[0] for i in adam.location_id][0], "cuMemAllocAsync", "the innermost frame, first")
    equal(frame(adam.location_id[2]), ("step", "/home/someone/projects/language-model/optim/adam.py", 58), "a frame")
    equal(mappings[locations[adam.location_id[1]].mapping_id], 
          (report["modules"][0]["path"], report["modules"][0]["build_id"]), "its module and build id")
    equal(profile.duration_nanos, 41_250_000_000, "duration")


@case
def pprof_is_read_by_go(setting):
    if not shutil.which("go"):
        raise Skip("no Go: its `go tool pprof` reads profiles (Debian: golang-go)")
    setting.text(FULL, "--format", "pprof", "-o", "full.pb.gz")
    done = subprocess.run(["go", "tool", "pprof", "-top", "-cum", "-unit=B", "full.pb.gz"], cwd=setting.scratch,
                          check=True, capture_output=True, text=True, timeout=TIMEOUT_S,
                          env={**os.environ, "HOME": str(setting.scratch)})
    total = live_bytes(full())
    check(f"Showing nodes accounting for {total}B, 100% of {total}B total" in done.stdout, done.stdout)
    check(re.search(rf" {31 * 8388608}B .* step", done.stdout), done.stdout)


@case
def perfetto_holds_the_time_line(setting):
    out, err = setting.cushion(FULL, "--format", "perfetto")
    equal(err, "", "stderr")
    events = json.loads(out)["traceEvents"]
    names = [e["args"]["name"] for e in events if e["ph"] == "M"]
    equal(names, ["train.py"], "process names")
    for track in ("live", "held"):
        points = [(e["ts"], e["args"]["bytes"]) for e in events if e["ph"] == "C" and e["name"] == track]
        expected = [(p["time_s"] * 1e6, p[track]) for p in full()["timeline"]]
        equal([p[1] for p in points], [p[1] for p in expected], f"bytes {track}")
        check(all(abs(a[0] - b[0]) < 1e-3 for a, b in zip(points, expected)), f"times of {track}")
    events = json.loads(setting.cushion(FULL, FULL, "--format", "perfetto")[0])["traceEvents"]
    equal({e["pid"] for e in events}, {1, 2}, "processes of two reports")


@case
def memory_viz_is_a_pickle(setting):
    """As PyTorch's readers take it: plain values, blocks that fill their segments, addresses that never overlap."""
    import io
    import pickle

    class Plain(pickle.Unpickler):
        def find_class(self, module, name):
            raise AssertionError(f"the pickle wants {module}.{name}")

    out, err = setting.cushion(FULL, "--format", "memory-viz")
    check("addresses are made up" in err and err.count("\n") == 1, err)
    snapshot = Plain(io.BytesIO(out)).load()
    equal(snapshot["device_traces"], [[]], "traces")
    segments = snapshot["segments"]
    equal([(s["device"], s["stream"]) for s in segments], [(0, 0), (0, 7)], "segments by device and stream")
    blocks = [block for segment in segments for block in segment["blocks"]]
    equal(len(blocks), sum(g["count"] for g in full()["live"]), "blocks")
    for segment in segments:
        at = segment["address"]
        for block in segment["blocks"]:
            equal((block["address"], block["state"]), (at, "active_allocated"), "a block's place")
            at += block["size"]
        equal(at - segment["address"], segment["total_size"], "bytes of a segment")
    equal(sum(s["total_size"] for s in segments), live_bytes(full()), "bytes in all")
    equal([set(frame) for b in blocks for frame in b["frames"]], [{"name", "filename", "line"}] * sum(
        len(full()["stacks"][g["stack"]]["frames"]) * g["count"] for g in full()["live"]), "frames")
    adam = next(b for b in blocks if b["size"] == 8388608)["frames"][1]
    equal((adam["name"], adam["line"]), ("step", 58), "a frame")
    check(adam["filename"].endswith("/language-model/optim/adam.py"), adam)
    report = full()
    report["live"][0]["count"] = 2**30  # no file can hold as many
    out, _ = setting.cushion(setting.write("many.json", report), "--format", "memory-viz")
    sizes = [b["size"] for s in Plain(io.BytesIO(out)).load()["segments"] for b in s["blocks"]]
    equal(max(sizes), 2**30 * 67108864, "all of a kind in one block")
    _, err = setting.cushion(setting.leaks(), "--format", "memory-viz")
    check("no frames" in err, err)


@case
def nothing_to_export_is_said(setting):
    nothing = setting.real("demo.json", "driver_demo", "2", CUSHION_TRACK="off")
    for form, words in (("folded", "nothing was live at exit"), ("speedscope", "nothing was live at exit"),
                        ("pprof", "nothing was live at exit"), ("memory-viz", "nothing was live at exit"),
                        ("perfetto", "no time line")):
        out, err = setting.cushion(nothing, "--format", form, "-o", f"none.{form}", code=1)
        equal(out, b"", "stdout")
        check(words in err and err.count("\n") == 1, err)
        check(not (setting.scratch / f"none.{form}").exists(), f"{form}: an empty file")


# --- symbols ----------------------------------------------------------------------------------------------

PROGRAMS = HERE / "programs"
# What a frame is called, and the comment on its line; innermost first. True: inlined into the next.
FRAMES = {
    "fill": [("shapes::Grid<float>::fill(float)", "fill"), ("shapes::outer(int)", "outer"), ("main", "main")],
    "make": [("shapes::Grid<double>::make(char const*) const", "make")],
    "hidden": [("(anonymous namespace)::hidden()", "hidden")],
    "lambda": [("operator()", "lambda"), ("main", "main calls lambda")],
    "innermost": [("(anonymous namespace)::innermost", "innermost"), ("in_symtab_only(int)", "in_symtab_only")],
    "static": [("in_symtab_only(int)", "static")],
    "exported": [("library_call(int)", "exported")],
}


def command(*words, **options):
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=240, **options)
    check(done.returncode == 0, f"{words}: {done.stderr or done.stdout}")
    return done.stdout


def build_id_of(path):
    return re.search(r"Build ID: ([0-9a-f]+)", command("readelf", "-n", path))[1]


class Programs:
    """The programs of PROGRAMS, built in a folder of their own, and the places that they print: name to (file, offset)."""

    def __init__(self, setting, compiler="g++", *flags, source="shapes.cpp"):
        if not shutil.which(compiler):
            raise Skip(f"no {compiler}")
        self.setting = setting
        self.folder = Path(tempfile.mkdtemp(dir=setting.scratch))
        self.library, self.program = self.folder / "libshapes.so", self.folder / "shapes"
        # A build id even where the compiler was made to leave it out.
        link = ["-Xlinker", "--build-id=sha1"]
        pic = ["-Xcompiler", "-fPIC"] if compiler == "nvcc" else ["-fPIC"]
        command(compiler, *flags, *pic, *link, "-shared", PROGRAMS / "library.cpp", "-o", self.library,
                cwd=self.folder)
        command(compiler, *flags, *link, PROGRAMS / source, self.library, "-o", self.program, cwd=self.folder)
        self.places = {}
        for line in command(self.program).splitlines():
            name, offset, module = line.split("\t")
            self.places[name] = (Path(module) if module else self.program, int(offset))
        equal(sorted(self.places), sorted(FRAMES), "places that the programs print")
        self.sources = {path.name: path.read_text().splitlines() for path in PROGRAMS.iterdir()}

    def report(self, name="symbols.json", build_ids=None):
        """A report with a stack for each place, under one Python frame."""
        ids = build_ids or {path: build_id_of(path) for path in (self.program, self.library)}
        report = full()
        report["modules"] = [{"path": str(path), "build_id": ids[path]} for path in (self.program, self.library)]
        modules = [self.program, self.library]
        report["frames"] = [{"module": modules.index(path), "offset": offset} for path, offset in self.places.values()]
        report["frames"].append({"function": "train", "file": "train.py", "line": 12})
        kinds = report["stacks"][0]
        report["stacks"] = [{**kinds, "frames": [i, len(self.places)]} for i in range(len(self.places))]
        report["live"] = [{**report["live"][0], "size": 4096 << i, "count": 1, "stack": i}
                          for i in range(len(self.places))]
        return self.setting.write(name, report)

    def line(self, name):
        """File and line of a comment in the sources."""
        for file, lines in self.sources.items():
            for number, text in enumerate(lines, 1):
                if text.endswith(f"// {name}"):
                    return str(PROGRAMS / file), number
        raise AssertionError(f"no comment {name!r}")

    def resolved(self, report, *arguments, stderr=""):
        """The frames of each place as `--symbolize` writes them."""
        out = self.setting.scratch / "symbolized.json"
        printed, err = self.setting.cushion(report, "--symbolize", out, *arguments)
        equal((printed, err), (b"", stderr), "stdout and stderr")
        written = json.loads(out.read_text())
        frames = [[written["frames"][i] for i in stack["frames"]] for stack in written["stacks"]]
        equal([stack[-1] for stack in frames], [{"function": "train", "file": "train.py", "line": 12}] * len(frames),
              "the Python frame")
        return {name: stack[:-1] for name, stack in zip(self.places, frames)}

    def check_frames(self, found, names=FRAMES):
        for name in names:
            functions = [frame.get("function", "") for frame in found[name]]
            equal(len(functions), len(FRAMES[name]), f"frames of {name} ({functions})")
            for frame, (function, comment) in zip(found[name], FRAMES[name]):
                check(function in frame["function"], f"{name}: {frame}, expected {function}")
                equal((frame.get("file"), frame.get("line")), self.line(comment), f"{name}: file and line of {frame}")
            equal([frame.get("inlined", False) for frame in found[name]], [True] * (len(functions) - 1) + [False],
                  f"which frames of {name} are inlined")

    def check_raw(self, found, names=FRAMES):
        for name in names:
            equal([sorted(frame) for frame in found[name]], [["module", "offset"]], f"{name}: {found[name]}")

    def strip(self):
        """Takes the symbols out of both files, into debug files that lie elsewhere."""
        debug = {}
        for path in (self.program, self.library):
            debug[path] = self.setting.scratch / f"{path.stem}.debug"
            command("objcopy", "--only-keep-debug", path, debug[path])
            command("objcopy", "--strip-all", path)
        return debug


def symbols_are_read(setting):
    if "libdw" not in subprocess.run(["ldd", str(setting.build / "cushion")], capture_output=True, text=True).stdout:
        raise Skip("this cushion was built without libdw (Debian: libdw-dev)")


@case
def symbols_of_compilers(setting):
    """Function, file and line of each frame, inlined ones too, as the sources have them."""
    symbols_are_read(setting)
    for flags in (["-O2", "-g"], ["-O1", "-g", "-no-pie"], ["-O2", "-g", "-gdwarf-4", "-gz"],
                  ["-O2", "-g", "-gsplit-dwarf"], ["-O2", "-g", "-ffunction-sections", "-Wl,--gc-sections"]):
        for compiler in ("g++", "clang++"):
            if shutil.which(compiler):
                programs = Programs(setting, compiler, *flags)
                programs.check_frames(programs.resolved(programs.report()))
    programs = Programs(setting, "g++", "-O0", "-g")
    programs.check_frames(programs.resolved(programs.report()), ["make", "hidden", "static", "exported", "fill"])


@case
def symbols_of_nvcc(setting):
    symbols_are_read(setting)
    programs = Programs(setting, "nvcc", "-O2", "-g", source="shapes.cu")
    programs.check_frames(programs.resolved(programs.report()))


@case
def symbols_from_separate_files(setting):
    """By build id and by .gnu_debuglink, in the places that debuggers look in and in --debug-dir."""
    symbols_are_read(setting)
    programs = Programs(setting, "g++", "-O2", "-g")
    report = programs.report()
    debug = programs.strip()
    found = programs.resolved(report)
    programs.check_raw(found, ["fill", "hidden", "static"])
    equal([frame.get("function") for frame in found["exported"]], ["library_call(int)"], "by the dynamic symbols")
    elsewhere = setting.scratch / "elsewhere"

    def lay(place):
        for path, file in debug.items():
            there = place(path)
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, there)

    # By build id, which both the stripped file and the debug file have.
    lay(lambda path: elsewhere / ".build-id" / build_id_of(path)[:2] / (build_id_of(path)[2:] + ".debug"))
    programs.check_raw(programs.resolved(report), ["fill"])
    programs.check_frames(programs.resolved(report, "--debug-dir", setting.scratch, "--debug-dir", elsewhere))
    programs.check_frames(programs.resolved(report, "--debug-dir", "elsewhere"))
    # The same where the modules themselves are gone, or others lie in their place: the debug file is the report's own.
    kept = {path: path.read_bytes() for path in debug}
    for path in debug:
        path.unlink()
    programs.check_raw(programs.resolved(report))
    programs.check_frames(programs.resolved(report, "--debug-dir", elsewhere))
    for path, content in kept.items():
        path.write_bytes(content)
    # By link: without a build id, which would be preferred.
    for path, file in debug.items():
        command("objcopy", "--remove-section=.note.gnu.build-id", file)
        command("objcopy", "--remove-section=.note.gnu.build-id", f"--add-gnu-debuglink={file}", path)
    report = programs.report("linked.json", dict.fromkeys(debug, ""))
    programs.check_raw(programs.resolved(report), ["fill"])
    for place in (lambda path: path.parent / debug[path].name, lambda path: path.parent / ".debug" / debug[path].name):
        lay(place)
        programs.check_frames(programs.resolved(report))
        for path in debug:
            place(path).unlink()
    lay(lambda path: Path(f"{elsewhere}{path.parent}") / debug[path].name)
    programs.check_frames(programs.resolved(report, "--debug-dir", elsewhere))
    # A debug file of another build is not taken.
    other = Programs(setting, "g++", "-O0", "-g")
    other.strip()  # over those of the first
    lay(lambda path: path.parent / debug[path].name)
    programs.check_raw(programs.resolved(report), ["fill"])


@case
def symbols_without_debug_information(setting):
    """The symbol tables name functions, static ones too; no file, no line, nothing inlined."""
    symbols_are_read(setting)
    for compiler in ("g++", "clang++"):
        if not shutil.which(compiler):
            continue
        programs = Programs(setting, compiler, "-O2")
        found = programs.resolved(programs.report())
        names = {name: [(frame.get("function"), frame.get("file")) for frame in stack] for name, stack in found.items()}
        equal(names["static"], [("in_symtab_only(int)", None)], "a static function")
        equal(names["fill"], [("main", None)], "an inlined function's caller")
        equal(names["hidden"], [("(anonymous namespace)::hidden()", None)], "a function without a linker's name")
        equal(names["make"], [("shapes::Grid<double>::make(char const*) const", None)], "a template")


@case
def symbols_of_another_file(setting):
    """A file that is not the one that ran says so by its build id; nothing is taken from it."""
    symbols_are_read(setting)
    programs = Programs(setting, "g++", "-O2", "-g")
    ids = {path: build_id_of(path) for path in (programs.program, programs.library)}
    ids[programs.library] = "00" * 20
    line = f"cushion: {programs.library}: its build id is not the report's: no symbols are taken from it\n"
    report = programs.report(build_ids=ids)
    found = programs.resolved(report, stderr=line)
    programs.check_raw(found, ["innermost", "static", "exported"])
    programs.check_frames(found, ["fill", "make", "hidden", "lambda"])
    out, err = setting.cushion(report, report, report)  # said once
    equal(err, line, "stderr of three ranks")
    check(f"libshapes.so+{programs.places['static'][1]:#x}\n" in out.decode(), out.decode())
    ids[programs.library] = build_id_of(programs.library).upper()
    programs.check_frames(programs.resolved(programs.report(build_ids=ids)))
    programs.check_frames(programs.resolved(programs.report(build_ids=dict.fromkeys(ids, ""))))


@case
def symbols_of_damaged_files(setting):
    """Whatever a module's file holds by now, the report is shown."""
    import random
    symbols_are_read(setting)
    programs = Programs(setting, "g++", "-O2", "-g")
    report = programs.report()
    whole = programs.library.read_bytes()
    readable = f"cushion: {programs.library}: no program or library that can be read: no symbols are taken from it\n"
    for content, stderr in ((b"", readable), (b"no ELF", readable), (whole[:20], readable),
                            (whole[:3000] + b"\0" * (len(whole) - 3000), None)):
        programs.library.write_bytes(content)
        err = setting.cushion(report)[1]
        check(err.count("\n") <= 1 and (stderr is None or err == stderr), f"{len(content)} bytes: {err!r}")
        programs.check_frames(programs.resolved(report, stderr=err), ["fill", "hidden"])
    programs.library.unlink()
    programs.check_raw(programs.resolved(report), ["static"])
    for make in (os.mkfifo, os.mkdir):  # nobody writes to the pipe: it must not be waited for
        make(programs.library)
        programs.check_raw(programs.resolved(report), ["static"])
        (os.unlink if make is os.mkfifo else os.rmdir)(programs.library)
    chance = random.Random(1)
    sections = re.findall(r"\.(?:debug_\w+|symtab|strtab|shstrtab|dynsym)\s+\w+\s+\w+ (\w+) (\w+)",
                          command("readelf", "-SW", programs.program))
    check(len(sections) > 8, f"sections: {sections}")
    whole = programs.program.read_bytes()
    report = programs.report("any.json", dict.fromkeys((programs.program, programs.library), ""))
    for _ in range(60):
        content = bytearray(whole)
        for offset, size in chance.sample(sections, 3):
            for _ in range(chance.choice((1, 4, 64))):
                content[int(offset, 16) + chance.randrange(int(size, 16))] = chance.randrange(256)
        if chance.random() < 0.3:
            content[chance.randrange(64)] = chance.randrange(256)
        if chance.random() < 0.3:
            del content[chance.randrange(len(content)):]
        programs.program.write_bytes(content)
        setting.cushion(report)


@case
def symbols_in_every_form(setting):
    """What is written back reads the same where the modules are gone; each format has the functions."""
    symbols_are_read(setting)
    programs = Programs(setting, "g++", "-O2", "-g")
    report = programs.report()
    raw = setting.text(report, "--no-symbols")
    check("in_symtab_only" not in raw and f"libshapes.so+{programs.places['static'][1]:#x}" in raw, raw)
    text = setting.text(report)
    file, number = programs.line("fill")
    check(f"      shapes::Grid<float>::fill(float)  {file}:{number}\n      shapes::outer(int)  {file}:" in text, text)
    check(f"\n      in_symtab_only(int)  {programs.line('static')[0]}:{programs.line('static')[1]}\n      train  train.py:12\n"
          in text, text)
    before = json.loads(report.read_text())
    before["later"] = {"unknown": [1, 2.5, "x"]}
    report.write_text(json.dumps(before)[:-1] + ', "deep": ' + "[" * 300_000 + "]" * 300_000 + "}")
    carried = setting.scratch / "carried.json"
    equal(setting.text(report, "--symbolize", carried), "", "stdout")
    after = json.loads(carried.read_text())
    equal({k: v for k, v in after.items() if k not in ("frames", "stacks", "deep")},
          {k: v for k, v in before.items() if k not in ("frames", "stacks")}, "all but frames and stacks")
    equal([{**s, "frames": 0} for s in after["stacks"]], [{**s, "frames": 0} for s in before["stacks"]], "stacks")
    programs.program.unlink()
    programs.library.unlink()
    equal(setting.text(carried), text, "what was written back")
    setting.text(carried, "--symbolize", "again.json")
    equal((setting.scratch / "again.json").read_bytes(), carried.read_bytes(), "what was written back twice")
    out, _ = setting.cushion(carried, "--format", "folded")
    check(b"train;main;shapes::outer(int);shapes::Grid<float>::fill(float);cuMemAlloc 4096\n" in out, out.decode())
    out, _ = setting.cushion(carried, "--format", "speedscope")
    names = {(f["name"], f.get("line")) for f in json.loads(out)["shared"]["frames"]}
    check(("shapes::Grid<float>::fill(float)", number) in names, names)
    out, _ = setting.cushion(carried, "--format", "memory-viz")
    check(b"shapes::Grid<float>::fill(float)" in out and file.encode() in out, "memory-viz lacks names")
    setting.text(carried, "--html", "page.html")
    page = (setting.scratch / "page.html").read_text()
    check(f"shapes::Grid&lt;float&gt;::fill(float) <span class=\"quiet\">{file}:{number}</span>" in page, "the page")
    for wrong in ([report, report, "--symbolize", "x"], [report, "--symbolize", "x", "--no-symbols"],
                  [report, "--symbolize", "x", "--html", "y"]):
        setting.cushion(*wrong, code=2)
    setting.cushion(carried, "--symbolize", f"{carried}/x", code=1)
    try:
        known = {key: value for key, value in after.items() if key not in ("later", "deep")}
        equal(errors(validator(strict=True), known), [], "what was written back, against the schema")
    except Skip:
        pass
    profile = profile_message()
    out, _ = setting.cushion(carried, "--format", "pprof")
    profile.ParseFromString(gzip.decompress(out))
    strings = list(profile.string_table)
    functions = {f.id: strings[f.name] for f in profile.function}
    stacks = [[functions[line.function_id] for line in location.line] for location in profile.location]
    check(["shapes::Grid<float>::fill(float)", "shapes::outer(int)", "main"] in stacks, f"a place of three: {stacks}")
    equal({strings[m.filename]: strings[m.build_id] for m in profile.mapping},
          {m["path"]: m["build_id"] for m in before["modules"]}, "mappings")


@case
def symbols_ask_no_network(setting):
    import socket
    symbols_are_read(setting)
    programs = Programs(setting, "g++", "-O2", "-g")
    report = programs.report()
    programs.strip()
    with socket.create_server(("127.0.0.1", 0)) as server:
        setting.cushion(report, DEBUGINFOD_URLS=f"http://127.0.0.1:{server.getsockname()[1]}", HOME=str(setting.scratch))
        server.setblocking(False)
        try:
            server.accept()
            raise AssertionError("a debuginfod server was asked")
        except BlockingIOError:
            pass


# --- stacks -----------------------------------------------------------------------------------------------

@case
def sampled_stacks_are_estimates(setting):
    report = full()
    report["tracking"]["level"] = "sampled:2097152"
    for stack in report["stacks"]:
        stack.update(interval=2097152, live_bytes=stack["live_bytes"] + 1)
    for group in report["live"][1:]:
        del group["stack"]  # of most blocks the stack was not taken
    path = setting.write("sampled.json", report)
    text = setting.text(path)
    for kind in ("bytes never freed", "bytes at the peak", "allocations", "temporary allocations"):
        check(f"\nMost {kind}, by call stack (estimates: sampled every 2.00 MiB)\n" in text, text)
    out, err = setting.cushion(path, "--format", "folded")
    check("was sampled: bytes by call stack are estimates" in err and "no call stacks for some live blocks" in err, err)
    setting.cushion(path, "--html", "page.html")
    check("<h2>Never freed, by call stack (estimates: sampled every 2.00 MiB)</h2>" in
          (setting.scratch / "page.html").read_text(), "no word of estimates in the page")
    untracked = report["live"][3]
    expected = sum(s["live_bytes"] for s in report["stacks"]) + untracked["size"] * untracked["count"]
    equal(sum(int(line.rsplit(b" ", 1)[1]) for line in out.splitlines()), expected, "bytes: each block once")
    exact = setting.text(FULL)
    check("estimates" not in exact and "Most bytes never freed" not in exact, exact)


@case
def leaks_are_grouped_by_stack(setting):
    report = full()
    group = report["live"][0]
    report["live"].append({**group, "size": 512, "count": 3, "device": 1, "stream": "9", "oldest_age_s": 40.5})
    text = setting.text(setting.write("one.json", report))
    check(re.search(r"768\.00 MiB +15 +512 B to 64\.00 MiB +cuMemAlloc +several +several +40\.50 s\n", text), text)
    equal(len(re.findall(r"^ .* cuMemAlloc", text[text.index("Never freed"):], re.M)), 5, "rows")
    # Stacks that look the same are one, whatever their addresses.
    report["frames"].append({**report["frames"][0], "offset": 7})
    report["stacks"].append({**report["stacks"][0], "frames": [len(report["frames"]) - 1,
                                                               *report["stacks"][0]["frames"][1:]]})
    report["live"][-1]["stack"] = len(report["stacks"]) - 1
    text = setting.text(setting.write("two.json", report))
    check(re.search(r"768\.00 MiB +15 +512 B to 64\.00 MiB +cuMemAlloc +several", text), text)
    check(re.search(r"\n +1 400 +2\.25 GiB\n", text), text)


# --- the page ---------------------------------------------------------------------------------------------

PROBE = """<script>
const probe = {};
try {
  const root = document.documentElement;
  probe.overflow = root.scrollWidth - root.clientWidth;
  probe.width = root.clientWidth;
  probe.background = getComputedStyle(document.body).backgroundColor;
  probe.titles = [...document.querySelectorAll("h2")].map((h) => h.textContent);
  probe.lines = [...document.querySelectorAll(".chart svg")].map((s) => s.getBoundingClientRect().width);
  probe.bars = [...document.querySelectorAll(".hist .bar")].map((b) => b.getBoundingClientRect().width);
  probe.strips = [...document.querySelectorAll(".map svg")].map((s) => {
    const cells = (path) => [...path.getAttribute("d").matchAll(/h(\\d+)/g)].reduce((sum, run) => sum + +run[1], 0);
    const all = (paths) => [...s.querySelectorAll(paths)].reduce((sum, path) => sum + cells(path), 0);
    return { title: s.querySelector("title").textContent, width: s.getBoundingClientRect().width, free: all(".free"),
      all: all("path") };
  });
  const flame = document.querySelector(".flame");
  if (flame) {
    const share = (n) => n.getBoundingClientRect().width / flame.getBoundingClientRect().width;
    const named = (t) => [...flame.querySelectorAll(".n")].find((n) => n.firstChild.textContent === t);
    const shown = (n) => n.getBoundingClientRect().width > 0;
    probe.step = share(named("step"));
    named("step").firstChild.click();
    probe.zoomed = share(named("step"));
    probe.aside = shown(named("forward"));
    probe.readout = flame.previousElementSibling.textContent;
    named("all").firstChild.click();
    probe.back = share(named("step"));
  }
  const sections = [...document.querySelectorAll("section")];
  const table = sections.find((s) => s.querySelector("h2")?.textContent === "Never freed");
  const column = (i) => [...table.querySelectorAll("tbody")].map((b) => b.rows[0].cells[i].textContent);
  const head = (i) => table.querySelectorAll("th button")[i].click();
  probe.bytes = column(0);
  head(1), (probe.mostBlocks = column(1));
  head(1), (probe.fewestBlocks = column(1));
  head(3), (probe.calls = column(3));
} catch (error) {
  probe.error = String(error);
}
document.body.dataset.probe = JSON.stringify(probe);
</script>"""


class Browser:
    """Headless Chromium: what a page measures of itself, and pictures."""

    def __init__(self, setting):
        self.setting = setting
        found = [shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome", "chrome")]
        self.program = next(filter(None, found), None)
        if not self.program:
            raise Skip("no Chromium (Debian: chromium)")
        if setting.sanitized():
            raise Skip("a page is the same in every build: it is made here, and looked at in the others")
        self.pictures = setting.build / "tests" / "report" / "screenshots"
        self.pictures.mkdir(parents=True, exist_ok=True)

    def _run(self, *arguments, dark=False):
        command = [self.program, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                   "--allow-file-access-from-files", f"--user-data-dir={self.setting.scratch / 'browser'}",
                   f"--blink-settings=preferredColorScheme={0 if dark else 1}", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        if done.returncode != 0:
            raise Skip(f"Chromium does not start here: {done.stderr[-300:]}")
        return done.stdout

    def _framed(self, page, width):
        """A window is never as narrow as a phone: the page is shown in a frame."""
        style = f"width:{width}px;height:1800px;border:0"
        return self.setting.write("framed.html", f'<body style="margin:0"><iframe src="{page.name}" style="{style}">')

    def probe(self, page, width, dark=False):
        probed = self.setting.write("probed.html", page.read_text().replace("</body>", PROBE + "</body>"))
        style = f"width:{width}px;height:800px"
        frame = self.setting.write("frame.html", f"""<body><iframe src="probed.html" style="{style}"></iframe><script>
            document.querySelector("iframe").onload = (e) =>
            (document.body.dataset.probe = e.target.contentDocument.body.dataset.probe);</script>""")
        dom = self._run("--window-size=1400,900", "--virtual-time-budget=3000", "--dump-dom", frame.as_uri(), dark=dark)
        match = re.search(r'<body data-probe="([^"]*)"', dom)
        check(match and probed.exists(), f"the page measured nothing: {dom[:500]}")
        found = json.loads(html.unescape(match[1]))
        check("error" not in found, f"script error: {found}")
        return found

    def picture(self, page, name, width, dark=False):
        path = self.pictures / f"{name}.png"
        path.unlink(missing_ok=True)
        target = page if width >= 500 else self._framed(page, width)
        self._run(f"--window-size={max(width, 500)},1800", f"--screenshot={path}", target.as_uri(), dark=dark)
        return pixels(path)


def pixels(path):
    """Width, height and the colours of a PNG file, with how often each occurs."""
    data = path.read_bytes()
    equal(data[:8], b"\x89PNG\r\n\x1a\n", f"{path} as a PNG file")
    at, packed = 8, b""
    while at < len(data):
        size, kind = struct.unpack(">I4s", data[at:at + 8])
        if kind == b"IHDR":
            width, height, depth, colour = struct.unpack(">IIBB", data[at + 8:at + 18])
        if kind == b"IDAT":
            packed += data[at + 8:at + 8 + size]
        at += size + 12
    step = {2: 3, 6: 4}[colour]
    equal(depth, 8, "bits a colour")
    raw, last, colours = zlib.decompress(packed), bytearray(width * step), collections.Counter()
    for y in range(height):
        start = y * (width * step + 1)
        kind, row = raw[start], bytearray(raw[start + 1:start + 1 + width * step])
        for i in range(len(row)) if kind else ():
            a, b = row[i - step] if i >= step else 0, last[i]
            if kind == 1:
                row[i] = (row[i] + a) & 255
            elif kind == 2:
                row[i] = (row[i] + b) & 255
            elif kind == 3:
                row[i] = (row[i] + (a + b) // 2) & 255
            elif kind == 4:
                c = last[i - step] if i >= step else 0
                near = min((abs(b - c), 0, a), (abs(a - c), 1, b), (abs(a + b - 2 * c), 2, c))
                row[i] = (row[i] + near[2]) & 255
        colours.update(zip(row[0::step], row[1::step], row[2::step]))
        last = row
    return width, height, colours


def lightness(colours):
    return sum(sum(colour) / 3 * count for colour, count in colours.items()) / sum(colours.values())


@case
def page_in_a_browser(setting):
    page = setting.scratch / "full.html"
    setting.text(FULL, "--html", page)
    browser = Browser(setting)
    wide = browser.probe(page, 1280)
    equal(wide["titles"], ["Memory over time", "Map of the address space at peak",
                           "Never freed, by call stack", "At the peak, by call stack",
                           "Never freed", "Most allocations, by call stack",
                           "Most temporary allocations, by call stack", "Where cudaFree waited, by call stack",
                           "Memory by device", "Sizes asked for",
                           "Lifetimes", "Calls"], "sections")
    share = 31 * 8388608 / live_bytes(full())
    check(abs(wide["step"] - share) < 0.002, f"frame `step`: {wide['step']} of the width, expected {share}")
    check(abs(wide["zoomed"] - 1) < 0.002 and not wide["aside"], f"zoomed in: {wide}")
    check(wide["readout"].startswith("step at ") and "248.00 MiB in 31 blocks" in wide["readout"], wide["readout"])
    check(abs(wide["back"] - share) < 0.002, f"zoomed out: {wide}")
    counts = [bucket["count"] for bucket in full()["size_histogram"]]
    bars = wide["bars"][:len(counts)]
    check(all(abs(bar - max(1, bars[7] * count / 5100)) < 1 for bar, count in zip(bars, counts)), f"bars: {bars}")
    equal(wide["bytes"], ["768.00 MiB", "384.00 MiB", "248.00 MiB", "64.00 MiB", "3.00 MiB"], "leaks as they come")
    equal(wide["mostBlocks"], ["31", "24", "12", "3", "2"], "leaks by blocks")
    equal(wide["fewestBlocks"], ["2", "3", "12", "24", "31"], "leaks by blocks, the other way")
    equal(wide["calls"][0], "cuMemAllocAsync", "leaks by call")
    segments = full()["peak_map"]["segments"]
    equal([(s["all"], s["free"]) for s in wide["strips"]],
          [(len(s["cells"]), s["cells"].count("0")) for s in segments], "cells of the map, and free ones")
    equal(wide["strips"][1]["title"], "device 0, 0x7f3640000000: 768.00 MiB, 77.5 % used, largest free run 128.00 MiB",
          "a segment of the map")
    for width in (1280, 390, 320):
        found = browser.probe(page, width)
        check(all(s["width"] > width / 2 for s in found["strips"]), f"at {width} pixels the map has {found['strips']}")
        check(found["overflow"] <= 0, f"at {width} pixels the page is {found['overflow']} too wide")
        check(found["lines"][0] > width / 2, f"at {width} pixels the time line has {found['lines'][0]}")
    bright = browser.picture(page, "desktop", 1280)
    dark = browser.picture(page, "dark", 1280, dark=True)
    phone = browser.picture(page, "phone", 390)
    equal((bright[:2], phone[:2]), ((1280, 1800), (500, 1800)), "sizes of the pictures")
    check(lightness(bright[2]) > 200 and lightness(dark[2]) < 70, f"{lightness(bright[2])}, dark {lightness(dark[2])}")
    for name, picture in (("desktop", bright), ("dark", dark), ("phone", phone)):
        check(len(picture[2]) > 200, f"{name}: {len(picture[2])} colours: nothing to see")


@case
def pages_of_real_reports_and_ranks(setting):
    page, ranks = setting.scratch / "real.html", setting.scratch / "ranks.html"
    setting.text(setting.leaks(), "--html", page)
    setting.text(setting.leaks("a.json"), setting.leaks("b.json"), FULL, "--html", ranks)
    browser = Browser(setting)
    found = browser.probe(page, 390)
    equal(found["titles"], ["Memory over time", "Map of the address space at peak", "Never freed", "Memory by device",
                            "Sizes asked for", "Calls"], "sections of a report without stacks")
    equal(found["bytes"], ["14.31 MiB", "205.08 KiB", "48.22 KiB", "1000 B"], "leaks")
    check(found["overflow"] <= 0, f"{found['overflow']} too wide")
    found = browser.probe(ranks, 390)
    check(found["titles"][0] == "Reports" and found["overflow"] <= 0, found)
    _, _, colours = browser.picture(ranks, "ranks", 1280)
    check(len(colours) > 200, f"{len(colours)} colours: nothing to see")


@case
def page_loads_nothing(setting):
    setting.text(FULL, "--html", "full.html")
    page = (setting.scratch / "full.html").read_text()
    equal(re.findall(r"(?:src|href|url)\s*[=(]|https?:|@import|fetch\(|<link|<img", page), [], "what a page loads")
    check("default-src 'none'" in page, "the page does not forbid it")
    rows = setting.text(FULL, "--html", "top.html", "--top", "2") or (setting.scratch / "top.html").read_text()
    check("and 3 more" in rows, "no word of the rows left out")


@case
def a_million_groups(setting):
    """Large reports are read in the memory of what they say: a gigabyte is enough for a million groups."""
    import resource
    if setting.sanitized():
        raise Skip("a sanitizer needs memory of its own")
    path = setting.scratch / "large.json"
    report = full()
    group = {**report["live"][0], "count": 1}
    report["live"] = []
    head, tail = json.dumps(report).split('"live": []')
    with path.open("w") as file:
        file.write(head + '"live": [')
        file.write(",".join(json.dumps({**group, "size": i}) for i in range(1, 1_000_001)))
        file.write("]" + tail)

    def limit():
        resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))

    for arguments, words in ((["--top", "3"], "Never freed: 1 000 000 blocks"),
                             (["--format", "folded"], " 500000500000")):
        done = subprocess.run([str(setting.build / "cushion"), "report", str(path), *arguments], capture_output=True,
                              text=True, timeout=TIMEOUT_S, preexec_fn=limit)
        check(words in done.stdout, done.stderr or done.stdout[-300:])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("build", nargs="?", type=Path)
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--list", action="store_true")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(CASES))
        return 0
    code = 0
    for name in arguments.cases or CASES:
        with tempfile.TemporaryDirectory(prefix="cushion-report-") as scratch:
            try:
                CASES[name](Setting(arguments.build.resolve(), Path(scratch)))
                print(f"{name}: ok")
            except Skip as why:
                print(f"{name}: skipped: {why}")
                code = code or SKIPPED
            except (AssertionError, subprocess.SubprocessError) as failure:
                print(f"{name}: FAILED: {failure}")
                code = 1
    return code


if __name__ == "__main__":
    sys.exit(main())
