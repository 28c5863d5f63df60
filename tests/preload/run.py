#!/usr/bin/env python3
"""Preload tests: the same program natively and under LD_PRELOAD=libcushion.so, over the emulated driver.

    run.py [--sanitized] BUILD_DIR CASE...     runs the named cases (all without a name)
    run.py --gpu BUILD_DIR CASE...             on this machine's own driver; not every case can be run there
    run.py --list                              prints the cases' names, one a line

The rule behind every case: a program's output and exit code are the same with and without the preload. The
exit report (CUSHION_REPORT) says besides that the preload was really in the way: `calls.served` above zero
where the program allocated by a hooked route. Exit code 77 means skipped, as ctest understands it.
"""

import argparse
import dataclasses
import json
import os
import pty
import re
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "gpu"))
from no_gpu import SKIPPED, no_gpu  # noqa: E402

TIMEOUT_S = 30
LEVELS = ("O0", "O1", "Og", "O2", "O3")


class Skip(Exception):
    """This case does not apply to this build; the text says why."""


@dataclasses.dataclass
class Result:
    code: int
    out: str
    err: str
    reports: list


class Setting:
    """Where the build is, and an empty folder for this case's files."""

    def __init__(self, build, sanitized, gpu, scratch):
        self.build = build
        self.driver = {} if gpu else {"LD_LIBRARY_PATH": str(build / "emulator")}
        self.sanitized = sanitized
        self.scratch = scratch
        self.shim = build / "libcushion.so"
        self.programs = build / "tests" / "preload"
        self.runs = 0

    def program(self, name):
        path = self.programs / name
        check(path.exists(), f"{path} is not built")
        return path

    def run(self, command, preload=(), driver=True, **options):
        """Runs `command` with exactly these libraries preloaded and these CUSHION_ options set."""
        self.runs += 1
        reports = self.scratch / f"reports-{self.runs}"
        reports.mkdir()
        env = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR", "LANG") if name in os.environ}
        env["ASAN_OPTIONS"] = "verify_asan_link_order=0:detect_leaks=0"
        env["UBSAN_OPTIONS"] = "print_stacktrace=1"
        if driver:
            env.update(self.driver)
        if preload:
            env["LD_PRELOAD"] = ":".join(str(library) for library in preload)
            env["CUSHION_REPORT"] = str(reports / "%p.json")
        for name, value in options.items():
            env[name] = str(value)
            if value is None:
                del env[name]
        done = subprocess.run([str(part) for part in command], env=env, cwd=self.scratch, stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S)
        found = [json.loads(path.read_text()) for path in sorted(reports.glob("*"))]
        for report in found:
            check(report["schema"] == "cushion-report", f"not a report: {report}")
            check(report["version"] == 1, f"report version {report['version']}")
        return Result(done.returncode, done.stdout, done.stderr, found)

    def native(self, command, **options):
        result = self.run(command, **options)
        check(result.code >= 0, f"native run died of signal {-result.code}: {result.err}")
        check("not found" not in result.out, f"native run found no function:\n{result.out}")
        return result

    def cushioned(self, command, before=(), after=(), **options):
        return self.run(command, preload=(*before, self.shim, *after), **options)

    def compare(self, command, served=True, before=(), after=(), reports=1, **options):
        """The heart of it: natively, then under the preload; both must look the same. Returns the second."""
        native = self.native(command)
        cushion = self.cushioned(command, before=before, after=after, **options)
        same(native, cushion)
        check(cushion.err == "", f"the preload said something: {cushion.err!r}")
        check(len(cushion.reports) == reports, f"{len(cushion.reports)} reports, expected {reports}")
        for report in cushion.reports:
            calls = report["calls"]
            check((calls["served"] > 0) == served, f"calls: {calls}, expected served: {served}")
        return cushion


def check(condition, message):
    if not condition:
        raise AssertionError(message)


def same(native, cushion):
    check(native.code == cushion.code,
          f"exit code {native.code} natively, {cushion.code} under Cushion\n{cushion.out}{cushion.err}")
    if native.out != cushion.out:
        pairs = [(a, b) for a, b in zip(native.out.splitlines(), cushion.out.splitlines()) if a != b]
        first = "native `{}`, Cushion `{}`".format(*pairs[0]) if pairs else "one is longer"
        raise AssertionError(f"output differs: {first}\n--- native\n{native.out}--- cushion\n{cushion.out}")


def one_line(result, *words):
    """Exactly one line on stderr, from Cushion, with each of these words in it."""
    lines = result.err.splitlines()
    check(len(lines) == 1, f"expected one line on stderr, got {lines}")
    check(lines[0].startswith("cushion: "), f"not a line of Cushion's: {lines[0]!r}")
    for word in words:
        check(word in lines[0], f"no {word!r} in {lines[0]!r}")


CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def release_only(setting):
    if setting.sanitized:
        raise Skip("a sanitizer's runtime is linked into this build")


# --- every way to the driver ----------------------------------------------------------------------------

def route(name, *args):
    def run(setting):
        setting.compare([setting.program(name), *(setting.program(arg) for arg in args)])

    CASES[name] = run


for simple in ("route_dlsym", "route_proc_address_v2", "route_proc_address", "route_proc_address_nested",
               "route_per_thread", "route_linked", "route_rtld"):
    route(simple)
route("route_private", "libprivate.so")


@case
def route_dlvsym(setting):
    result = setting.compare([setting.program("route_dlvsym")])
    calls = result.reports[0]["calls"]
    check(calls["forwarded"] > 0, f"the driver's own block was not forwarded: {calls}")


def next_malloc(level, lookup):
    def run(setting):
        release_only(setting)
        setting.compare([setting.program(f"route_next_malloc_{level}_{lookup}")])

    CASES[f"next_malloc_{level}_{lookup}"] = run


for _level in LEVELS:
    for _lookup in ("noexcept", "throwing"):
        next_malloc(_level, _lookup)


def other_preload(library, program):
    """Another interposing preload in front of Cushion and behind it. In front, it still sees the calls, and where its
    own dlsym answers (with the C library's, whose version it names) the program's lookups never reach Cushion."""
    hidden = (library, program) == ("interposer_dlsym", "route_dlsym")

    def before(setting):
        if setting.sanitized and library == "interposer_dlsym":
            raise Skip("the sanitizer's runtime asks the tool's dlsym before the tool can answer")
        tool = setting.program(f"lib{library}.so")
        native = setting.run([setting.program(program)], preload=[tool], INTERPOSER_SAYS=1)
        cushion = setting.cushioned([setting.program(program)], before=[tool], INTERPOSER_SAYS=1)
        same(native, cushion)
        check(native.err == cushion.err, f"the tool saw {native.err!r} natively, {cushion.err!r} before Cushion")
        served = any(report["calls"]["served"] > 0 for report in cushion.reports)
        check(served != hidden, f"served: {served}, expected {not hidden}")

    def after(setting):
        setting.compare([setting.program(program)], after=[setting.program(f"lib{library}.so")])

    CASES[f"{library}_before_{program}"] = before
    CASES[f"{library}_after_{program}"] = after


for _library in ("interposer", "interposer_dlsym"):
    for _program in ("route_linked", "route_dlsym", "route_rtld"):
        other_preload(_library, _program)


# --- the library itself ---------------------------------------------------------------------------------

def readelf(*args):
    return subprocess.run(["readelf", "-W", *(str(arg) for arg in args)], check=True, capture_output=True, text=True,
                          env={**os.environ, "LC_ALL": "C"}).stdout


@case
def exports(setting):
    script = re.sub(r"/\*.*?\*/|#.*", "", (setting.build / "shim" / "exports.map").read_text(), flags=re.S)
    visible = re.search(r"global:(.*?)(local:|\})", script, re.S)
    check(visible, "no global: section in exports.map")
    expected = set(re.findall(r"\w+", visible.group(1)))
    check("dlsym" in expected, "the hook list lost dlsym")
    listed = subprocess.run(["nm", "-D", "--defined-only", setting.shim], check=True, capture_output=True,
                            text=True).stdout.split("\n")
    exported = {line.split()[-1] for line in listed if line}
    versioned = {name for name in exported if "@" in name}
    check(not versioned, f"symbols with a version bind to no other library's: {versioned}")
    check(exported == expected, f"missing: {sorted(expected - exported)}, beyond the hook list: "
                                f"{sorted(exported - expected)}")


@case
def needed(setting):
    release_only(setting)
    allowed = re.compile(r"(libc\.so\.6|libm\.so\.6|libdl\.so\.2|libpthread\.so\.0|ld-linux[-\w]*\.so\.\d)$")
    libraries = re.findall(r"\(NEEDED\).*\[(.*)\]", readelf("-d", setting.shim))
    check("libc.so.6" in libraries, f"no libc among {libraries}")
    strangers = [library for library in libraries if not allowed.match(library)]
    check(not strangers, f"needs {strangers}")


@case
def hardened(setting):
    """What is shipped: nothing writable that need not be, no executable stack, canaries, checked library calls."""
    for file in (setting.shim, setting.build / "cushion"):
        dynamic, segments = readelf("-d", file), readelf("-l", file)
        check("BIND_NOW" in dynamic and re.search(r"FLAGS_1.*NOW", dynamic), f"{file}: lazy binding")
        check("GNU_RELRO" in segments, f"{file}: no RELRO")
        check(file == setting.shim or re.search(r"FLAGS_1.*PIE", dynamic), f"{file}: at a fixed address")
        stack = re.search(r"GNU_STACK.*?\s(R\w*)\s+0x", segments)
        check(stack, f"{file}: no GNU_STACK: the whole process's stack becomes executable")
        check("E" not in stack.group(1), f"{file}: executable stack")
        loads = re.findall(r"LOAD .*? 0x\w+ 0x\w+ ([RWE ]+) 0x", segments)
        check(loads and not any("W" in flags and "E" in flags for flags in loads), f"{file}: writable code: {loads}")
        check("TEXTREL" not in dynamic, f"{file}: text relocations")
        if not setting.sanitized:
            symbols = readelf("--dyn-syms", file)
            check("__stack_chk_fail" in symbols, f"{file}: no canaries")
            check(re.search(r"__\w+_chk@", symbols.replace("__stack_chk", "")), f"{file}: no checked library calls")
    if not setting.sanitized:
        check("STATIC_TLS" in readelf("-d", setting.shim), "thread-local state is not initial-exec")


@case
def hot_path_without_canaries(setting):
    """The functions that every allocation and free goes through hold no arrays, and get no canaries."""
    release_only(setting)
    code = subprocess.run(["objdump", "-dC", "--no-show-raw-insn", setting.shim], check=True, capture_output=True,
                          text=True).stdout
    functions = dict(re.findall(r"^[0-9a-f]+ <(.*)>:\n((?:.+\n)*)", code, re.M))
    hot = [name for name in functions if re.match(r"(hook_)?(cuMem(Alloc|Free)(Async)?(_v2)?(_ptsz)?|cuda(Malloc|Free)"
                                                  r"(Async)?(_ptsz)?)$|cushion::(Runtime|Context)::(allocate|free)\b",
                                                  name)]
    check(len(hot) > 6, f"found only {hot}")
    guard = re.compile(r"%fs:0x28|__stack_chk_guard")
    check(any(guard.search(body) for body in functions.values()), "no function has a canary")
    slow = [name for name in hot if guard.search(functions[name])]
    check(not slow, f"canaries in {slow}")


