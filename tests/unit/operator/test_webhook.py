"""The webhook over real TLS: what it answers, whatever it is asked, and how its certificate is replaced."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import copy
import io
import json
import ssl
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from typing import Any

import aiohttp
import jsonpatch
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servingfleet_operator import admission, pki, selectors
from servingfleet_operator.admission import answer, entry
from servingfleet_operator.injection import pool_of
from servingfleet_operator.metrics import Metrics
from servingfleet_operator.pki import Certificates
from servingfleet_operator.spec import Fleet
from servingfleet_operator.webhook import MAX_BODY_BYTES, Webhook

from .pods import SETTINGS, fleet
from .test_engines import vllm

FLEET = fleet()
NAME = "localhost"


def review(pod: Any = None, namespace: str = "serving") -> dict[str, Any]:
    return {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {
            "uid": "r-1",
            "namespace": namespace,
            "operation": "CREATE",
            "object": {"apiVersion": "v1", "kind": "Pod", **(vllm() if pod is None else pod)},
            "dryRun": True,
        },
    }


def answered(asked: Any, wanted: Fleet | None = FLEET) -> admission.Answer:
    return answer(asked, "serving", "demo", lambda *_: wanted, SETTINGS, kubernetes=(1, 34))


def patched(asked: dict[str, Any], response: dict[str, Any]) -> dict[str, Any]:
    patch = json.loads(base64.b64decode(response["patch"]))
    return dict(jsonpatch.apply_patch(asked["request"]["object"], patch))


def test_a_selected_pod_gets_its_relay_as_a_json_patch() -> None:
    asked = review()
    before = copy.deepcopy(asked)
    result = answered(asked)
    assert asked == before
    assert result.outcome == "Injected"
    response = result.body["response"]
    assert (response["uid"], response["allowed"], response["patchType"]) == (
        "r-1",
        True,
        "JSONPatch",
    )
    pod = patched(asked, response)
    assert pod["spec"]["initContainers"][-1]["name"] == "servingfleet-relay"
    assert pod["spec"]["containers"] == asked["request"]["object"]["spec"]["containers"]
    again = {**asked, "request": {**asked["request"], "object": pod}}
    assert answered(again).body["response"] == {"uid": "r-1", "allowed": True}


@pytest.mark.parametrize(
    ("asked", "wanted", "outcome"),
    [
        (review(), None, "FleetUnknown"),
        (review(namespace="other"), FLEET, "NotSelected"),
        (review({"metadata": {}, "spec": {}}), FLEET, "NotSelected"),
        (review(), fleet(relay={"inject": False}), "InjectionOff"),
        (review(vllm("--headless")), FLEET, "NotServing"),
        (review(), fleet(relay={"image": "elsewhere.example/x"}), "ImageNotAllowed"),
    ],
)
def test_every_other_pod_passes_as_it_is(asked: Any, wanted: Fleet | None, outcome: str) -> None:
    result = answered(asked, wanted)
    assert result.outcome == outcome
    assert result.body["response"] == {"uid": "r-1", "allowed": True}


class Served:
    """A webhook that listens, and a client that trusts what the API server would."""

    def __init__(self, webhook: Webhook, metrics: Metrics, port: int) -> None:
        self.webhook = webhook
        self.metrics = metrics
        self.port = port

    async def post(
        self, body: bytes, bundle: bytes, path: str = "/inject/serving/demo"
    ) -> tuple[int, bytes]:
        context = ssl.create_default_context(cadata=bundle.decode())
        url = f"https://{NAME}:{self.port}{path}"
        async with (
            asyncio.timeout(10),
            aiohttp.ClientSession() as session,
            session.post(url, data=io.BytesIO(body), ssl=context) as response,
        ):
            return response.status, await response.read()

    def counted(self, outcome: str) -> float | None:
        return self.metrics.registry.get_sample_value(
            "servingfleet_operator_admissions_total", {"outcome": outcome}
        )


@contextlib.asynccontextmanager
async def serving(fleet_of: Callable[[str, str], Fleet | None]) -> AsyncIterator[Served]:
    metrics = Metrics()
    webhook = Webhook(SETTINGS, fleet_of, lambda: (1, 34), metrics)
    async with webhook.serve("127.0.0.1", 0) as port:
        yield Served(webhook, metrics, port)


def issued() -> Certificates:
    return pki.plan(None, None, [NAME], "webhook", datetime.now(UTC)).certificates


CERTIFICATES = issued()


def demo(namespace: str, name: str) -> Fleet | None:
    return FLEET if (namespace, name) == ("serving", "demo") else None


async def test_a_review_is_answered_over_tls_and_counted() -> None:
    async with serving(demo) as served:
        served.webhook.use(CERTIFICATES)
        asked = review()
        status, body = await served.post(json.dumps(asked).encode(), CERTIFICATES.ca_bundle)
        assert status == 200
        told = json.loads(body)
        assert (told["kind"], told["apiVersion"]) == ("AdmissionReview", "admission.k8s.io/v1")
        assert "servingfleet-relay" in json.dumps(patched(asked, told["response"]))
        assert served.counted("Injected") == 1
        path = "/inject/serving/another"
        status, body = await served.post(json.dumps(asked).encode(), CERTIFICATES.ca_bundle, path)
        assert json.loads(body)["response"] == {"uid": "r-1", "allowed": True}
        assert served.counted("FleetUnknown") == 1


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[" * 100_000,
        b"\xff\xfe{}",
        b"null",
        json.dumps({**review(), "apiVersion": "admission.k8s.io/v1beta1"}).encode(),
        json.dumps({**review(), "request": {"uid": 7}}).encode(),
        json.dumps({**review(), "request": {"uid": "r", "object": {"kind": "Service"}}}).encode(),
    ],
)
async def test_what_is_no_review_of_a_pod_is_refused_and_counted(body: bytes) -> None:
    async with serving(demo) as served:
        served.webhook.use(CERTIFICATES)
        status, _ = await served.post(body, CERTIFICATES.ca_bundle)
        assert status == 400
        assert served.counted("BadReview") == 1


async def test_a_body_that_no_api_server_sends_is_not_read() -> None:
    async with serving(demo) as served:
        served.webhook.use(CERTIFICATES)
        status, _ = await served.post(b" " * (MAX_BODY_BYTES + 1), CERTIFICATES.ca_bundle)
        assert status == 413
        assert served.counted("TooLarge") == 1


async def test_a_fault_of_ours_lets_the_pod_pass_and_is_counted() -> None:
    def broken(namespace: str, name: str) -> Fleet | None:
        raise RuntimeError("no store")

    async with serving(broken) as served:
        served.webhook.use(CERTIFICATES)
        status, body = await served.post(json.dumps(review()).encode(), CERTIFICATES.ca_bundle)
        assert (status, json.loads(body)["response"]) == (200, {"uid": "r-1", "allowed": True})
        assert served.counted("Failed") == 1


async def test_a_review_that_does_not_arrive_in_time_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("servingfleet_operator.webhook.DEADLINE_S", 0.05)
    async with serving(demo) as served:
        served.webhook.use(CERTIFICATES)
        context = ssl.create_default_context(cadata=CERTIFICATES.ca_bundle.decode())
        async with asyncio.timeout(10):
            reader, writer = await asyncio.open_connection(NAME, served.port, ssl=context)
            head = (
                f"POST /inject/serving/demo HTTP/1.1\r\nHost: {NAME}\r\nContent-Length: 9\r\n\r\n"
            )
            writer.write(head.encode())
            assert (await reader.readline()).startswith(b"HTTP/1.1 408")
            writer.close()
        assert served.counted("Late") == 1


async def test_without_a_certificate_it_serves_nobody_and_says_so() -> None:
    async with serving(demo) as served:
        assert not served.webhook.serving
        with pytest.raises(aiohttp.ClientError):
            await served.post(b"{}", CERTIFICATES.ca_bundle)
        served.webhook.use(CERTIFICATES)
        assert served.webhook.serving


async def test_a_new_certificate_is_shown_from_the_next_handshake_and_ends_no_connection() -> None:
    newer = issued()
    async with serving(demo) as served:
        served.webhook.use(CERTIFICATES)
        context = ssl.create_default_context(cadata=CERTIFICATES.ca_bundle.decode())
        url = f"https://{NAME}:{served.port}/inject/serving/demo"
        async with asyncio.timeout(10), aiohttp.ClientSession() as session:
            for _ in range(2):
                async with session.post(url, json=review(), ssl=context) as response:
                    assert (await response.json())["response"]["allowed"]
                # The connection of the first round is kept, and carries the second.
                served.webhook.use(newer)
        status, _ = await served.post(json.dumps(review()).encode(), newer.ca_bundle)
        assert status == 200
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await served.post(b"{}", CERTIFICATES.ca_bundle)


async def test_a_certificate_without_its_key_is_refused_and_the_one_before_stays() -> None:
    other = issued()
    async with serving(demo) as served:
        served.webhook.use(CERTIFICATES)
        with pytest.raises(ssl.SSLError):
            served.webhook.use(Certificates(other.ca_bundle, other.cert, CERTIFICATES.key))
        status, _ = await served.post(json.dumps(review()).encode(), CERTIFICATES.ca_bundle)
        assert status == 200


def test_the_entry_asks_only_about_new_pods_of_the_fleet_and_never_blocks_any() -> None:
    made = entry(FLEET, SETTINGS, b"PEM")
    assert made["name"] == "demo.serving.inject.servingfleet.dev"
    assert made["failurePolicy"] == "Ignore"
    assert (made["timeoutSeconds"], made["sideEffects"]) == (3, "None")
    assert made["reinvocationPolicy"] == "IfNeeded"
    [rule] = made["rules"]
    assert (rule["operations"], rule["resources"]) == (["CREATE"], ["pods"])
    opted = {"key": "servingfleet.dev/inject", "operator": "NotIn", "values": ["false"]}
    assert made["namespaceSelector"] == {
        "matchLabels": {"kubernetes.io/metadata.name": "serving"},
        "matchExpressions": [opted],
    }
    assert made["objectSelector"] == {
        "matchExpressions": [opted, {"key": "app", "operator": "In", "values": ["vllm"]}]
    }
    service = made["clientConfig"]["service"]
    assert (service["name"], service["namespace"]) == ("servingfleet", "ops")
    assert service["path"] == "/inject/serving/demo"
    assert base64.b64decode(made["clientConfig"]["caBundle"]) == b"PEM"
    assert [each["name"] for each in made["matchConditions"]] == ["not-injected-yet"]


LABELS = st.dictionaries(st.sampled_from("abc"), st.sampled_from(["x", "y"]), max_size=3)
EXPRESSIONS = st.lists(
    st.one_of(
        st.builds(
            lambda key, operator, values: {"key": key, "operator": operator, "values": values},
            st.sampled_from("abc"),
            st.sampled_from(["In", "NotIn"]),
            st.lists(st.sampled_from(["x", "y"]), min_size=1, unique=True),
        ),
        st.builds(
            lambda key, operator: {"key": key, "operator": operator},
            st.sampled_from("abc"),
            st.sampled_from(["Exists", "DoesNotExist"]),
        ),
    ),
    max_size=2,
)
POOLS = st.lists(
    st.builds(
        lambda labels, expressions: {"matchLabels": labels, "matchExpressions": expressions},
        LABELS.filter(bool),
        EXPRESSIONS,
    ),
    min_size=1,
    max_size=3,
)


def cel(expression: str, labels: dict[str, str]) -> bool:
    """The few forms of CEL that an entry is made of, as Python reads them."""
    python = (
        expression.replace("has(object.metadata.labels)", "True")
        .replace("object.metadata.labels", "labels")
        .replace("&&", " and ")
        .replace("||", " or ")
        .replace("!", " not ")
        .replace("true", "True")
    )
    return bool(eval(python, {"labels": labels}))  # of our own making


@given(pools=POOLS, labels=LABELS)
def test_the_entry_selects_the_pods_that_a_pool_does(
    pools: list[dict[str, Any]], labels: dict[str, str]
) -> None:
    wanted = fleet(*({"name": f"p{n}", "selector": each} for n, each in enumerate(pools)))
    made = entry(wanted, SETTINGS, b"")
    asked = selectors.matches(selectors.of_manifest(made["objectSelector"]), labels) and all(
        cel(each["expression"], labels)
        for each in made["matchConditions"]
        if each["name"] == "selected-by-a-pool"
    )
    assert asked == (pool_of({"metadata": {"labels": labels}}, wanted) is not None)


def test_a_fleet_with_too_many_words_costs_questions_and_no_other_fleet_its_entry() -> None:
    """An expression that the API server refuses would keep the whole configuration from being applied."""
    many = [f"{'v' * 60}{number}" for number in range(64)]
    expressions = [{"key": f"key-{n}", "operator": "In", "values": many} for n in range(16)]
    wanted = fleet(
        *(
            {
                "name": f"p{n}",
                "selector": {
                    "matchLabels": {"app": "vllm", "pool": f"p{n}"},
                    "matchExpressions": expressions,
                },
            }
            for n in range(32)
        )
    )
    made = entry(wanted, SETTINGS, b"")
    assert all(
        len(each["expression"]) <= admission.LONGEST_EXPRESSION for each in made["matchConditions"]
    )
    assert {"key": "app", "operator": "In", "values": ["vllm"]} in made["objectSelector"][
        "matchExpressions"
    ]
