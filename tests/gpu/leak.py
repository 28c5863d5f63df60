#!/usr/bin/env python3
"""A leak planted in a PyTorch program must be named in Cushion's report by function, file and line.

    leak.py BUILD_DIR

Without PyTorch or a GPU it prints SKIP and the reason, and exits 77.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from no_gpu import SKIPPED

PROGRAM = Path(__file__).parent / "python" / "torch_leak.py"


def main():
    build = Path(sys.argv[1]).resolve()
    env = {name: value for name, value in os.environ.items() if not name.startswith("CUSHION_")}
    with tempfile.TemporaryDirectory(prefix="cushion-") as scratch:
        path = Path(scratch) / "report.json"
        env |= {"LD_PRELOAD": str(build / "libcushion.so"), "CUSHION_TRACK": "stacks", "CUSHION_REPORT": str(path)}
        done = subprocess.run([sys.executable, PROGRAM], env=env, capture_output=True, text=True, check=False, timeout=120)
        if done.returncode == SKIPPED:
            print(done.stdout.strip())
            return SKIPPED
        if done.returncode != 0 or done.stdout != "trained\n":
            print(f"FAILED: exit code {done.returncode}\n{done.stdout}{done.stderr}")
            return 1
        report = json.loads(path.read_text())

    marked = {mark.group(1): number for number, line in enumerate(PROGRAM.read_text().splitlines(), 1)
              if (mark := re.search(r"LEAK (\S+)", line))}
    leaks = [group for group in report["live"] if group["size"] == 3_000_001]
    frames = [report["frames"][index] for group in leaks for index in report["stacks"][group["stack"]]["frames"]]
    named = [(frame["function"], Path(frame["file"]).name, frame["line"]) for frame in frames if "line" in frame]
    wanted = [(function, PROGRAM.name, line) for function, line in marked.items()]
    print(f"{[(group['size'], group['count']) for group in leaks]} allocated at {named}")
    if [group["count"] for group in leaks] != [4] or [place for place in named if place in wanted] != wanted:
        print(f"FAILED: wanted one group of 4 blocks, allocated at {wanted}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