@case
def secure_execution(setting):
    """In a setuid program another user's environment decides nothing: Cushion is inert there."""
    release_only(setting)
    if os.geteuid() != 0:
        raise Skip("only root can make a program setuid for another user")
    folder = setting.scratch / "secure"
    folder.mkdir()
    for path in (setting.scratch, folder):
        path.chmod(0o777)
    for setuid in (False, True):
        program = folder / f"program-{setuid}"
        shutil.copy(setting.program("secure"), program)
        program.chmod(0o4755 if setuid else 0o755)
        driver, shim = (Path(shutil.copy(file, folder)) for file in (setting.build / "emulator" / "libcuda.so.1", setting.shim))
        env = {"CUSHION_REPORT": str(folder / "%e.json")}
        done = subprocess.run([program, driver, shim], env=env, capture_output=True, text=True, timeout=TIMEOUT_S,
                              user=65534)
        if setuid and done.stdout.startswith("secure 0"):
            raise Skip("this file system knows no setuid programs")
        check(done.returncode == 0 and done.stdout.endswith("\nalloc 0\n"), f"{done}")
        check((folder / f"{program.name}.json").exists() != setuid, f"report: {not setuid} expected, {list(folder.iterdir())}")


@case
def silent_without_driver(setting):
    """`LD_PRELOAD=libcushion.so /bin/true` where there is no CUDA: nothing printed, nothing written, no time."""
    true = shutil.which("true")
    result = setting.run([true], preload=[setting.shim], driver=False)
    check((result.code, result.out, result.err, result.reports) == (0, "", "", []), f"not silent: {result}")
    result = setting.run([true], preload=[setting.shim], driver=False, CUSHION_ALLOCATOR="nonsense", CUSHION_TYPO="1")
    check((result.code, result.out, result.err, result.reports) == (0, "", "", []), f"not silent: {result}")
    left = [path for path in setting.scratch.rglob("*") if path.is_file()]
    check(not left, f"wrote {left}")

    def measure(env):
        started = time.perf_counter()
        subprocess.run([true], env=env, check=True)
        return 1e3 * (time.perf_counter() - started)

    plain, preloaded = [], []
    for _ in range(100):  # in turn, so that a busy machine is busy for both
        plain.append(measure({}))
        preloaded.append(measure({"LD_PRELOAD": str(setting.shim), "ASAN_OPTIONS": "verify_asan_link_order=0"}))
    plain, preloaded = statistics.median(plain), statistics.median(preloaded)
    print(f"{true}: {plain:.2f} ms, preloaded {preloaded:.2f} ms, {preloaded - plain:+.2f} ms (should be under 1)")


def driver_calls(setting, *args, **options):
    """The emulated driver's own count of calls, by function, and the run."""
    counts = setting.scratch / f"count-{setting.runs}"
    result = setting.cushioned([setting.program("process"), *args], EMU_COUNT=counts, **options)
    if not counts.exists():
        return {}, result
    lines = [line.split() for line in counts.read_text().splitlines()]
    return {name: int(count) for name, count in lines if int(count) > 0}, result


@case
def no_call_before_the_program(setting):
    """No constructor calls CUDA, nor even loads it: a program that does nothing makes no driver call at all."""
    calls, result = driver_calls(setting, "idle")
    check(result.code == 6, f"exit code {result.code}")
    check(not calls, f"driver calls: {calls}")
    calls, _ = driver_calls(setting, "allocate")
    check(calls.get("cuInit", 0) >= 1, f"the emulator counts nothing: {calls}")


@case
def no_call_beyond_the_programs(setting):
    """A program with a context and no allocation gets no call of Cushion's and no report, options good or bad."""
    program = [setting.program("process"), "context_only"]
    for options in ({}, {"CUSHION_ALLOCATOR": "nonsense", "CUSHION_TYPO": "1", "CUSHION_TRACK": "on"}):
        same(setting.native(program), setting.cushioned(program, **options))
        calls, result = driver_calls(setting, "context_only", **options)
        check(result.err == "" and not result.reports, f"not silent: {result}")
        check("cuCtxSetCurrent" in calls, f"the emulator counts nothing: {calls}")
        lookups = {"cuDriverGetVersion", "cuGetProcAddress_v2"}  # by the first hooked call; no device is touched
        beyond = set(calls) - lookups - {"cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"}
        check(not beyond, f"calls that the program did not make: {sorted(beyond)}")


# --- options --------------------------------------------------------------------------------------------

def inert(setting, served=False, **options):
    native = setting.native([setting.program("route_dlsym")])
    cushion = setting.cushioned([setting.program("route_dlsym")], **options)
    same(native, cushion)
    check(cushion.err == "", f"said {cushion.err!r}")
    hit = any(report["calls"]["served"] > 0 for report in cushion.reports)
    check(hit == served, f"served: {hit}, expected {served}, with {options}")


@case
def disable(setting):
    inert(setting, CUSHION_DISABLE=1)
    inert(setting, CUSHION_DISABLE=1, CUSHION_ALLOCATOR="nonsense", CUSHION_TYPO=1)
    inert(setting, served=True, CUSHION_DISABLE=0)


@case
def asks_for_no_library_that_is_not_loaded(setting):
    """dlopen of a library that is not loaded leaves, for a moment, what a child forked then dies of in its dlopen."""
    for program in ("route_linked", "route_dlsym"):
        result = setting.cushioned([setting.program(program)], before=[setting.program("libloader_watch.so")])
        check("loader_watch" not in result.err, result.err)
        check(any(report["calls"]["served"] > 0 for report in result.reports), "nothing was served")


@case
def access_checkers(setting):
    """Under compute-sanitizer and other tools on its API Cushion steps aside and says so; DISABLE=0 makes it serve."""
    program = [setting.program("route_dlsym")]
    native = setting.native(program)
    for checker in ("libsanitizer-collection.so", "libsanitizer-public.so"):
        library = setting.program(checker)
        for place in ("before", "after"):
            for options in ({}, {"CUSHION_DISABLE": "auto", "CUSHION_TRACK": "on"}):
                result = setting.cushioned(program, **{place: [library]}, **options)
                same(native, result)
                one_line(result, checker, "CUSHION_DISABLE=0")
                check(not result.reports, f"served under {checker}")
            setting.compare(program, **{place: [library]}, CUSHION_DISABLE=0)
            result = setting.cushioned(program, **{place: [library]}, CUSHION_DISABLE=1)
            same(native, result)
            check(result.err == "" and not result.reports, f"not silent when disabled: {result}")


@case
def programs_filter(setting):
    for pattern, served in (("route_dlsym", True), ("something_else", False), ("a,route_*", True), ("!route_dlsym", False),
                            ("!something_else", True), ("route_dlsy?", True), ("route", False)):
        inert(setting, served=served, CUSHION_PROGRAMS=pattern)


@case
def allocator_cuda(setting):
    """ALLOCATOR=cuda counts and serves nothing."""
    setting.compare([setting.program("route_dlsym")], served=False, CUSHION_ALLOCATOR="cuda")


@case
def free_deferred(setting):
    setting.compare([setting.program("route_dlsym")], CUSHION_FREE="deferred")


@case
def bad_values(setting):
    """A bad value: one line that names it and the valid ones, and the program runs on native CUDA."""
    native = setting.native([setting.program("route_dlsym")])
    for name, value, words in (("CUSHION_ALLOCATOR", "pol", ("pol", "pool", "cuda")),
                               ("CUSHION_FREE", "", ("sync", "deferred")),
                               ("CUSHION_MAX_SIZE", "150%", ("150%",)),
                               ("CUSHION_SEGMENT_SIZE", "-1", ("-1",)),
                               ("CUSHION_OOM_WAIT", "soon", ("soon",)),
                               ("CUSHION_DISABLE", "maybe", ("maybe", "auto", "0", "1")),
                               ("CUSHION_LOG_LEVEL", "loud", ("loud", "debug"))):
        result = setting.cushioned([setting.program("route_dlsym")], **{name: value})
        same(native, result)
        one_line(result, name, *words)
        hit = any(report["calls"]["served"] > 0 for report in result.reports)
        check(not hit, f"{name}={value} was served by the pool")


@case
def unknown_names(setting):
    """An unknown name: one line with the nearest valid name, and everything else stays in force."""
    native = setting.native([setting.program("route_dlsym")])
    for name, nearest in (("CUSHION_ALOCATOR", "CUSHION_ALLOCATOR"), ("CUSHION_LOGLEVEL", "CUSHION_LOG_LEVEL"),
                          ("CUSHION_FREED", "CUSHION_FREE")):
        result = setting.cushioned([setting.program("route_dlsym")], **{name: "1"})
        same(native, result)
        one_line(result, name, nearest)
        check(result.reports[0]["calls"]["served"] > 0, f"{name} turned the pool off")


@case
def every_option_bad(setting):
    """Every option, with values that are no values: one short line that names the option and its valid words, and the
    program is as natively. Texts (paths, patterns) are taken as they are."""
    table = subprocess.run([setting.build / "cushion", "options", "--markdown"], check=True, capture_output=True,
                           text=True).stdout
    options = re.findall(r"^\| `(CUSHION_\w+)` \| (\S+) \| (.*?[^\\]) \|", table, re.M)
    check(len(options) > 10, f"the launcher prints no table: {table}")
    native = setting.native([setting.program("route_dlsym")])
    # The kernel takes 128 KiB as the longest variable; unit tests go to 1 MiB.
    values = {"empty": "", "negative": "-1", "overflowing": "99999999999999999999999", "not UTF-8": "\udcff\udc80\x1b[2J",
              "long": "x" * 130000}
    for name, default, words in options:
        is_text = "pattern" in words
        for kind, value in values.items():
            extra = {"CUSHION_LOG_LEVEL": "error"} if name == "CUSHION_LOG_FILE" else {}
            result = setting.cushioned([setting.program("route_dlsym")], **{name: value, **extra})
            same(native, result)
            about = f"{name} {kind}: {result.err!r}"
            refused = (kind == "long" and name != "CUSHION_PROGRAMS") if is_text else True
            if not refused:
                check(result.err == "", about)
                continue
            one_line(result, name, *(words.replace("\\|", "|").split("|") if "\\|" in words and not is_text else ()))
            check(len(result.err) < 1024 and result.err.strip().isprintable(), about)
            check(is_text or not result.reports, f"{about}: served all the same")


@case
def report_unwritable(setting):
    """A report that cannot be written: one line that names the file; output and exit code stay the program's."""
    program = [setting.program("process"), "allocate"]
    native = setting.native(program)
    (setting.scratch / "file").write_text("not a folder")
    os.mkfifo(setting.scratch / "fifo")  # that nobody reads
    (setting.scratch / "taken.json.partial").mkdir()
    for path in (setting.scratch / "file" / "report.json", setting.scratch, Path("/dev/full"), Path("/dev/nowhere"),
                 setting.scratch / "fifo", setting.scratch / "taken.json"):
        result = setting.cushioned(program, CUSHION_REPORT=path)
        same(native, result)
        one_line(result, str(path))


def under_limits(setting, command, prepare, stderr=subprocess.PIPE, **options):
    """Runs `command` under the preload in a process that `prepare` has changed first."""
    env = {"PATH": os.environ["PATH"], "LD_PRELOAD": str(setting.shim), "ASAN_OPTIONS": "verify_asan_link_order=0",
           "LD_LIBRARY_PATH": str(setting.build / "emulator"), **{name: str(value) for name, value in options.items()}}
    done = subprocess.run([str(part) for part in command], env=env, cwd=setting.scratch, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=stderr, text=True, timeout=TIMEOUT_S, preexec_fn=prepare)
    return Result(done.returncode, done.stdout, done.stderr or "", [])


