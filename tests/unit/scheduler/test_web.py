from __future__ import annotations

import socket
from http import HTTPStatus

import httpx
import pytest

from servingfleet_scheduler.web import Page, Web


async def answered(host: str, *, at: str) -> str:
    web = Web(host, 0, {"/": lambda: Page(HTTPStatus.OK, "text/plain", b"here")})
    try:
        async with httpx.AsyncClient(trust_env=False) as client:
            return (await client.get(f"http://{at}:{web.port}/")).text
    finally:
        await web.close()


async def test_two_colons_are_every_address_of_both_families() -> None:
    assert await answered("::", at="127.0.0.1") == "here"
    if socket.has_dualstack_ipv6():
        assert await answered("::", at="[::1]") == "here"


async def test_two_colons_are_every_address_also_without_ipv6(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    assert await answered("::", at="127.0.0.1") == "here"


async def test_a_single_address_is_only_that() -> None:
    assert await answered("127.0.0.1", at="127.0.0.1") == "here"
    with pytest.raises(httpx.ConnectError):
        await answered("127.0.0.1", at="127.0.0.2")
