"""The process that libFuzzer owns: instruments, loads one target, never returns. Started by `running`."""

from __future__ import annotations

import importlib
import sys
import traceback
from typing import Any

from tests.fuzz import corpus

PACKAGES = ["servingfleet_relay", "servingfleet_scheduler", "servingfleet_sim"]
"""Whose branches guide. The Rust core and protobuf's C are driven, and not seen."""


def main(name: str, *flags: str) -> None:
    """`flags` are libFuzzer's."""
    # Without a type: it has no stubs, and not every machine has it.
    atheris: Any = importlib.import_module("atheris")
    with atheris.instrument_imports(include=PACKAGES):
        target = importlib.import_module("tests.fuzz.targets").TARGETS[name]

    def one(data: bytes) -> None:
        try:
            target.run(data)
        except BaseException:
            traceback.print_exc()
            print(reproducer(name, data), file=sys.stderr, flush=True)
            raise

    atheris.Setup([sys.argv[0], f"-max_len={target.max_bytes}", *flags], one)
    atheris.Fuzz()


def reproducer(name: str, data: bytes) -> str:
    """What to type to see it again without a fuzzer, and to keep it."""
    line = corpus.line(data)
    return (
        f"\nreproduce: python -m tests.fuzz replay {name} {line}"
        f"\nkeep it:   python -m tests.fuzz add {name} {line} --why '...'"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