@case
def report_full(setting):
    """A file that may not grow (where writing raises SIGXFSZ): one line, nothing left over."""
    release_only(setting)
    program = [setting.program("process"), "allocate"]
    path = setting.scratch / "report.json"
    result = under_limits(setting, program, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (512, 512)),
                          CUSHION_REPORT=path)
    same(setting.native(program), result)
    one_line(result, str(path), "File too large")
    check(not list(setting.scratch.glob("report.json*")), f"left over: {list(setting.scratch.glob('report.json*'))}")


@case
def report_to_closed_pipe(setting):
    """stderr whose reader is gone: writing the report or a complaint there does not end the program (SIGPIPE)."""
    release_only(setting)
    program = [setting.program("process"), "allocate"]
    native = setting.native(program)
    for options in ({"CUSHION_TRACK": "on"}, {"CUSHION_ALLOCATOR": "nonsense"}, {"CUSHION_LOG_LEVEL": "trace"}):
        reader, writer = os.pipe()
        os.close(reader)
        result = under_limits(setting, program, lambda: signal.signal(signal.SIGPIPE, signal.SIG_DFL), stderr=writer,
                              **options)
        os.close(writer)
        same(native, result)


@case
def report_mode(setting):
    """The umask decides who may read the report and the log, as for any file of the program's."""
    program = [setting.program("process"), "allocate"]
    for mask in (0o022, 0o077):
        path, log = setting.scratch / f"report-{mask:o}.json", setting.scratch / f"log-{mask:o}.txt"
        under_limits(setting, program, lambda: os.umask(mask), CUSHION_REPORT=path, CUSHION_LOG_FILE=log,
                     CUSHION_LOG_LEVEL="info")
        for file in (path, log):
            check(file.stat().st_mode & 0o7777 == 0o666 & ~mask, f"{file}: mode {file.stat().st_mode:o}")


@case
def files_of_others(setting):
    """What somebody put where the report or the log is to go: it is never written to or through, nor waited for."""
    program = [setting.program("process"), "allocate"]
    native = setting.native(program)
    victim = setting.scratch / "victim"
    report, partial = setting.scratch / "report.json", setting.scratch / "report.json.partial"
    victim.write_text("precious")
    os.utime(victim, (0, 0))  # a report that is younger than the process is another process's, and is kept
    for place in (report, partial):
        for put in (os.symlink, os.link, lambda _, at: os.symlink("/nowhere", at),
                    *([lambda _, at: os.mkfifo(at)] if place == partial else [])):
            put(victim, place)
            result = setting.cushioned(program, CUSHION_REPORT=report)
            same(native, result)
            check(result.err == "" and json.loads(report.read_text())["schema"] == "cushion-report", f"{result.err!r}")
            check(not report.is_symlink() and victim.read_text() == "precious", f"written through {place}")
            check(not os.path.lexists(partial), "left its partial file")
            report.unlink()
    log = setting.scratch / "log.txt"
    for put, why in ((os.symlink, "symbolic link"), (os.link, "not permitted"), (lambda _, at: os.mkfifo(at), "reads")):
        put(victim, log)
        result = setting.cushioned(program, CUSHION_LOG_FILE=log, CUSHION_LOG_LEVEL="error")
        same(native, result)
        one_line(result, "CUSHION_LOG_FILE", str(log), why)
        check(victim.read_text() == "precious", "the log was written through a link")
        log.unlink()
    log.write_text("before\n")
    same(native, setting.cushioned(program, CUSHION_LOG_FILE=log, CUSHION_LOG_LEVEL="debug"))
    check(log.read_text().startswith("before\n") and log.read_text().count("\n") > 1, "the log is not appended to")


@case
def report_read_by_others(setting):
    """A pipe with a reader gets the report; /dev/stdout gets it among the program's own output and stays what it is."""
    program = [setting.program("process"), "allocate"]
    native = setting.native(program)
    pipe = setting.scratch / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    same(native, setting.cushioned(program, CUSHION_REPORT=pipe))
    check(json.loads(os.read(reader, 1 << 20))["schema"] == "cushion-report", "no report in the pipe")
    os.close(reader)
    check(os.path.islink("/dev/stdout") and not os.path.lexists("/dev/stdout.partial"), "/dev/stdout was no link before")
    with open(setting.scratch / "out", "w+") as out:
        env = {"LD_PRELOAD": str(setting.shim), "LD_LIBRARY_PATH": str(setting.build / "emulator"),
               "CUSHION_REPORT": "/dev/stdout", "ASAN_OPTIONS": "verify_asan_link_order=0:detect_leaks=0"}
        done = subprocess.run(program, env=env, stdout=out, stderr=subprocess.PIPE, text=True, timeout=TIMEOUT_S)
        out.seek(0)
        text = out.read()
    check((done.returncode, done.stderr) == (native.code, ""), f"{done}")
    start = text.index('{\n  "schema"')
    report, length = json.JSONDecoder().raw_decode(text[start:])
    check(report["calls"]["served"] > 0, f"no report: {report}")
    check(text[:start] + text[start + length + 1:] == native.out, f"the program's own output is not whole: {text!r}")
    check(os.path.islink("/dev/stdout") and not os.path.lexists("/dev/stdout.partial"), "/dev/stdout was replaced")


@case
def report_vanished(setting):
    """Its folder, or the file that it is written to, is gone when the program ends: one line, or a new file."""
    folder = setting.scratch / "gone"
    path, partial = folder / "report.json", folder / "report.json.partial"

    def replaced():
        partial.unlink()
        partial.write_text("another's")

    for change, says in ((lambda: shutil.rmtree(folder), "No such file"), (replaced, "File exists"),
                         (partial.unlink, "")):
        env = {"LD_PRELOAD": str(setting.shim), "LD_LIBRARY_PATH": str(setting.build / "emulator"),
               "CUSHION_REPORT": str(path), "ASAN_OPTIONS": "verify_asan_link_order=0:detect_leaks=0"}
        program = subprocess.Popen([setting.program("process"), "wait_for_signal"], env=env, stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, text=True)
        while (line := program.stdout.readline()) != "ready\n":
            check(line != "", "it does not begin")
        change()
        program.terminate()
        _, err = program.communicate(timeout=TIMEOUT_S)
        check(program.returncode == -signal.SIGTERM, f"ended with {program.returncode}")
        if says:
            one_line(Result(0, "", err, []), str(path), says)
            check(not path.exists(), "a report where none can be")
            shutil.rmtree(folder, ignore_errors=True)
        else:
            check(err == "" and path.exists(), f"{err!r}")


@case
def report_text(setting):
    """Without .json the report is text; with TRACK alone it goes to stderr; with neither there is none."""
    program = [setting.program("process"), "allocate"]
    native = setting.native(program)
    file = setting.scratch / "report.txt"
    result = setting.cushioned(program, CUSHION_REPORT=file)
    same(native, result)
    text = file.read_text()
    check(result.err == "" and "process" in text and not text.startswith("{"), f"report {text!r}, stderr {result.err!r}")
    result = setting.cushioned(program, CUSHION_REPORT=None, CUSHION_TRACK="on")
    same(native, result)
    check("process" in result.err, f"no report on stderr: {result.err!r}")
    result = setting.cushioned(program, CUSHION_REPORT=None)
    same(native, result)
    check(result.err == "", f"not silent: {result.err!r}")


@case
def report_name(setting):
    """%p, %h, %e and %% are expanded; the report names the program, its process and the options in force."""
    program = [setting.program("process"), "allocate"]
    folder = setting.scratch / "named"
    folder.mkdir()
    same(setting.native(program), setting.cushioned(program, CUSHION_REPORT=folder / "%e-%h-%%-%p.json",
                                                    CUSHION_SEGMENT_SIZE="8MiB"))
    names = [path.name for path in folder.iterdir()]
    check(len(names) == 1, f"reports: {names}")
    report = json.loads((folder / names[0]).read_text())
    check(names[0] == f"process-{os.uname().nodename}-%-{report['program']['pid']}.json", f"named {names[0]}")
    check("process" in report["program"]["name"], f"program {report['program']}")
    check(report["options"]["SEGMENT_SIZE"] == "8MiB", f"options {report['options']}")
    check(report["devices"] and report["devices"][0]["requested"]["peak"] >= 3 << 20, f"devices {report['devices']}")
    check(report["live"] == [], f"live after everything was freed: {report['live']}")


@case
def log(setting):
    program = [setting.program("process"), "allocate"]
    native = setting.native(program)
    pattern = setting.scratch / "log-%p.txt"
    result = setting.cushioned(program, CUSHION_LOG_LEVEL="debug", CUSHION_LOG_FILE=pattern)
    same(native, result)
    check(result.err == "", f"the log went to stderr: {result.err!r}")
    files = list(setting.scratch.glob("log-*.txt"))
    check(len(files) == 1 and files[0].name == f"log-{result.reports[0]['program']['pid']}.txt", f"log files {files}")
    check(files[0].read_text().strip(), "nothing was logged at level debug")
    result = setting.cushioned(program, CUSHION_LOG_LEVEL="debug")
    same(native, result)
    check(result.err.strip(), "nothing was logged to stderr at level debug")


@case
def log_unwritable(setting):
    program = [setting.program("process"), "allocate"]
    (setting.scratch / "file").write_text("not a folder")
    path = setting.scratch / "file" / "cushion.log"
    result = setting.cushioned(program, CUSHION_LOG_LEVEL="error", CUSHION_LOG_FILE=path)
    same(setting.native(program), result)
    one_line(result, str(path))
    check(result.reports[0]["calls"]["served"] > 0, "nothing was served")


@case
def terminal_interrupt(setting):
    """Ctrl-C at the terminal ends the program as natively, and the report is written first. (A signal from the
    terminal comes from the kernel, as a fault does.)"""
    report = setting.scratch / "report.json"
    for preload in (None, setting.shim):
        pid, terminal = pty.fork()
        if pid == 0:
            os.environ["LD_LIBRARY_PATH"] = str(setting.build / "emulator")
            os.environ["ASAN_OPTIONS"] = "verify_asan_link_order=0:detect_leaks=0"
            if preload:
                os.environ["LD_PRELOAD"] = str(preload)
                os.environ["CUSHION_REPORT"] = str(report)
            program = str(setting.program("process"))
            os.execv(program, [program, "wait_for_signal"])
        seen = b""
        while b"ready" not in seen:
            seen += os.read(terminal, 1000)
        os.write(terminal, b"\x03")
        status = os.waitpid(pid, 0)[1]
        os.close(terminal)
        check(os.WIFSIGNALED(status) and os.WTERMSIG(status) == 2, f"{preload}: ended with status {status:#x}")
    check(json.loads(report.read_text())["program"]["end"] == "signal 2", report.read_text())


# --- processes and threads ------------------------------------------------------------------------------

@case
def fork_before_first_use(setting):
    """Child and parent are ordinary processes: each has its report."""
    result = setting.compare([setting.program("process"), "fork_before"], reports=2)
    pids = {report["program"]["pid"] for report in result.reports}
    check(len(pids) == 2, f"reports of {pids}")


@case
def fork_before_first_use_one_name(setting):
    """Without %p the second process appends its pid rather than overwrite the first one's report."""
    program = [setting.program("process"), "fork_before"]
    folder = setting.scratch / "reports"
    folder.mkdir()
    same(setting.native(program), setting.cushioned(program, CUSHION_REPORT=folder / "report.json"))
    reports = {path.name: json.loads(path.read_text())["program"]["pid"] for path in folder.iterdir()}
    check(len(set(reports.values())) == 2, f"reports: {reports}")
    check("report.json" in reports, f"reports: {reports}")
    other = next(name for name in reports if name != "report.json")
    check(str(reports[other]) in other, f"reports: {reports}")


