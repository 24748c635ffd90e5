"""Runs a module in a process that does not outlive the one that started it, however that one ends.

`python -m servingfleet_sim.bound PARENT MODULE ARGUMENT...`: the process asks the kernel itself. Between fork and exec,
in a program that has threads, is no place to do it. Elsewhere than on Linux it only runs the module.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def command(module: str) -> list[str]:
    """The beginning of a command line that runs a module bound to this process; its arguments follow.

    It must be started by a thread that lives as long as the process: the kernel watches that thread.
    """
    return [sys.executable, "-m", "servingfleet_sim.bound", str(os.getpid()), module]


def bind(parent: int) -> None:
    """This process is killed when its parent ends. Raises SystemExit where that has ended already, OSError."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        sys.exit(f"process {parent}, which started this one, has ended")


if __name__ == "__main__":
    bind(int(sys.argv[1]))
    module = sys.argv[2]
    sys.argv = sys.argv[2:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
