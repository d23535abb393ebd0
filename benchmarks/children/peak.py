"""Run a module from a small process, whose memory the system would count as the module's; print what it took, as JSON.

`python -m benchmarks.children.peak MODULE ARGUMENT...`
"""

import json
import os
import subprocess
import sys
import time

if __name__ == "__main__":
    began = time.perf_counter()
    with subprocess.Popen([sys.executable, "-m", *sys.argv[1:]], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        printed = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)  # with the processes that it waited for
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(process.returncode)
    seconds, peak = time.perf_counter() - began, usage.ru_maxrss * 1024  # on Linux
    print(json.dumps({"seconds": seconds, "bytes": peak, "tensors": json.loads(printed)["tensors"]}))