@case
def fork_after_first_use(setting):
    """The child gets no report, and leaves the parent's alone."""
    setting.compare([setting.program("process"), "fork_after"])


@case
def fork_child_calls(setting):
    """A forked child's free answers 3 as the driver does there, and never hangs; the parent goes on."""
    setting.compare([setting.program("process"), "fork_child_calls"])


@case
def exec_child(setting):
    """Exec'd children inherit the preload: one that allocates has its own report, an idle one none."""
    setting.compare([setting.program("process"), "exec_child"], reports=2)


@case
def threads_ending(setting):
    setting.compare([setting.program("process"), "threads"])


@case
def many_threads(setting):
    """Two hundred threads come and go: what they cached and left is neither lost nor called a leak."""
    result = setting.compare([setting.program("process"), "many_threads"])
    check(result.reports[0]["live"] == [], f"live {result.reports[0]['live']}")
    held = result.reports[0]["devices"][0]["held"]["peak"]
    check(held <= 64 << 20, f"held {held} bytes for two blocks at a time")


@case
def thread_local_destructor(setting):
    result = setting.compare([setting.program("process"), "thread_local_destructor"])
    check(result.reports[0]["live"] == [], f"live {result.reports[0]['live']}")


@case
def exit_in_thread(setting):
    """A thread ends the process while others are inside the hooks: the exit code is its own, the report is whole."""
    result = setting.cushioned([setting.program("process"), "exit_in_thread"])
    check(result.code == 19, f"exit code {result.code}: {result.err}")
    check(result.err == "" and len(result.reports) == 1, f"{result.err!r}, {len(result.reports)} reports")
    check(result.reports[0]["program"]["end"] == "exit", f"{result.reports[0]['program']}")
    check(result.reports[0]["calls"]["served"] > 1000, f"{result.reports[0]['calls']}")


@case
def main_thread_exits(setting):
    if setting.sanitized:
        raise Skip("ThreadSanitizer's runtime cannot join the main thread")
    setting.compare([setting.program("process"), "main_thread_exits"])


@case
def unloaded_plugin(setting):
    """A library that allocated is unloaded: its block lives on and is freed by the program."""
    setting.compare([setting.program("process"), "unload", setting.program("libplugin.so")])


@case
def unloaded_static(setting):
    """A library's static object allocates when it is loaded and frees when it is unloaded, again and again."""
    result = setting.compare([setting.program("process"), "unload_static", setting.program("libplugin_static.so")])
    check(result.reports[0]["live"] == [], f"live {result.reports[0]['live']}")


@case
def deepbind_plugin(setting):
    """RTLD_DEEPBIND finds libc's dlsym before any preload's: that library's block is the driver's own, and is freed
    through Cushion all the same."""
    release_only(setting)
    result = setting.compare([setting.program("process"), "unload_deepbind", setting.program("libplugin.so")])
    calls = result.reports[0]["calls"]
    check(calls["forwarded"] > 0, f"the plugin's block was not forwarded: {calls}")


@case
def before_and_after_main(setting):
    """Static constructors, atexit handlers and static destructors allocate and free as natively."""
    setting.compare([setting.program("lifetime")])


# --- asked while it runs -----------------------------------------------------------------------------------

class Churn:
    """A running tests/preload/churn, and the control folder that it and the launcher share."""

    def __init__(self, setting, *args, preload=True, **options):
        self.setting = setting
        self.report = setting.scratch / f"end-{setting.runs}.json"
        setting.runs += 1
        self.control = setting.scratch / "run" / "cushion"
        self.control.parent.mkdir(exist_ok=True)
        self.env = {"PATH": os.environ["PATH"], **setting.driver,
                    "ASAN_OPTIONS": "verify_asan_link_order=0:detect_leaks=0", "XDG_RUNTIME_DIR": str(self.control.parent)}
        options = {"CUSHION_REPORT": self.report, **options}
        env = {**self.env, **{name: str(value) for name, value in options.items() if value is not None}}
        if preload:
            env["LD_PRELOAD"] = str(setting.shim)
        self.process = subprocess.Popen([setting.program("churn"), *args], env=env, stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1)
        self.pid = self.process.pid
        check(self.read() == "ready", "the program does not start")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    def read(self):
        return self.process.stdout.readline().strip()

    def tell(self, line):
        self.process.stdin.write(line + "\n")

    def ask(self, line):
        self.tell(line)
        return self.read()

    def signal(self, number):
        """Sends it, and returns once the process has taken it. (A sanitizer runs the handler at the next library call.)"""
        self.process.send_signal(number)
        status = Path(f"/proc/{self.pid}/status")
        while int(re.search(r"ShdPnd:\s*(\w+)", status.read_text()).group(1), 16) >> (number - 1) & 1:
            time.sleep(0.001)

    def start(self, *words):
        return subprocess.Popen([self.setting.build / "cushion", *(str(word) for word in words)], env=self.env,
                                cwd=self.setting.scratch, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, text=True)

    def cushion(self, *words, poke=False):
        """The launcher with these words; `poke`: the program allocates until it has ended."""
        done = self.start(*words)
        while poke and done.poll() is None:
            check(self.ask("allocate 1 99") == "allocated 1", "the program does not allocate")
            time.sleep(0.01)
        out, err = done.communicate(timeout=TIMEOUT_S)
        return Result(done.returncode, out, err, [])

    def ctl(self, *words, poke=False, pid=None):
        result = self.cushion("ctl", pid or self.pid, *words, poke=poke)
        check(result.code == 0, f"ctl {words}: {result}")
        return result

    def fails(self, *words, pid=None, code=1):
        result = self.cushion("ctl", pid or self.pid, *words)
        check(result.code == code and result.out == "", f"ctl {words}: {result}")
        one_line(result)
        return result.err

    def report_now(self, poke=False):
        path = self.ctl("report", self.setting.scratch / "now.json", poke=poke).out.strip()
        return json.loads(Path(path).read_text())

    def helpers(self):
        """The threads of the name that Cushion gives its helper."""
        return [task for task in Path(f"/proc/{self.pid}/task").iterdir()
                if (task / "comm").read_text() == "cushion\n"]

    def level(self):
        return json.loads(self.ctl("show", "--json").out)["track"]

    def quit(self):
        check(self.ask("quit") == "failed 0", "calls failed")
        check(self.process.wait(TIMEOUT_S) == 17, f"exit code {self.process.returncode}")
        return json.loads(self.report.read_text()) if self.report.exists() else None


def blocks_of(report, size):
    """The live blocks of this size: how many, and whether they were tracked, in all groups."""
    groups = [group for group in report["live"] if group["size"] == size]
    return sum(group["count"] for group in groups), {group["oldest_age_s"] is not None for group in groups}


@case
def ctl_switches_tracking(setting):
    """Off, on and off again while 8 threads allocate: no block is lost, each says how it was allocated."""
    with Churn(setting, "8") as program:
        check(program.ask("allocate 3 700001") == "allocated 3", "")
        program.tell("go")
        time.sleep(0.1)
        program.ctl("track", "on")
        check(program.level() == "on", "not switched on")
        check(program.ask("allocate 4 700002") == "allocated 4", "")
        check(program.ask("allocate 1 700003") == "allocated 1", "")
        time.sleep(0.2)
        program.ctl("track", "off")
        check(program.ask("allocate 5 700003") == "allocated 5", "")
        for round in range(10):  # and wildly
            program.ctl("track", "on" if round % 2 == 0 else "off")
        program.ctl("mark", "after the switches")
        _, blocks, size = program.ask("pause").split()
        report = program.report_now(poke=True)
        for wanted, count, tracked in ((700001, 3, False), (700002, 4, True), (700003, 6, None)):
            ways = {True, False} if tracked is None else {tracked}  # of one size some were, some were not
            check(blocks_of(report, wanted) == (count, ways), f"{wanted}: {report['live']}")
        poked, _ = blocks_of(report, 99)
        check(report["live_complete"] and sum(group["count"] for group in report["live"]) == int(blocks) + 13 + poked,
              f"{blocks} blocks in the threads, {report['live']}")
        live = int(size) + 3 * 700001 + 4 * 700002 + 6 * 700003 + 99 * poked
        check(sum(group["count"] * group["size"] for group in report["live"]) == live, f"{live} bytes: {report['live']}")
        check(report["devices"][0]["requested"]["current"] == live, f"{live} bytes: {report['devices']}")
        check(report["tracking"] == {"level": "off", "switches": 12, "stacks_lost": 0}, f"{report['tracking']}")
        check(report["program"]["end"] == "running" and report["program"]["pid"] == program.pid, f"{report['program']}")
        check([mark["name"] for mark in report["marks"]] == ["after the switches"], f"{report['marks']}")
        end = program.quit()
        check(end["live"] == [] and end["program"]["end"] == "exit", f"{end['live']}")
        check(not list(program.control.iterdir()), "the page outlives its process")


@case
def ranks_of_mpirun(setting):
    """Four ranks of Open MPI's on one GPU: a report each, and what they use of the GPU together."""
    if shutil.which("mpirun") is None:
        raise Skip("mpirun is not installed")
    if setting.sanitized:
        raise Skip("mpirun passes no library of a sanitizer's on")
    env = {**os.environ, **{name: str(value) for name, value in setting.driver.items()}, "LD_PRELOAD": str(setting.shim),
           "CUSHION_REPORT": str(setting.scratch / "rank-%r.json"), "OMPI_ALLOW_RUN_AS_ROOT": "1",
           "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_plm": "isolated", "OMPI_MCA_rmaps_base_oversubscribe": "1"}
    done = subprocess.run(["mpirun", "-n", "4", setting.program("leak")], env=env, capture_output=True, text=True,
                          timeout=TIMEOUT_S)
    check(done.returncode == 0, f"{done}")
    paths = [setting.scratch / f"rank-{rank}.json" for rank in range(4)]
    reports = [json.loads(path.read_text()) for path in paths]
    check([report["program"]["rank"] for report in reports] == [0, 1, 2, 3], f"{[r['program'] for r in reports]}")
    text = subprocess.run([setting.build / "cushion", "report", *paths], capture_output=True, text=True, check=True).stdout
    held = sum(report["devices"][0]["held"]["peak"] for report in reports)
    gpu = re.search(rf"^  {reports[0]['devices'][0]['uuid']} +0-3 .*", text, re.MULTILINE)
    check(gpu is not None and f" {held / 2**20:.2f} MiB " in gpu[0], f"{held}: {text}")


@case
def blocks_keep_their_order(setting):
    """What one thread allocates within a tick of the clock is still told in its order."""
    for level in ("on", "stacks"):
        with Churn(setting, CUSHION_TRACK=level) as program:
            sizes = [700001 + i for i in range(20)]
            for size in sizes:
                program.ask(f"allocate 1 {size}")
            live = program.report_now(poke=True)["live"]
            ages = [next(group["oldest_age_s"] for group in live if group["size"] == size) for size in sizes]
            check(all(a > b for a, b in zip(ages, ages[1:])), f"{ages}")
            program.quit()


@case
def ctl_trims(setting):
    """What nothing uses goes back to the driver when it is asked for, and the program's blocks stay."""
    for options in ({"CUSHION_CTL": "on"}, {}, {"CUSHION_CTL": "on", "CUSHION_BACKING": "vmm"}):
        with Churn(setting, **options) as program:
            program.ask("allocate 8 64000000")
            program.ask("free")
            program.ask("allocate 1 700001")
            before = program.report_now(poke=True)["devices"][0]
            check(before["held"]["current"] > 8 * 64000000, f"{before}")
            said = program.ctl("trim", poke=True).out
            after = program.report_now(poke=True)["devices"][0]
            went = before["held"]["current"] - after["held"]["current"]
            check(went >= 7 * 64000000 and said == f"{went} bytes given back\n", f"{said} {before} {after}")
            check(after["requested"]["current"] >= before["requested"]["current"], f"{before} {after}")
            program.quit()


