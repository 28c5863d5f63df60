#!/usr/bin/env python3
"""How run.py takes turns: over stand-ins for the benchmarks, scripts that write what Google Benchmark would."""

import json
import pathlib
import sys
import tempfile
import unittest
import unittest.mock

sys.dont_write_bytecode = True  # a source tree stays clean
import run  # noqa: E402

STAND_IN = f"""#!{sys.executable}
import json, pathlib, re, sys
flags = dict(argument.removeprefix("--").split("=", 1) for argument in sys.argv[1:] if "=" in argument)
log = pathlib.Path(__file__).parent / "log"
turn = log.read_text().count("\\n") if log.exists() else 0
milliseconds = {{"BM_Quick/1": 1 + turn, "BM_Slow/1": 1500}}
names = [name for name in milliseconds if re.search(flags.get("benchmark_filter", ""), name)]
if "--benchmark_list_tests" in sys.argv:
    sys.exit(print(*names, sep="\\n"))
with log.open("a") as file:
    print(flags["allocator"], file=file)
runs = [{{"run_name": name, "run_type": "iteration", "iterations": 1, "time_unit": "ms",
         "real_time": milliseconds[name]}} for name in names for _ in range(int(flags["benchmark_repetitions"]))]
runs.append({{"run_name": "BM_Quick/1", "run_type": "aggregate"}})
pathlib.Path(flags["benchmark_out"]).write_text(json.dumps({{"context": {{}}, "benchmarks": runs}}))
sys.exit(names == [])
"""


class Rounds(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.build = self.out = pathlib.Path(folder.name)
        (self.build / "bench").mkdir()
        for name in ("turns", "turns_rmm"):
            path = self.build / "bench" / name
            path.write_text(STAND_IN)
            path.chmod(0o755)

    def run_one(self, **options):
        bench = run.Bench(self.build, self.out, "goals", 3)
        bench.run([run.Program("turns", "async", ("native", "rmm_pool"), **options)])
        return bench

    def results(self, allocator):
        return json.loads((self.out / f"turns.async.{allocator}.json").read_text())["benchmarks"]

    def test_allocators_take_turns_and_every_round_counts(self):
        bench = self.run_one(select=dict.fromkeys(("native", "rmm_pool"), "Quick"), repetitions=2)
        self.assertEqual((bench.failures, bench.left_out), ([], []))
        self.assertEqual((self.build / "bench/log").read_text().split(), ["native", "rmm_pool"] * 3)
        self.assertEqual([(entry["round"], entry["real_time"]) for entry in self.results("rmm_pool")],
                         [(1, 2), (1, 2), (2, 4), (2, 4), (3, 6), (3, 6)])
        rows, errors = run.table.read_results(self.out)
        self.assertEqual([(row["ns"], errors) for row in rows], [({"native": 3e6, "rmm_pool": 4e6}, [])])

    def test_a_slow_benchmark_runs_in_the_first_round_only(self):
        self.run_one()
        self.assertEqual([entry["run_name"] for entry in self.results("native")],
                         ["BM_Quick/1", "BM_Slow/1", "BM_Quick/1", "BM_Quick/1"])

    def test_where_all_are_slow_there_is_one_round(self):
        self.run_one(select={"rmm_pool": "Slow", "native": "Quick"})
        self.assertEqual((self.build / "bench/log").read_text().split(), ["native", "rmm_pool", "native", "native"])

    def test_a_slow_process_runs_in_the_first_round_only(self):
        with unittest.mock.patch.object(run, "SLOW_TURN", 0):
            self.run_one(select=dict.fromkeys(("native", "rmm_pool"), "Quick"))
        self.assertEqual(len(self.results("native")), 1)

    def test_bytes_held_are_counted_once(self):
        self.run_one(select={"native": "Quick"}, held={"native": "Quick"})
        self.assertEqual([entry["round"] for entry in self.results("native")], [1, 1, 2, 3])

    def test_what_fails_is_not_repeated(self):
        bench = self.run_one(select={"native": "Unknown", "rmm_pool": "Quick"})
        self.assertEqual([reason.split(": ")[0] for reason in bench.failures], ["turns.async.native"])
        self.assertEqual(len(self.results("rmm_pool")), 3)

    def test_what_the_time_does_not_suffice_for_is_said_and_no_failure(self):
        bench = run.Bench(self.build, self.out, "goals", 3)
        bench.deadline = 0
        bench.run([run.Program("turns", "async", ("native", "rmm_pool"))])
        self.assertEqual(([reason.split(": ")[0] for reason in bench.left_out], bench.failures),
                         (["turns.async.native", "turns.async.rmm_pool"], []))
        self.assertFalse((self.build / "bench/log").exists())


if __name__ == "__main__":
    unittest.main()
