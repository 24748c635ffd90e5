"""`python -m servingfleet_sim.simulation [FIRST] [COUNT]`: runs schedules, prints the first that fails and stops."""

from __future__ import annotations

import sys
import time

from .shrinking import run, shrink


def main(first: int, count: int) -> int:
    """Returns the exit status: 1 if a schedule failed."""
    began = time.monotonic()
    tally = run(range(first, first + count))
    for failure in tally.failures:
        print(shrink(failure))
    print(f"{tally.schedules} schedules in {time.monotonic() - began:.0f} s")
    for name, value in sorted((tally.states | tally.counts).items()):
        print(f"{value:10} {name}")
    return 1 if tally.failures else 0


if __name__ == "__main__":
    numbers = [int(each) for each in sys.argv[1:3]]
    sys.exit(main(*(numbers + [0, 1000][len(numbers) :])))