@case
def others_are_asked_for_memory(setting):
    """CUSHION_ASK_OTHERS: who is out of memory has a process with a helper give back what it does not use."""
    with Churn(setting, CUSHION_CTL="on") as rich, Churn(setting) as silent:
        for program in (rich, silent):
            program.ask("allocate 8 64000000")
            program.ask("free")
        held = lambda program: json.loads(program.ctl("show", "--json").out)["devices"][0]["held"]
        for asks in ("off", "on"):
            check(held(rich) >= 8 * 64000000, "given back before")
            with Churn(setting, EMU_MEMORY="256M", CUSHION_ASK_OTHERS=asks) as poor:
                poor.ask("allocate 1 200000000")
                check(poor.ask("allocate 1 200000000") == "allocated 1", "")  # fails: the devices are emulated ones apart
                check((held(rich) == 0) == (asks == "on"), f"{asks}: {held(rich)}")
                poor.process.kill()
        rich.quit()
        silent.quit()


@case
def an_idle_process_gives_memory_back(setting):
    """CUSHION_IDLE_RELEASE with CTL=on: without a call of the program."""
    with Churn(setting, CUSHION_CTL="on", CUSHION_IDLE_RELEASE="100ms") as program:
        program.ask("allocate 8 64000000")
        program.ask("free")
        deadline = time.monotonic() + TIMEOUT_S
        while (held := json.loads(program.ctl("show", "--json").out)["devices"][0]["held"]) > 0:
            check(time.monotonic() < deadline, f"{held} bytes are held")
            time.sleep(0.05)
        program.quit()


@case
def ctl_switches_stacks(setting):
    """From off to stacks, to samples and back while 8 threads allocate: no block is lost, and who has a stack has the
    right one."""
    with Churn(setting, "8") as program:
        check(program.ask("allocate 3 700001") == "allocated 3", "")
        program.tell("go")
        for level in ("stacks", "sampled:65536", "off", "on", "sampled", "stacks"):
            program.ctl("track", level)
            time.sleep(0.05)
        check(program.ask("allocate 4 700002") == "allocated 4", "")
        program.ctl("track", "off")
        check(program.ask("allocate 5 700003") == "allocated 5", "")
        program.ctl("track", "sampled:1")  # every block, in effect
        check(program.ask("allocate 2 700004") == "allocated 2", "")
        check(program.level() == "sampled:1 B", program.level())
        _, blocks, size = program.ask("pause").split()
        report = program.report_now(poke=True)
        for wanted, count, has_stack in ((700001, 3, False), (700002, 4, True), (700003, 5, False), (700004, 2, True)):
            groups = [group for group in report["live"] if group["size"] == wanted]
            check(sum(group["count"] for group in groups) == count, f"{wanted}: {groups}")
            check({"stack" in group for group in groups} == {has_stack}, f"{wanted}: {groups}")
        poked, _ = blocks_of(report, 99)
        check(report["live_complete"] and sum(group["count"] for group in report["live"]) == int(blocks) + 14 + poked,
              f"{blocks} blocks in the threads, {report['live']}")
        # What is live of each stack is what its blocks say.
        live = {}
        for group in report["live"]:
            if "stack" in group:
                live[group["stack"]] = live.get(group["stack"], 0) + group["size"] * group["count"]
        for index, stack in enumerate(report["stacks"]):
            if stack["interval"] == 0:
                check(stack["live_bytes"] == live.get(index, 0), f"stack {index}: {stack}, its blocks {live.get(index)}")
        check(any(group["size"] == 700002 and report["stacks"][group["stack"]]["interval"] == 0
                  for group in report["live"] if "stack" in group), "a stack of every block")
        check(any(group["size"] == 700004 and report["stacks"][group["stack"]]["interval"] == 1
                  for group in report["live"] if "stack" in group), "a stack of a sample")
        end = program.quit()
        check(end["live"] == [] and all(stack["live"] == 0 and stack["live_bytes"] == 0 for stack in end["stacks"]),
              f"{end['live']} {end['stacks']}")
        check(end["tracking"]["stacks_lost"] == 0, f"{end['tracking']}")


def marked_lines(source):
    """Of a source of this folder, the lines marked LEAK, by what follows the mark."""
    lines = (Path(__file__).parent / source).read_text().splitlines()
    return {mark.group(1): number for number, line in enumerate(lines, 1) if (mark := re.search(r"LEAK (\S+)", line))}


def leak_stacks(setting, report, *options):
    """The report of a leaking program, with functions and lines: by block size the stack, (function, file, line)s."""
    path, symbolized = setting.scratch / "raw.json", setting.scratch / "symbolized.json"
    path.write_text(json.dumps(report))
    symbolized.unlink(missing_ok=True)
    done = setting.run([setting.build / "cushion", "report", path, "--symbolize", symbolized, *options], driver=False)
    check(done.code == 0 and done.err == "", f"{done}")
    report = json.loads(symbolized.read_text())
    frames = [(re.sub(r"\((?!anonymous).*", "", frame.get("function", "")), Path(frame.get("file", "")).name, frame.get("line", 0))
              for frame in report["frames"]]
    return {group["size"]: [frames[f] for f in report["stacks"][group["stack"]]["frames"]]
            for group in report["live"] if "stack" in group}


def check_named(stack, *places):
    """The stack begins with these places: (part of the function's name, file, line)."""
    check(len(stack) >= len(places), f"{stack}")
    for place, wanted in zip(stack, places):
        check(wanted[0] in place[0] and place[1:len(wanted)] == wanted[1:], f"{wanted} is not {place} of {stack}")


@case
def stacks_name_a_leak(setting):
    line = marked_lines("leak.cpp")
    run = setting.compare([setting.program("leak")], CUSHION_TRACK="stacks")
    report = run.reports[0]
    stacks = leak_stacks(setting, report)
    check(set(stacks) == {65537, 65538}, f"{stacks}")
    check_named(stacks[65537], *((name, "leak.cpp", line[name]) for name in ("planted_leak", "through_inlined")))
    check(stacks[65537][2][0] == "main", f"{stacks[65537]}")
    check_named(stacks[65538], ("thread_leak", "leak.cpp", line["thread_leak"]))
    temporary = [stack for stack in report["stacks"] if stack["allocations"] == 10]
    check(len(temporary) == 1 and temporary[0]["temporary"] == 10 and temporary[0]["live"] == 0, f"{temporary}")
    check(sum(b["count"] for b in report["size_histogram"]) == 12, f"{report['size_histogram']}")
    check(sum(b["count"] for b in report["lifetime_histogram"]) == 10, f"{report['lifetime_histogram']}")
    check(len(report["timeline"]) >= 1, f"{report.get('timeline')}")
    # A person who has the text alone sees where, too.
    text = setting.cushioned([setting.program("leak")], CUSHION_TRACK="stacks", CUSHION_REPORT=None).err
    check(re.search(r"1 x +64.00 KiB .*\n +\S*/leak\+0x", text), text)
    # A sample of everything says the same.
    sampled = setting.cushioned([setting.program("leak")], CUSHION_TRACK="sampled:1").reports[0]
    check(leak_stacks(setting, sampled)[65537] == stacks[65537], "of a sample")
    shallow = setting.cushioned([setting.program("leak")], CUSHION_TRACK="stacks", CUSHION_STACK_DEPTH="1").reports[0]
    check({len(stack["frames"]) for stack in shallow["stacks"]} == {1}, f"{shallow['stacks']}")


@case
def stacks_of_a_stripped_program(setting):
    """Its debug information is beside it in a file of its own, found by build id or by link."""
    program, line = setting.scratch / "leak", marked_lines("leak.cpp")
    debug = setting.scratch / "debug"
    debug.mkdir()
    shutil.copy(setting.program("leak"), program)
    subprocess.run(["objcopy", "--only-keep-debug", program, debug / "leak.debug"], check=True)
    subprocess.run(["strip", program], check=True)
    subprocess.run(["objcopy", f"--add-gnu-debuglink={debug / 'leak.debug'}", program], check=True, cwd=debug)
    report = setting.cushioned([program], CUSHION_TRACK="stacks").reports[0]
    stacks = leak_stacks(setting, report, "--debug-dir", debug)
    check_named(stacks[65537], *((name, "leak.cpp", line[name]) for name in ("planted_leak", "through_inlined")))


@case
def stacks_of_a_library(setting):
    line, library = marked_lines("leak_library.cpp"), setting.programs / "libleak_library.so"
    report = setting.compare([setting.program("leak"), library], CUSHION_TRACK="stacks").reports[0]
    stack = leak_stacks(setting, report)[65539]
    check_named(stack, *((name, "leak_library.cpp", line[name]) for name in ("hidden_function", "library_leak")))
    check(stack[2][0] == "main", f"{stack}")


@case
def stacks_of_python(setting):
    """Python's functions and lines, whether or not the call keeps the interpreter's lock; nothing else changes."""
    if setting.sanitized:
        raise Skip("the interpreter is not sanitized")
    script, line = Path(__file__).parent / "leak.py", marked_lines("leak.py")
    for lock in ("gil", "free"):
        report = setting.compare([sys.executable, script, lock], CUSHION_TRACK="stacks").reports[0]
        stacks = leak_stacks(setting, report)
        deepest = {size: [frame for frame in stack if frame[1].endswith(".py") or frame[1] == "<string>"]
                   for size, stack in stacks.items()}
        allocate = ("allocate", "leak.py", line["allocate"])
        check_named(deepest[65537], allocate, ("", "leak.py", line["Model.__init__"]))
        check_named(deepest[65538], allocate, ("größe", "leak.py", line["Model.größe"]), ("<module>", "leak.py", line["<module>"]))
        check_named(deepest[65539], allocate, ("made", "<string>", 3), ("<module>", "<string>", 4), ("in_thread", "leak.py"))
        check(deepest[65537][-1][0] == "<module>", f"{deepest[65537]}")
        check(not any("PyEval" in frame[0] for stack in stacks.values() for frame in stack), f"{stacks}")
        plain = setting.cushioned([sys.executable, script, lock], CUSHION_TRACK="stacks", CUSHION_PYTHON="off").reports[0]
        check(not any("line" in frame for frame in plain["frames"]), "CUSHION_PYTHON=off")


@case
def report_name_has_rank_and_time(setting):
    pattern = setting.scratch / "out" / "%r" / "%e-%t.json"
    for rank, variables in (("3", {"OMPI_COMM_WORLD_RANK": "3"}), ("0", {}), ("7", {"SLURM_PROCID": "1", "RANK": "7", "TORCHELASTIC_RUN_ID": "x"})):
        run = setting.cushioned([setting.program("leak")], CUSHION_REPORT=pattern, **variables)
        check(run.code == 0 and run.err == "", f"{run}")
        found = list((setting.scratch / "out" / rank).iterdir())
        check(len(found) == 1 and re.fullmatch(r"leak-\d{8}T\d{6}Z\.json", found[0].name), f"{found}")
        report = json.loads(found[0].read_text())
        check(report["program"].get("rank") == (int(rank) if variables else None), f"{report['program']}")


