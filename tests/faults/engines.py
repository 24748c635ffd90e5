"""Engines that can be broken, and how processes are."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from servingfleet_sim.processes import Process
from tests.faults.account import UNROUTED, Account
from tests.faults.prompts import Prompt
from tests.integration.fleet import PATIENCE_S, Fleet

MODEL = "m"
POLL_S = 0.01


class Gone(Exception):
    """The engine did not answer: it is dead, or died meanwhile."""


@dataclass
class Engine:
    """An emulated engine and its relay, both at the same place in every life."""

    fleet: Fleet
    name: str
    ranks: int
    options: tuple[str, ...]
    http: httpx.AsyncClient
    account: Account
    port: int
    """Of HTTP; the events and then the replays of the ranks on those that follow."""
    process: Process | None = None
    relay: Process | None = None
    schedulers: tuple[str, ...] = ()
    relay_options: tuple[str, ...] = ()
    relay_log: Path | None = None

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self, *, log: Path | None = None) -> None:
        """A new life; the relay is apart."""
        arguments = [
            *("--model", MODEL, "--gpu", "instant", "--ranks", str(self.ranks)),
            *("--port", str(self.port), "--events-port", str(self.port + 1)),
            *("--replay-port", str(self.port + 1 + self.ranks)),
            *("--log", str(self.account.path), "--log-tokens", *self.options),
        ]
        self.process = await self.fleet.process("servingfleet_sim.emulator", *arguments, log=log)
        await reached(self._serves, f"{self.name} to serve")

    async def start_relay(self) -> None:
        arguments = [
            *("--replica", self.name, "--model", MODEL, "--ranks", str(self.ranks)),
            *("--engine-events", f"tcp://127.0.0.1:{self.port + 1}"),
            *("--engine-replay", f"tcp://127.0.0.1:{self.port + 1 + self.ranks}"),
            *("--engine-http", f"http://{self.endpoint}", "--endpoint", self.endpoint),
            *self.relay_options,
        ]
        for scheduler in self.schedulers:
            arguments += ["--scheduler", scheduler]
        self.relay = await self.fleet.process("servingfleet_relay", *arguments, log=self.relay_log)

    async def complete(
        self, prompt: Sequence[int], *, request_id: str, headers: dict[str, str], tokens: int
    ) -> tuple[int, int]:
        """Prompt and cached tokens as the engine reports them. Raises Gone."""
        body = {"model": MODEL, "prompt": list(prompt), "max_tokens": tokens}
        answer = await self._post("/v1/completions", body, {**headers, "X-Request-Id": request_id})
        usage = answer["usage"]
        # SGLang leaves out what is nothing.
        details = usage["prompt_tokens_details"] or {"cached_tokens": 0}
        return usage["prompt_tokens"], details["cached_tokens"]

    async def flood(self, prompts: Sequence[Prompt]) -> None:
        """Requests that nobody routed, in one call."""
        body = {"model": MODEL, "prompt": [list(each) for each in prompts], "max_tokens": 1}
        await self._post("/v1/completions", body, {"X-Request-Id": UNROUTED})

    async def faults(self, **what: object) -> None:
        await self._post("/faults", what, {})

    async def reset(self) -> None:
        """Empties the caches of the idle engine."""
        if "sglang" in self.options:
            assert (await self.http.post("/flush_cache")).status_code == 200
            return
        answer = await self._post("/reset_prefix_cache", {}, {})
        assert answer == {"success": True}

    async def _post(self, path: str, body: object, headers: dict[str, str]) -> Any:
        try:
            answer = await self.http.post(path, json=body, headers=headers)
        except httpx.TransportError as error:
            raise Gone(f"{self.name}: {type(error).__name__}") from error
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def _serves(self) -> bool:
        try:
            return (await self.http.get("/health")).status_code == 200
        except httpx.TransportError:
            return False


async def reached(
    holds: Callable[[], Any],
    what: str,
    found: Callable[[], str] = lambda: "nothing",
    patience_s: float = PATIENCE_S,
) -> None:
    """Waits for a condition of other processes."""
    try:
        async with asyncio.timeout(patience_s):
            while not await holds():  # noqa: ASYNC110 - another process
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise AssertionError(f"waited {patience_s:.0f} s for {what}; last {found()}") from None


async def killed(process: Process | None) -> None:
    """Ends a process as the kernel does when memory is short: at once, without a word."""
    assert process is not None
    process.child.kill()
    await process.child.wait()


@asynccontextmanager
async def stopped(process: Process | None) -> AsyncIterator[None]:
    """A process that does nothing for the length of the block, and then goes on."""
    assert process is not None

    async def halted() -> bool:
        return _state(process) == "T"

    process.child.send_signal(signal.SIGSTOP)
    try:
        await reached(halted, "the process to stop")
        yield
    finally:
        if process.child.returncode is None:
            process.child.send_signal(signal.SIGCONT)


def _state(process: Process) -> str:
    """The kernel's letter for what the process does."""
    return Path(f"/proc/{process.child.pid}/stat").read_text().rpartition(")")[2].split()[0]
