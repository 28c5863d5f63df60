#!/usr/bin/env python3
"""How goals are judged, on figures made up for it."""

import sys
import unittest

sys.dont_write_bytecode = True  # a source tree stays clean
import table  # noqa: E402


def summary(*rows, scale="goals"):
    names = ("native", "pool", "pool_track", "null", "rmm_pool", "rmm_binning", "rmm_pool_track")
    return {"scale": scale, "rows": list(rows), "machine": {},
            "allocators": {name: {"title": f"Title, {name}", "settings": ""} for name in names}}


def random_row(cell, **ns):
    return {"program": "random_allocations", "api": "async", "benchmark": f"BM_RandomAllocations/{cell}", "ns": ns}


def held_row(mix, program="fragmentation", api="async", call="", **held):
    return {"program": program, "api": api, "benchmark": f"BM_Fragmentation{call}/{mix}", "ns": dict.fromkeys(held, 1),
            "counters": {name: {"live": 1000, "ideal": 1020, "held": value} for name, value in held.items()}}


class Goals(unittest.TestCase):
    def judged(self, *rows, **options):
        return {goal["measure"]: (goal["measured"], goal["met"]) for goal in table.goals(summary(*rows, **options))}

    def test_what_was_not_measured_is_left_out(self):
        self.assertEqual(self.judged(), {})

    def test_the_worst_cell_decides(self):
        judged = self.judged(random_row("1000/64", native=100, rmm_pool=80, pool=10),
                             random_row("1000/4", native=100, rmm_pool=300, pool=200))
        worst = "random table by stream, best peer ÷ Cushion, the worst of 2 cells"
        self.assertEqual(judged[worst], ("0.50×", False))
        self.assertEqual(judged["the same, geometric mean of 2 cells"], ("2.00×", False))

    def test_native_alone_is_no_peer(self):
        self.assertEqual(self.judged(random_row("1000/1", native=100, pool=10)), {})

    def test_a_peer_that_tracks_is_none(self):
        judged = self.judged(random_row("100000/1", rmm_pool_track=1, rmm_pool=1000, rmm_binning=9, pool=2))
        self.assertEqual(judged["`BM_RandomAllocations/100000/1` by stream, RMM's pool ÷ Cushion's"], ("500×", True))
        self.assertEqual(judged["`BM_RandomAllocations/100000/1` by stream, RMM's best ÷ Cushion's pool"],
                         ("4.50×", True))

    def test_threads_are_judged_and_the_null_hooks_reported_beside_them(self):
        rows = [{"program": "threads", "api": "both", "benchmark": f"BM_ThreadsAsync/65536/threads:{count}", "ns": ns}
                for count, ns in ((1, {"pool": 90, "null": 56}), (16, {"pool": 10, "null": 4}))]
        self.assertEqual(list(self.judged(*rows).values()), [("9.00×", False), ("14×", None)])

    def test_tracking_is_judged_where_the_goal_says_and_reported_over_all(self):
        judged = self.judged(random_row("10000/1", pool=1e6, pool_track=1.1e6, pool_sampled=1.16e6, pool_stacks=11e6)
                             | {"program": "tracking"},
                             random_row("10000/1", pool=100, pool_track=110),
                             random_row("1000/4", pool=100, pool_track=121))
        self.assertEqual(judged["`BM_RandomAllocations/10000/1` by stream, tracking on ÷ off"], ("1.100", True))
        self.assertEqual(judged["the same, sampled ÷ off"], ("1.160", False))
        self.assertEqual(judged["the same, call stacks of depth 20: more for each allocation and its free"],
                         ("1.00 µs", True))
        self.assertEqual(judged["random table by stream, tracking on ÷ off, geometric mean"], ("1.154", None))
        self.assertEqual(judged["the same, the worst cell"], ("1.210", None))

    def test_growth_is_judged_up_to_a_handle_and_scattered_memory_must_serve(self):
        rows = [{"program": "backing", "api": "malloc", "benchmark": f"BM_Growth/{bytes_}",
                 "ns": {"native": 50, "pool_vmm": 100}} for bytes_ in (64 << 20, 256 << 20)]
        rows.append({"program": "backing", "api": "malloc", "benchmark": "BM_Scattered", "ns": {"native": 5, "pool_vmm": 7},
                     "counters": {"native": {"served": 0}, "pool_vmm": {"served": 1}}})
        judged = self.judged(*rows)
        self.assertEqual(judged["growth by 64 MiB, `vmm` ÷ native cudaMalloc"], ("2.000", False))
        self.assertEqual(judged["growth by 256 MiB, `vmm` ÷ native cudaMalloc"], ("2.000", None))
        self.assertEqual(judged["the same under `BACKING=vmm`"], ("1.000", True))

    def test_held_over_live(self):
        column = "random table by stream, column of {} MiB, held ÷ live at peak"
        judged = self.judged(held_row("uniform_1", pool=1100), held_row("uniform_64", pool=1101))
        self.assertEqual(judged, {column.format(1): ("1.100", True),
                                  column.format(64): ("1.101", False)})

    def test_on_the_emulator_only_bytes_count(self):
        judged = self.judged(held_row("uniform_1", "driver_pairs", "both", "Async", pool=1050),
                             random_row("1000/1", native=100, rmm_pool=80, pool=10), scale="emulator")
        self.assertEqual(list(judged.values()), [("1.050", True)])


if __name__ == "__main__":
    unittest.main()