@case
def leak_exit_code(setting):
    """A program that ends well and leaks exits with the code; one that fails keeps its own; suppressed blocks are no leak."""
    code = {"CUSHION_LEAK_EXIT_CODE": "23", "CUSHION_TRACK": "stacks"}
    leak, library = setting.program("leak"), setting.programs / "libleak_library.so"
    run = setting.cushioned([leak], **code)
    check(run.code == 23 and run.err == "" and len(run.reports) == 1, f"{run}")
    check(setting.cushioned([leak, "/nowhere"], **code).code == 2, "a program's own code")
    check(setting.cushioned([leak], CUSHION_LEAK_EXIT_CODE="23").code == 23, "without tracking")
    check(setting.cushioned([setting.program("route_dlsym")], **code).code == setting.native([setting.program("route_dlsym")]).code,
          "a program that frees everything")
    patterns = setting.scratch / "patterns"
    patterns.write_text("# known\n\n  libleak_library.so   # keeps its block\n")
    run = setting.cushioned([leak, library], CUSHION_SUPPRESSIONS=patterns, **code)
    check(run.code == 0 and [group.get("suppressed") for group in run.reports[0]["live"]] == ["libleak_library.so"], f"{run}")
    check(setting.cushioned([leak], CUSHION_SUPPRESSIONS=patterns, **code).code == 23, "another's leak")
    run = setting.cushioned([leak, library], CUSHION_SUPPRESSIONS=patterns, CUSHION_REPORT=None, **code)
    check("1 blocks suppressed" in run.err and "nothing else" in run.err, run.err)
    patterns.write_text("library_leak\n")  # by function: the library exports it
    check(setting.cushioned([leak, library], CUSHION_SUPPRESSIONS=patterns, **code).code == 0, "by function")
    run = setting.cushioned([leak, library], CUSHION_SUPPRESSIONS=setting.scratch / "none there", **code)
    check(run.code == 23, f"{run}")
    one_line(run, "CUSHION_SUPPRESSIONS", "none there", "No such file")
    os.mkfifo(setting.scratch / "pipe")
    for endless in ("/dev/zero", setting.scratch / "pipe", setting.scratch):
        run = setting.cushioned([leak, library], CUSHION_SUPPRESSIONS=endless, **code)
        check(run.code == 23, f"{run}")
        one_line(run, "CUSHION_SUPPRESSIONS", str(endless), "no regular file")
    one_line(setting.cushioned([leak], CUSHION_LEAK_EXIT_CODE="256"), "CUSHION_LEAK_EXIT_CODE=256", "0 to 255")


@case
def out_of_memory_is_explained(setting):
    leak = setting.program("leak")
    native = setting.native([leak, "--all"])
    report = setting.scratch / "end.json"
    run = setting.cushioned([leak, "--all"], CUSHION_TRACK="stacks", CUSHION_REPORT=report)
    same(native, run)
    lines = run.err.splitlines()
    check("is out of device memory: 64.00 MiB asked for by cuMemAlloc" in lines[0], run.err)
    check(sum("out of device memory" in line for line in lines) == 1, "said once")
    check(any("device 0  live" in line and "largest hole" in line for line in lines), run.err)
    check(any(line.startswith("  live ") and "blocks from" in line for line in lines), run.err)
    check(any("leak+0x" in line for line in lines), run.err)
    moment = json.loads((setting.scratch / "end.oom.json").read_text())
    check(moment["program"]["end"] == "running" and {group["size"] for group in moment["live"]} == {64 << 20}
          and sum(group["count"] for group in moment["live"]) > 50, f"{moment['live']}")
    check(json.loads(report.read_text())["live"] == [], "freed at the end")
    run = setting.cushioned([leak, "--all"], CUSHION_TRACK="on", CUSHION_REPORT=None)
    check("CUSHION_TRACK=stacks" in run.err, run.err)
    run = setting.cushioned([leak, "--all"])
    check(run.err == "", f"untracked: {run.err}")


def read_metrics(path):
    """Prometheus text as {name: {labels: value}}, each line held to the format."""
    samples, types = {}, {}
    for line in path.read_text().splitlines():
        if line.startswith("#"):
            kind, name, text = re.fullmatch(r"# (HELP|TYPE) ([a-z_]+) (.+)", line).groups()
            check(name not in samples, f"{name} is described after its samples")
            if kind == "TYPE":
                check(name not in types and text in ("gauge", "counter"), line)
                types[name] = text
            continue
        name, labels, value = re.fullmatch(r'([a-z_]+)\{((?:[a-z_]+="(?:[^"\\]|\\["\\n])*",?)*)\} (\d+)', line).groups()
        check(name in types and (types[name] == "counter") == name.endswith("_total"), line)
        check(labels not in samples.setdefault(name, {}), f"twice: {line}")
        samples[name][labels] = int(value)
    return samples


@case
def metrics_file(setting):
    path = setting.scratch / "metrics" / "%e.prom"
    written = setting.scratch / "metrics" / "churn.prom"
    with Churn(setting, CUSHION_METRICS=path, CUSHION_CTL="on", PMI_RANK="2") as program:
        check(program.ask("allocate 3 5000000") == "allocated 3", "")
        deadline = time.monotonic() + 20  # every 5 s
        while True:
            metrics = read_metrics(written)
            live = [value for labels, value in metrics.get("cushion_device_bytes", {}).items() if 'kind="requested"' in labels]
            if live == [15000000]:
                break
            check(time.monotonic() < deadline, f"never up to date: {metrics}")
            time.sleep(0.1)
        labels = f'pid="{program.pid}",program="churn",rank="2"'
        check(metrics["cushion_up"] == {labels: 1}, f"{metrics['cushion_up']}")
        served = f'{labels},function="cuMemAlloc",served_by="cushion"'
        check(metrics["cushion_allocations_total"][served] == 3, f"{metrics['cushion_allocations_total']}")
        program.quit()
        check(read_metrics(written)["cushion_up"] == {labels: 0}, "the end is not said")
        check([file.name for file in written.parent.iterdir()] == ["churn.prom"], "left over")
    run = setting.cushioned([setting.program("leak")], CUSHION_METRICS="/proc/nothing/x.prom")
    check(run.code == 0, f"{run}")
    one_line(run, "CUSHION_METRICS", "/proc/nothing/x.prom")


def told(run):
    """The texts of misuse on stderr, each as its lines."""
    texts = []
    for line in run.err.splitlines():
        if line.startswith("cushion: "):
            texts.append([])
        check(bool(texts), f"said something else: {run.err}")
        texts[-1].append(line)
    return texts


@case
def wrong_frees_are_told(setting):
    """With their stacks, where the program is tracked; the codes stay."""
    misuse = [setting.program("misuse"), "frees"]
    native = setting.native(misuse)
    run = setting.cushioned(misuse, CUSHION_TRACK="stacks")
    same(native, run)
    texts = told(run)
    check(len(texts) == 6, run.err)
    for text, what in zip(texts, ("512 bytes into a block of 5000 bytes at 0x", "100 bytes into a block of 5000 bytes at 0x",
                                  "1024 bytes into a block of 5000 bytes at 0x", "freed already, a block of 70000 bytes",
                                  "freed already, a block of 70000 bytes", "no block begins there")):
        check(what in text[0], run.err)
        parts = [line.strip() for line in text if not line.startswith("    ")][1:]
        check("misuse+0x" in text[2] and parts[0] == "called from", run.err)
        stacks = ["the block was allocated from"] if "into" in what else []
        stacks = ["the block was allocated from", "and first freed from"] if "freed already," in what else stacks
        check(parts[1:] == stacks, f"{parts}: {run.err}")
    check([" of 0x" in text[0] and text[0].split()[1] for text in texts] ==
          ["cuMemFree", "cuMemFree", "cuMemFreeAsync", "cuMemFree", "cuMemFreeAsync", "cuMemFree"], run.err)
    check(run.reports[0]["calls"]["wrong_frees"] == 6, "counted")
    run = setting.cushioned(misuse, CUSHION_TRACK="on")
    same(native, run)
    check(len(told(run)) == 6 and "allocated from" not in run.err and "misuse+0x" in run.err, run.err)
    run = setting.cushioned(misuse)
    same(native, run)
    check(run.err == "" and run.reports[0]["calls"]["wrong_frees"] == 6, "not told without tracking")
    run = setting.cushioned([setting.program("misuse"), "many"], CUSHION_TRACK="on")
    texts = told(run)
    check(len(texts) == 21 and "no more are" in texts[20][0] and run.out.endswith("refused 29\n"), run.err)
    for allocator in ("pool", "arena", "binning"):
        setting.compare([setting.program("misuse"), "none"], CUSHION_TRACK="stacks", CUSHION_ALLOCATOR=allocator)


@case
def overwritten_guards_are_told(setting):
    misuse = setting.program("misuse")
    native = setting.native([misuse, "guard"])
    words = ("behind a block of 5000 bytes at 0x", ": 3 of 64 guard bytes, the first 8 bytes behind its end",
             "behind a block of 6000 bytes at 0x", ": 1 of 64 guard bytes, the first 0 bytes behind its end")
    for free in ("sync", "deferred", "auto"):
        for allocator in ("pool", "arena", "binning"):
            options = {"CUSHION_GUARD": "64", "CUSHION_FREE": free, "CUSHION_ALLOCATOR": allocator}
            run = setting.cushioned([misuse, "guard"], CUSHION_TRACK="stacks", **options)
            same(native, run)
            texts = sorted(told(run), key=lambda text: "6000 bytes" in text[0])
            check(len(texts) == 2, f"{options}: {run.err}")
            for text, expected in zip(texts, (words[:2], words[2:])):
                check(all(word in text[0] for word in expected), f"{options}: {run.err}")
                parts = [line.strip() for line in text if not line.startswith("    ")][1:]
                check(parts == ["the block was allocated from", "and freed from"], f"{options}: {run.err}")
                check(sum("misuse+0x" in line for line in text) >= 2, run.err)
            calls = run.reports[0]["calls"]
            check((calls["guards_overwritten"], calls["guards_skipped"]) == (2, 0), f"{calls}")
            check(run.reports[0]["live"] == [], "freed")
            right = setting.compare([misuse, "none"], **options)
            check(right.reports[0]["calls"]["guards_skipped"] == 0, f"{options}: {right.reports[0]['calls']}")
    untracked = setting.cushioned([misuse, "guard"], CUSHION_GUARD="64")
    same(native, untracked)
    check(len(told(untracked)) == 2 and "the block was freed from" in untracked.err, untracked.err)
    check(setting.cushioned([misuse, "guard"]).err == "", "off")
    frees = setting.cushioned([misuse, "frees"], CUSHION_GUARD="1")
    check(len(told(frees)) == 6, frees.err)
    for value in ("2MiB", "50%"):
        one_line(setting.cushioned([misuse, "none"], CUSHION_GUARD=value), f"CUSHION_GUARD={value}", "0 to 1MiB")


@case
def writes_after_free_are_told(setting):
    misuse = setting.program("misuse")
    native = setting.native([misuse, "late"])
    for free in ("sync", "deferred", "auto"):
        for allocator in ("pool", "arena", "binning"):
            options = {"CUSHION_QUARANTINE": "1MiB", "CUSHION_FREE": free, "CUSHION_ALLOCATOR": allocator}
            run = setting.cushioned([misuse, "late"], CUSHION_TRACK="stacks", **options)
            same(native, run)
            texts = told(run)
            check(len(texts) == 3, f"{options}: {run.err}")
            check("a block of 5000 bytes at 0x" in texts[0][0] and ": 3 bytes, the first at offset 40" in texts[0][0], run.err)
            check("a block of 6000 bytes at 0x" in texts[1][0] and ": 1 bytes, the first at offset 0" in texts[1][0], run.err)
            for text in texts[:2]:
                parts = [line.strip() for line in text if not line.startswith("    ")]
                check(parts[1:] == ["the block was allocated from", "and freed from"], f"{options}: {run.err}")
                check(sum("misuse+0x" in line for line in text) >= 2, run.err)
            check("freed already, a block of " in texts[2][0], run.err)
            calls = run.reports[0]["calls"]
            check(calls["quarantine_overwritten"] == 2, f"{calls}")
            check(run.reports[0]["live"] == [], "freed")
            both = {"CUSHION_GUARD": "32", **options}
            setting.compare([misuse, "none"], **options)
            setting.compare([misuse, "none"], **both)
    untracked = setting.cushioned([misuse, "late"], CUSHION_QUARANTINE="1MiB")
    same(native, untracked)
    check(len(told(untracked)) == 3 and "the block was freed from" in untracked.err, untracked.err)
    check("first freed from" in untracked.err, untracked.err)
    check(setting.cushioned([misuse, "late"]).err == "", "off")
    all_of_it = setting.compare([setting.program("leak"), "--all"], CUSHION_QUARANTINE="50%", EMU_MEMORY="512M")  # memory is short at last
    check(all_of_it.reports[0]["calls"]["quarantine_overwritten"] == 0, "nothing is wrong there")


@case
def answers_that_nobody_takes(setting):
    """A full disk behind stdout is an error; a stopped process is no process without a helper."""
    with Churn(setting, CUSHION_CTL="on") as program:
        program.ask("allocate 1 5000000")
        for words in (("ctl", program.pid, "show"), ("ctl", program.pid, "show", "--json"), ("top", "--once"),
                      ("top", "--once", "--json"), ("options",)):
            with open("/dev/full", "w") as full:
                done = subprocess.run([setting.build / "cushion", *(str(word) for word in words)], env=program.env,
                                      stdout=full, stderr=subprocess.PIPE, text=True)
            check(done.returncode == 1 and "No space left" in done.stderr, f"{words}: {done}")
        program.process.send_signal(signal.SIGSTOP)
        check("did not answer in 5 s, though CUSHION_CTL=on" in program.fails("mark", "x"), "a stopped process")
        program.process.send_signal(signal.SIGCONT)
        program.quit()
    for pid in ("0", "-3", "abc"):
        result = program.cushion("ctl", pid, "show")
        check(result.code == 2 and len(result.err) < 200 and "pid" in result.err, f"{result}")


@case
def ctl_helper_thread(setting):
    """CUSHION_CTL=on: a program that does nothing is answered at once; without it ctl gives up, and nothing happens."""
    with Churn(setting, CUSHION_CTL="on", CUSHION_TRACK_SIGNAL="USR2") as program:
        check(program.helpers() == [], "a thread before the first allocation")
        check(program.ask("allocate 1 5000000") == "allocated 1", "")
        helper = program.helpers()
        check(len(helper) == 1, f"{helper}")
        blocked = int(re.search(r"SigBlk:\s*(\w+)", (helper[0] / "status").read_text()).group(1), 16)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD):
            check(blocked >> (number - 1) & 1, f"the helper takes {number}")
        program.ctl("track", "on")  # it gives up after 5 s
        check(program.level() == "on", "not switched on")
        report = program.report_now()
        check(report["tracking"] == {"level": "on", "switches": 1, "stacks_lost": 0}, f"{report['tracking']}")
        check(program.ask("fork") == "child 0" and program.level() == "on", "the child reached its parent's page")
        program.quit()
    with Churn(setting) as program:
        threads = len(os.listdir(f"/proc/{program.pid}/task"))
        program.ask("allocate 1 5000000")
        check(program.helpers() == [], "a helper without CUSHION_CTL")
        check(setting.sanitized or len(os.listdir(f"/proc/{program.pid}/task")) == threads, "a thread without CUSHION_CTL")
        started = time.monotonic()
        result = program.cushion("ctl", program.pid, "track", "on")
        check(time.monotonic() - started > 4, "5 s expected")
        check(result.code == 1 and "waiting for the next allocation call" in result.err.splitlines()[0]
              and "made no allocation call in 5 s: nothing was done" in result.err.splitlines()[1], f"{result}")
        program.ask("allocate 1 100")
        check(program.level() == "off", "a request that was given up took effect")
        program.ctl("track", "on", poke=True)
        check(program.level() == "on", "not switched on")
        program.quit()


@case
def ctl_errors(setting):
    with Churn(setting) as program, Churn(setting, preload=False) as plain:
        check("has no control page" in program.fails("show"), "before the first allocation")
        check(not program.control.exists(), "a page before the first allocation")
        program.ask("allocate 1 100")
        check([path.stat().st_mode & 0o7777 for path in (program.control, *program.control.iterdir())]
              == [0o700, 0o600], "modes of the page and its folder")
        plain.ask("allocate 1 100")
        check("has no control page" in program.fails("track", "on", pid=plain.pid), "without Cushion")
        gone = subprocess.Popen(["true"])
        gone.wait()
        check("there is no process" in program.fails("track", "on", pid=gone.pid), "a dead process")
        check("use off, on" in program.fails("track", "loud", code=2), "a bad level")
        check(program.level() == "off", "a bad level changed it")
        for words in (["ctl"], ["ctl", program.pid], ["ctl", "-3", "show"], ["ctl", "x", "show"], ["top", "--sort", "x"]):
            check(program.cushion(*words).code == 2, f"{words}")
        for path, why in ((setting.scratch, "Is a directory"), (setting.scratch / "kept" / "x" / "r.json", "Not a directory"),
                          (program.report, "the exit report of a running process")):
            (setting.scratch / "kept").touch()
            failed = program.cushion("ctl", program.pid, "report", path, poke=True)
            line = failed.err.splitlines()[-1]  # a slow machine is told to wait before
            check(failed.code == 1 and why in line and str(path) in line, f"{path}: {failed}")
        if os.geteuid() == 0:
            other = subprocess.Popen(["sleep", "30"], user=65534)
            check("another user's" in program.fails("show", pid=other.pid), "another user's process")
            other.kill()
            other.wait()
        # The pid goes on as another program, which is not the process that had the page.
        program.tell(f"exec {shutil.which('sleep')}")
        while (Path(f"/proc/{program.pid}/comm")).read_text() != "sleep\n":
            time.sleep(0.01)
        check("was another program" in program.fails("track", "on"), "after exec")
        check(program.cushion("top", "--once", "--json").out == "", "top shows what is gone")
        check(not list(program.control.iterdir()), "the stale page stays")
        plain.quit()


@case
def ctl_forged_page(setting):
    """A page that is not what its process made is refused, and the process goes on."""
    with Churn(setting) as program:
        program.ask("allocate 1 100")
        page, = program.control.iterdir()
        good = page.read_bytes()
        kept = setting.scratch / "kept"
        page.rename(kept)
        for forged, words in ((b"", "truncated"), (good[:100], "truncated"), (good[:-1], "truncated"),
                              (b"x" * len(good), "no control page"), (good[:8] + b"\xff" + good[9:], "another version"),
                              (good[:16] + b"\x01\0\0\0" + good[20:], "another process's")):
            page.write_bytes(forged)
            page.chmod(0o600)
            check(words in program.fails("track", "on") and "cannot be trusted" in program.fails("show"), words)
        page.unlink()
        page.symlink_to(kept)
        check("symbolic link" in program.fails("track", "on"), "a link")
        page.unlink()
        kept.rename(page)
        # Whatever a page says, its reader stays within it.
        with page.open("r+b") as file:
            file.seek(good.index(b"\0" * 4096))
            file.write(b"\xff" * 4096)
        program.ctl("show")
        program.cushion("top", "--once")
        check(program.ask("allocate 1 100") == "allocated 1", "the process does not go on")


@case
def ctl_after_kill(setting):
    with Churn(setting) as program:
        program.ask("allocate 1 100")
        program.process.kill()
        program.process.wait()
        check(len(list(program.control.iterdir())) == 1, "no page is left to be recognised")
        check("there is no process" in program.fails("show"), "a dead process")
        program.cushion("top", "--once")
        check(not list(program.control.iterdir()), "the stale page stays")


@case
def track_signal(setting):
    with Churn(setting, CUSHION_TRACK_SIGNAL="USR2") as program:
        program.ask("allocate 1 5001")
        for size, tracked in ((5002, True), (5003, False), (5004, True)):
            program.signal(signal.SIGUSR2)
            program.ask(f"allocate 1 {size}")
            report = program.report_now(poke=True)
            check(blocks_of(report, size) == (1, {tracked}), f"{size}: {report['live']}")
        check(program.ask("fork") == "child 0", "the child")
        check(program.level() == "on", "a child's signal switched its parent")
        check(program.quit()["tracking"] == {"level": "on", "switches": 3, "stacks_lost": 0}, "switches")
    with Churn(setting, "0", "handle", CUSHION_TRACK_SIGNAL="SIGUSR2") as program:
        program.ask("allocate 1 5001")
        program.signal(signal.SIGUSR2)
        program.ask("allocate 1 5001")
        check(program.level() == "off", "the program's handler is gone")
        check(program.quit()["tracking"]["switches"] == 0, "switches")
        check("the program handles this signal itself" in program.process.stderr.read(), "no line on stderr")


@case
def track_after(setting):
    with Churn(setting, CUSHION_TRACK_AFTER="10calls") as program:
        program.ask("allocate 10 5001")
        program.ask("allocate 10 5002")
        report = program.quit()
        check(report["tracking"] == {"level": "on", "switches": 1, "stacks_lost": 0}, f"{report['tracking']}")
    with Churn(setting, CUSHION_TRACK_AFTER="10calls", CUSHION_TRACK="on") as program:
        program.ask("allocate 10 5001")
        program.ask("allocate 7 5002")
        report = program.report_now(poke=True)
        check(blocks_of(report, 5001) == (10, {False}) and blocks_of(report, 5002) == (7, {True}), f"{report['live']}")
    before = time.monotonic()
    with Churn(setting, CUSHION_TRACK_AFTER="1s") as program:
        started = time.monotonic()
        program.ask("allocate 1 5001")
        too_early = time.monotonic() - before < 1  # on a busy machine it may not be
        time.sleep(max(0, 1.1 - (time.monotonic() - started)))
        program.ask("allocate 1 5002")
        report = program.report_now(poke=True)
        check(not too_early or blocks_of(report, 5001) == (1, {False}), f"{report['live']}")
        check(blocks_of(report, 5002) == (1, {True}), f"{report['live']}")
    with Churn(setting, CUSHION_TRACK_AFTER="1h") as program:
        program.ask("allocate 1 5001")
        check(program.level() == "off", "too early")
        program.ctl("track", "off", poke=True)
        check(program.quit()["tracking"] == {"level": "off", "switches": 0, "stacks_lost": 0}, "")


@case
def c_api(setting):
    with Churn(setting, preload=False) as program:
        check([program.ask(line) for line in ("track on", "mark x", f"report {setting.scratch}/r.json", "null")]
              == ["1", "1", "1", "1 1"], "not harmless without Cushion")
        program.quit()
    with Churn(setting, CUSHION_TRACK="off") as program:
        check(program.ask(f"report {setting.scratch}/r.json") == "2", "a report of nothing")
        check([program.ask(line) for line in ("track loud", "null", "track on", "mark first")] == ["3", "3 3", "0", "0"],
              "before the first allocation")
        program.ask("allocate 2 6000000")
        check([program.ask("mark " + "y" * 100), program.ask(f"report {setting.scratch}/r/r.json"),
               program.ask(f"report {setting.scratch}/r.txt"), program.ask("report /dev/null"),
               program.ask(f"report {setting.scratch}")] == ["0", "0", "0", "0", "5"], "answers")
        report = json.loads((setting.scratch / "r" / "r.json").read_text())
        check(blocks_of(report, 6000000) == (2, {True}), f"{report['live']}")
        check([(mark["name"], mark["live"]) for mark in report["marks"]] == [("first", 0), ("y" * 63, 12000000)],
              f"{report['marks']}")
        text = (setting.scratch / "r.txt").read_text()
        check(re.search(r"\(pid \d+\) running after .*\n  mark .* live  first\n", text), text)
        program.ask("track off")
        program.ask("allocate 1 6000001")
        program.ask(f"report {setting.scratch}/r.txt")
        text = (setting.scratch / "r.txt").read_text()
        check(re.search(r"1 x .*allocated while tracking was off\n", text), text)
        check([program.ask("mark z") for _ in range(255)][-2:] == ["0", "4"], "256 marks are kept")
        check(len(program.quit()["marks"]) == 256, "marks")
    with Churn(setting, CUSHION_DISABLE="1") as program:
        program.ask("allocate 1 5000")
        check([program.ask(line) for line in ("track on", "mark x", "report /dev/null")] == ["2", "2", "2"], "inert")
        program.quit()


@case
def c_header(setting):
    """The header is C, and C++."""
    compiler = shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise Skip("no C compiler")
    source = Path(__file__).resolve().parents[2]
    file = setting.scratch / "program.c"
    file.write_text('#include "include/cushion.h"\nint main(void) { return cushion_set_track("on") + cushion_mark("x") + '
                    'cushion_report(0) - 3; }\n')
    for standard in ("c99", "c11", "c++11"):
        language = "c++" if "+" in standard else "c"
        subprocess.run([compiler, f"-x{language}", f"-std={standard}", "-Wall", "-Wextra", "-Werror", "-pedantic", "-I",
                        source, "-xc", file, "-o", setting.scratch / "program", "-ldl"] if language == "c" else
                       [compiler, "-xc++", f"-std={standard}", "-Wall", "-Wextra", "-Werror", "-Wold-style-cast", "-pedantic",
                        "-I", source, "-fsyntax-only", file], check=True)
    check(subprocess.run([setting.scratch / "program"]).returncode == 0, "not harmless without Cushion")


@case
def top(setting):
    with Churn(setting, "2") as busy, Churn(setting, CUSHION_CTL="on") as idle:
        for program, count in ((busy, 1), (idle, 3)):
            program.ask(f"allocate {count} 8000000")
        busy.tell("go")
        result = busy.cushion("top", "--once", "--json")
        check(result.code == 0 and result.err == "", f"{result}")
        seen = {entry["pid"]: entry for entry in map(json.loads, result.out.splitlines())}
        check(set(seen) == {busy.pid, idle.pid}, f"{result.out}")
        check(seen[idle.pid]["devices"] == [{"device": 0, "live": 24000000, "held": seen[idle.pid]["devices"][0]["held"],
                                             "peak": 24000000}], f"{seen[idle.pid]}")
        check(seen[idle.pid]["devices"][0]["held"] >= 24000000, f"{seen[idle.pid]}")
        check(seen[idle.pid]["calls"] == 3 and seen[idle.pid]["calls_per_s"] == 0, f"{seen[idle.pid]}")
        check(seen[busy.pid]["calls_per_s"] > 0 and seen[busy.pid]["program"] == "churn", f"{seen[busy.pid]}")
        text = busy.cushion("top", "--once", "--sort", "live").out.splitlines()
        check(len(text) == 3 and text[0].split()[:3] == ["PID", "PROGRAM", "DEV"]
              and text[1].split()[0] == str(idle.pid) and "22.89 MiB" in text[1], f"{text}")
        text = busy.cushion("top", "--once", "--sort", "calls").out.splitlines()
        check(text[1].split()[0] == str(busy.pid), f"{text}")
        terminal, end = pty.openpty()
        live = subprocess.Popen([setting.build / "cushion", "top", "--interval", "30"], env=busy.env, stdin=end,
                                stdout=end, stderr=end)
        os.close(end)
        seen = b""
        for key, shown in ((b"", b"sorted by live"), (b"c", b"sorted by calls"), (b"q", None)):
            os.write(terminal, key)
            while shown is not None and not (shown in seen and seen.endswith(b"\n") and str(busy.pid).encode() in seen):
                seen += os.read(terminal, 65536)
            seen = b""
        check(live.wait(TIMEOUT_S) == 0, "q does not end it")
        os.close(terminal)
        busy.ask("pause")
        busy.quit()
        idle.quit()
        text = busy.cushion("top", "--once").out
        check("no process of yours" in text, text)


@case
def preload_list_kept(setting):
    """A child sees the LD_PRELOAD that its parent was given: nothing is taken out, nothing added."""
    libraries = (setting.program("libinterposer.so"), setting.shim)
    result = setting.run([setting.program("process"), "show_preload"], preload=libraries)
    expected = ":".join(str(library) for library in libraries)
    check((result.code, result.out, result.err) == (15, f"LD_PRELOAD={expected}\n", ""), f"{result}")


# --- other tools' preloads ------------------------------------------------------------------------------

def library_of(*candidates):
    """The first of these files, or names known to the loader or the compiler, that exists."""
    for candidate in candidates:
        if Path(candidate).is_absolute():
            found = candidate
        elif candidate.startswith("libasan"):
            found = subprocess.run(["c++", f"-print-file-name={candidate}"], capture_output=True, text=True).stdout.strip()
        else:
            known = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True).stdout
            match = re.search(rf"\b{re.escape(candidate)} .*=> (\S+)", known)
            found = match.group(1) if match else ""
        if found and Path(found).is_absolute() and Path(found).exists():
            return Path(found).resolve()
    return None


TOOLS = {
    "jemalloc": ("libjemalloc.so.2",),
    "tcmalloc": ("libtcmalloc_minimal.so.4",),
    "heaptrack": ("/usr/lib/heaptrack/libheaptrack_preload.so",
                  f"/usr/lib/{os.uname().machine}-linux-gnu/heaptrack/libheaptrack_preload.so"),
    "asan_runtime": ("libasan.so",),
}


def beside(tool):
    def run(setting):
        release_only(setting)
        library = library_of(*TOOLS[tool])
        if library is None:
            raise Skip(f"{TOOLS[tool][0]} is not installed")
        behind = () if tool == "asan_runtime" else ((),)  # AddressSanitizer's runtime wants to be the first
        options = {"DUMP_HEAPTRACK_OUTPUT": setting.scratch / "heaptrack"} if tool == "heaptrack" else {}
        for program, *words in (("route_dlsym",), ("route_linked",), ("process", "threads"), ("process", "fork_after"),
                                ("lifetime",)):
            command = [setting.program(program), *words]
            native = setting.run(command, preload=[library], CUSHION_REPORT=None, **options)
            for before, after in (((library,), ()), *(((), (library,)) for _ in behind)):
                cushion = setting.cushioned(command, before=before, after=after, **options)
                same(native, cushion)
                check("ld.so" not in cushion.err, f"the loader would not preload: {cushion.err}")
                check(len(cushion.reports) == 1, f"{len(cushion.reports)} reports of {command}: {cushion.err}")
                check(cushion.reports[0]["calls"]["served"] > 0, f"{command}: {cushion.reports[0]['calls']}")

        check(tool != "heaptrack" or list(setting.scratch.glob("heaptrack*")), "heaptrack recorded nothing")

    CASES[f"beside_{tool}"] = run


for _tool in TOOLS:
    beside(_tool)


# --- programs that a preload does not reach -------------------------------------------------------------

@case
def static_executable(setting):
    """A program without a dynamic loader runs as it does natively, and there is no report."""
    program = setting.build / "tests" / "tools" / "fixtures" / "static"
    check(program.exists(), f"{program} is not built")
    native = setting.run([program])
    cushion = setting.cushioned([program], CUSHION_TRACK="on")
    same(native, cushion)
    check((cushion.err, cushion.reports) == (native.err, []), f"{cushion}")


@case
def setuid_program(setting):
    """The loader takes nobody's preload into a program that runs with another user's rights."""
    release_only(setting)
    if os.geteuid() != 0:
        raise Skip("only root can make a setuid program")
    setting.scratch.chmod(0o755)
    program = setting.scratch / "process"
    shutil.copy(setting.program("process"), program)
    for mode, seen in ((0o755, "mapped\n"), (0o4755, "not mapped\n")):
        program.chmod(mode)
        shim = setting.scratch / "libcushion.so"
        shutil.copy(setting.shim, shim)
        done = subprocess.run([program, "show_mapped"], env={"LD_PRELOAD": str(shim)}, user=65534, group=65534,
                              extra_groups=[], capture_output=True, text=True, timeout=TIMEOUT_S, cwd="/")
        if mode == 0o4755 and done.stdout == "mapped\n" and os.statvfs(program).f_flag & os.ST_NOSUID:
            raise Skip("the temporary folder is mounted nosuid")
        check((done.returncode, done.stdout) == (20, seen), f"mode {mode:o}: {done}")


@case
def small_thread_stacks(setting):
    """The hooks fit the smallest stacks that programs run with: nothing of ours lives large on the stack."""
    limit = 256 << 10

    def lower():
        resource.setrlimit(resource.RLIMIT_STACK, (limit, limit))

    release_only(setting)
    program = [setting.program("process"), "threads"]
    native = setting.native(program)
    env = {"PATH": os.environ["PATH"], "LD_PRELOAD": str(setting.shim),
           "LD_LIBRARY_PATH": str(setting.build / "emulator")}
    done = subprocess.run(program, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, preexec_fn=lower)
    same(native, Result(done.returncode, done.stdout, done.stderr, []))


def main():
    parser = argparse.ArgumentParser(description="Preload tests over the emulated driver.")
    parser.add_argument("--list", action="store_true", help="print the cases' names and end")
    parser.add_argument("--sanitized", action="store_true", help="the build is a sanitizer build")
    parser.add_argument("--gpu", action="store_true", help="on this machine's own driver")
    parser.add_argument("build", nargs="?", type=Path, help="the build directory")
    parser.add_argument("cases", nargs="*", metavar="CASE", help="cases to run (default: all)")
    args = parser.parse_args()
    if args.list:
        print("\n".join(CASES))
        return 0
    if args.build is None:
        parser.error("which build directory?")
    unknown = [name for name in args.cases if name not in CASES]
    if unknown:
        parser.error(f"no such case: {', '.join(unknown)}")

    if args.gpu and (why := no_gpu()):
        print(f"SKIP: {why}")
        return SKIPPED

    tally = {"passed": 0, "failed": 0, "skipped": 0}
    for name in args.cases or CASES:
        with tempfile.TemporaryDirectory(prefix="cushion-") as scratch:
            try:
                CASES[name](Setting(args.build.resolve(), args.sanitized, args.gpu, Path(scratch)))
                outcome, why = "passed", ""
            except Skip as reason:
                outcome, why = "skipped", f": {reason}"
            except subprocess.TimeoutExpired as hang:
                outcome, why = "failed", f": no end within {TIMEOUT_S} s: {hang.cmd}"
            except (AssertionError, OSError, KeyError, ValueError, subprocess.CalledProcessError) as error:
                outcome, why = "failed", f": {type(error).__name__}: {error}"
        tally[outcome] += 1
        print(f"{outcome.upper()} {name}{why}", flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in tally.items()))
    if tally["failed"]:
        return 1
    return SKIPPED if tally["skipped"] and not tally["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
