"""One fleet is brought to what its spec says, with no request more than needed, and whatever is refused is told."""

from __future__ import annotations

import base64
import random
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest

from servingfleet_operator import names
from servingfleet_operator.asking import Asking
from servingfleet_operator.certificates import Certificates
from servingfleet_operator.children import Children, Leftover
from servingfleet_operator.cluster import Cluster
from servingfleet_operator.errors import NotFound, Refused, Unreachable
from servingfleet_operator.events import Events
from servingfleet_operator.injection import inject
from servingfleet_operator.kinds import DEPLOYMENT, POD_MONITOR, kind_of
from servingfleet_operator.metrics import Metrics
from servingfleet_operator.pki import Plan
from servingfleet_operator.pods import Observer
from servingfleet_operator.reconcile import RESYNC_S, TROUBLE_S, Reconciler
from servingfleet_operator.reports import Answers, Tokens
from servingfleet_operator.shared import SharedObjects
from servingfleet_operator.statuses import Statuses
from servingfleet_operator.store import (
    Key,
    Store,
    keep_child,
    keep_fleet,
    keep_pod,
    keep_policy,
)
from servingfleet_operator.upgrades import LOOK_S, PATIENCE_S, SETTLE_S
from servingfleet_operator.webhook import Webhook

from . import pods
from .api import FakeCluster, Object
from .pods import SETTINGS, pod, selector

DEMO = Key("serving", "demo")
START = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass
class Rig:
    """A reconciler, an API server in memory, and the watches between them."""

    api: FakeCluster = field(default_factory=FakeCluster)
    store: Store = field(default_factory=Store)
    now: float = 0.0
    term: int = 1
    shared_changes: int = 0

    def __post_init__(self) -> None:
        cluster = cast("Cluster", self.api)
        metrics = Metrics()
        children = Children(cluster, self.store, SETTINGS, metrics)
        self.certificates = Certificates(cluster, children, SETTINGS, self.today)
        asking = Asking(
            store=self.store,
            certificates=self.certificates,
            tokens=Tokens(cluster),
            metrics=metrics,
            leads=lambda: self.api.leads,
            on_news=lambda key: None,
            rng=random.Random(1),
            clock=lambda: self.now,
        )
        self.reconciler = Reconciler(
            cluster=cluster,
            store=self.store,
            settings=SETTINGS,
            children=children,
            certificates=self.certificates,
            observer=Observer(SETTINGS, (1, 34)),
            asking=asking,
            statuses=Statuses(
                cluster,
                self.store,
                Events(cluster, metrics, reporter="r", clock=lambda: self.now, today=self.today),
                metrics,
                self.today,
            ),
            metrics=metrics,
            leads=lambda: self.api.leads,
            term=lambda: self.term,
            knows=lambda namespace: True,
            shared_changed=self.count_shared_change,
            clock=lambda: self.now,
            today=self.today,
        )
        self.plans: list[Plan] = []
        self.shared = SharedObjects(
            cluster=cluster,
            store=self.store,
            settings=SETTINGS,
            certificates=self.certificates,
            reconciler=self.reconciler,
            metrics=metrics,
            on_certificate=self.plans.append,
        )

    def count_shared_change(self) -> None:
        self.shared_changes += 1

    def today(self) -> datetime:
        return START + timedelta(seconds=self.now)

    def watch(self) -> None:
        """The watches catch up with the API server."""
        for (kind, _, _), body in [*self.api.objects.items()]:
            if kind == names.KIND:
                self.store.fleets.put(keep_fleet(body))
            elif kind == "Pod":
                self.store.pods.put(keep_pod(body))
            elif kind_of(body) in self.store.children:
                self.store.children[kind_of(body)].put(keep_child(body))
            if kind == "NetworkPolicy":
                self.store.policies.put(keep_policy(body))

    def apply_fleet(self, name: str = "demo", **spec: Any) -> Object:
        """Makes or changes a fleet as a user would."""
        before = self.api.objects.get((names.KIND, "serving", name))
        generation = before["metadata"]["generation"] + 1 if before else 1
        body = {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "metadata": {"name": name, "namespace": "serving", "generation": generation},
            "spec": {
                "model": {"name": "m"},
                "pools": [{"name": "main", "selector": selector(app="vllm")}],
                **spec,
            },
        }
        if before and "status" in before:
            body["status"] = before["status"]
        made = self.api.put(body)
        self.watch()
        self.reconciler.distrust(Key("serving", name))
        return made

    async def reconcile(self, key: Key = DEMO) -> float | None:
        self.api.calls.clear()
        again_s = await self.reconciler.reconcile(key)
        self.watch()
        return again_s

    def get(self, kind: str, name: str, namespace: str = "serving") -> Object:
        return self.api.objects[kind, namespace, name]

    def status(self, name: str = "demo") -> Object:
        return dict(self.get(names.KIND, name)["status"])

    def condition(self, kind: str) -> Object:
        [found] = [each for each in self.status()["conditions"] if each["type"] == kind]
        return dict(found)


@pytest.fixture
def rig() -> Rig:
    return Rig()


def scheduler_pod() -> Object:
    """A scheduler of the fleet demo that is ready."""
    labels = names.scheduler_selector("demo")
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "demo-scheduler-a", "namespace": "serving", "labels": labels},
        "spec": {},
        "status": {
            "phase": "Running",
            "podIP": "192.0.2.1",
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


async def test_a_new_fleet_gets_its_children_and_a_status(rig: Rig) -> None:
    fleet = rig.apply_fleet()
    await rig.reconcile()
    kinds = {kind for kind, namespace, _ in rig.api.objects if namespace == "serving"}
    assert kinds >= {"Deployment", "Service", "Secret", "ConfigMap", "Role", "NetworkPolicy"}
    assert names.is_owned(rig.get("Deployment", "demo-scheduler"), fleet["metadata"]["uid"])
    assert rig.condition("Reconciled")["status"] == "True"


async def test_what_a_pod_mounts_is_there_before_its_deployment(rig: Rig) -> None:
    rig.apply_fleet()
    await rig.reconcile()
    order = [(kind, name) for _, kind, name in rig.api.writes()]
    deployment = order.index(("Deployment", "demo-scheduler"))
    for mounted in (
        ("Secret", "demo-tls"),
        ("Secret", "demo-decision-key"),
        ("ConfigMap", "demo-client"),
    ):
        assert order.index(mounted) < deployment
    assert order.index((names.KIND, "demo")) > deployment


async def test_the_authority_is_kept_before_anything_is_signed_by_it(rig: Rig) -> None:
    rig.apply_fleet()
    await rig.reconcile()
    secrets = [name for _, kind, name in rig.api.writes() if kind == "Secret"]
    assert secrets.index(names.ca_secret("servingfleet", "demo", "serving")) == 0


async def test_a_look_that_finds_nothing_new_asks_nothing(rig: Rig) -> None:
    rig.apply_fleet()
    await rig.reconcile()
    await rig.reconcile()
    await rig.reconcile()
    assert rig.api.calls == []


async def test_a_pod_that_starts_costs_a_status_and_nothing_else(rig: Rig) -> None:
    rig.apply_fleet()
    await rig.reconcile()
    started = pod()
    started |= {"apiVersion": "v1", "kind": "Pod", "status": {"phase": "Running"}}
    rig.api.put(started)
    rig.watch()
    await rig.reconcile()
    assert [call for call in rig.api.calls if call[1] != "Event"] == [("apply", names.KIND, "demo")]
    await rig.reconcile()
    assert rig.api.calls == []


async def test_only_the_child_that_somebody_changed_is_sent_again(rig: Rig) -> None:
    rig.apply_fleet()
    await rig.reconcile()
    changed = rig.get("Deployment", "demo-scheduler")
    changed["spec"]["replicas"] = 9
    changed["metadata"]["generation"] = 2
    rig.api.put(changed)
    rig.watch()
    await rig.reconcile()
    assert rig.api.writes() == [("apply", "Deployment", "demo-scheduler")]
    assert rig.get("Deployment", "demo-scheduler")["spec"]["replicas"] == 2


async def test_a_change_of_a_child_that_counts_no_generations_is_put_right_too(rig: Rig) -> None:
    rig.apply_fleet()
    await rig.reconcile()
    changed = rig.get("ConfigMap", "demo-client")
    endpoint = changed["data"]["endpoint"]
    rig.api.put({**changed, "data": {**changed["data"], "endpoint": "evil:1"}})
    rig.watch()
    await rig.reconcile()
    assert rig.get("ConfigMap", "demo-client")["data"]["endpoint"] == endpoint


async def test_an_object_that_somebody_makes_at_the_very_moment_is_not_taken_over(
    rig: Rig,
) -> None:
    rig.apply_fleet()
    foreign = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "demo-client", "namespace": "serving"},
        "data": {"mine": "yes"},
    }

    def be_quicker(verb: str, kind: str, name: str) -> Exception | None:
        if (verb, name) == ("apply", "demo-client") and kind == "ConfigMap":
            rig.api.put(foreign)
        return None

    rig.api.fails = be_quicker
    await rig.reconcile()
    assert rig.get("ConfigMap", "demo-client")["data"] == {"mine": "yes"}
    assert rig.condition("Reconciled")["reason"] == "ForeignObject"


async def test_a_child_s_new_status_is_no_reason_to_send_it(rig: Rig) -> None:
    rig.apply_fleet()
    deployment = None
    await rig.reconcile()
    deployment = rig.get("Deployment", "demo-scheduler")
    deployment["metadata"]["generation"] = 1
    rig.api.put(deployment)
    rig.watch()
    await rig.reconcile()
    deployment = rig.get("Deployment", "demo-scheduler")
    rig.api.put({**deployment, "status": {"replicas": 2}})
    rig.watch()
    await rig.reconcile()
    assert ("apply", "Deployment", "demo-scheduler") not in rig.api.writes()


async def test_a_secret_that_was_deleted_is_made_again_once_something_is_suspected(
    rig: Rig,
) -> None:
    rig.apply_fleet()
    await rig.reconcile()
    del rig.api.objects["Secret", "serving", "demo-tls"]
    await rig.reconcile()
    assert rig.api.calls == [], "Secrets are not watched"
    rig.reconciler.distrust(DEMO)
    await rig.reconcile()
    assert rig.get("Secret", "demo-tls")["data"]["tls.crt"]


async def test_the_key_of_decisions_is_made_once(rig: Rig) -> None:
    rig.apply_fleet()
    await rig.reconcile()
    key = rig.get("Secret", "demo-decision-key")["data"]["key"]
    for _ in range(3):
        rig.now += RESYNC_S
        rig.apply_fleet()
        await rig.reconcile()
    assert rig.get("Secret", "demo-decision-key")["data"]["key"] == key


async def test_a_damaged_key_of_decisions_is_replaced(rig: Rig) -> None:
    rig.apply_fleet()
    await rig.reconcile()
    rig.get("Secret", "demo-decision-key")["data"]["key"] = "c2hvcnQ="
    rig.reconciler.distrust(DEMO)
    await rig.reconcile()
    assert len(rig.get("Secret", "demo-decision-key")["data"]["key"]) > 40


async def test_everything_is_sent_again_now_and_then(rig: Rig) -> None:
    rig.apply_fleet()
    first = await rig.reconcile()
    sent = len(rig.api.writes())
    assert first is not None
    assert first <= RESYNC_S
    rig.now += RESYNC_S
    await rig.reconcile()
    children = [call for call in rig.api.writes() if call[1] not in (names.KIND, "Event")]
    assert len(children) >= sent - 4


async def test_a_replica_that_leads_anew_believes_nothing_that_it_knew(rig: Rig) -> None:
    rig.apply_fleet()
    await rig.reconcile()
    before = rig.get("Secret", "demo-tls")["data"]
    # Another led meanwhile, lost the authority and made a new one.
    other = Rig(api=rig.api)
    del rig.api.objects["Secret", "ops", names.ca_secret("servingfleet", "demo", "serving")]
    del rig.api.objects["Secret", "serving", "demo-tls"]
    other.watch()
    await other.reconcile()
    after = rig.get("Secret", "demo-tls")["data"]
    assert after != before
    rig.term = 2
    rig.watch()
    await rig.reconcile()
    assert rig.get("Secret", "demo-tls")["data"]["tls.crt"] == after["tls.crt"]
    assert rig.get("ConfigMap", "demo-client")["data"]["ca.crt"] in _plain(after["ca.crt"])


def _plain(encoded: str) -> str:
    return base64.b64decode(encoded).decode()


async def test_a_replica_that_does_not_lead_does_nothing(rig: Rig) -> None:
    rig.apply_fleet()
    rig.api.leads = False
    assert await rig.reconcile() is None
    assert rig.api.calls == []


async def test_the_lead_lost_in_the_middle_ends_the_writing_there(rig: Rig) -> None:
    rig.apply_fleet()

    def lose(verb: str, kind: str, name: str) -> Exception | None:
        if (verb, kind) == ("apply", "Service"):
            rig.api.leads = False
        return None

    rig.api.fails = lose
    assert await rig.reconcile() is None
    assert rig.api.writes()[-1][1] == "Service"
    assert ("Deployment", "serving", "demo-scheduler") not in rig.api.objects


async def test_an_api_server_that_is_away_is_left_to_the_queue(rig: Rig) -> None:
    rig.apply_fleet()
    rig.api.refuse(verb="apply", kind="Role", error=Unreachable("no answer"))
    with pytest.raises(Unreachable):
        await rig.reconcile()
    rig.api.fails = lambda verb, kind, name: None
    await rig.reconcile()
    assert rig.condition("Reconciled")["status"] == "True"


async def test_what_is_not_permitted_is_told_and_the_rest_is_done(rig: Rig) -> None:
    rig.apply_fleet()
    rig.api.refuse(verb="apply", kind="Role", error=Refused("roles is forbidden", code=403))
    again_s = await rig.reconcile()
    assert again_s == TROUBLE_S
    told = rig.condition("Reconciled")
    assert (told["status"], told["reason"]) == ("False", "NotPermitted")
    assert "roles is forbidden" in told["message"]
    assert rig.get("Deployment", "demo-scheduler")


async def test_a_foreign_object_is_left_as_it_is(rig: Rig) -> None:
    foreign = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "demo-client", "namespace": "serving"},
        "data": {"mine": "yes"},
    }
    rig.api.put(foreign)
    rig.apply_fleet()
    await rig.reconcile()
    assert rig.condition("Reconciled")["reason"] == "ForeignObject"
    assert rig.get("ConfigMap", "demo-client")["data"] == {"mine": "yes"}
    del rig.api.objects["ConfigMap", "serving", "demo-client"]
    await rig.reconcile()
    assert rig.condition("Reconciled")["status"] == "True"


async def test_labels_alone_make_nothing_ours(rig: Rig) -> None:
    rig.api.put(
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {
                "name": "demo-client",
                "namespace": "serving",
                "labels": names.labels("demo", SETTINGS),
            },
            "data": {"mine": "yes"},
        }
    )
    rig.apply_fleet()
    await rig.reconcile()
    assert rig.condition("Reconciled")["reason"] == "ForeignObject"


async def test_a_foreign_certificate_keeps_everything_else_from_being_made(rig: Rig) -> None:
    rig.api.put(
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "demo-tls", "namespace": "serving"},
        }
    )
    rig.apply_fleet()
    await rig.reconcile()
    assert "Secret demo-tls" in rig.condition("Reconciled")["message"]
    assert ("Deployment", "serving", "demo-scheduler") not in rig.api.objects


async def test_children_of_an_earlier_fleet_are_waited_for(rig: Rig) -> None:
    rig.apply_fleet()
    await rig.reconcile()
    rig.api.objects.pop((names.KIND, "serving", "demo"))
    fleet = rig.apply_fleet()
    with pytest.raises(Leftover):
        await rig.reconcile()
    for key in [key for key in rig.api.objects if key[1] == "serving" and key[0] != names.KIND]:
        del rig.api.objects[key]
    rig.store.children = Store().children
    await rig.reconcile()
    assert names.is_owned(rig.get("Deployment", "demo-scheduler"), fleet["metadata"]["uid"])


async def test_the_fleet_of_another_operator_is_left_alone_with_its_status(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.apply_fleet()
    await rig.reconcile()
    for (kind, namespace, _), body in rig.api.objects.items():
        if namespace == "serving" and kind != names.KIND:
            body["metadata"]["labels"][names.OPERATOR_LABEL] = "other.release"
    fresh = Rig(api=rig.api)
    fresh.store.fleets.put(keep_fleet(rig.get(names.KIND, "demo")))
    for _ in range(3):
        await fresh.reconcile()
        assert fresh.api.writes() == []
    told = [line for line in caplog.records if line.message == "fleet is another operator's"]
    assert len(told) == 1
    assert "other.release" in told[0].__dict__["error"]


async def test_a_spec_that_can_t_be_read_is_told(rig: Rig) -> None:
    rig.apply_fleet(pools=[])
    await rig.reconcile()
    told = rig.condition("Reconciled")
    assert (told["status"], told["reason"]) == ("False", "SpecNotReadable")
    assert "spec.pools" in told["message"]
    await rig.reconcile()
    assert rig.api.writes() == [], "once"


async def test_what_is_no_longer_wanted_goes(rig: Rig) -> None:
    rig.api.served.add(POD_MONITOR.plural)
    rig.apply_fleet(scheduler={"podMonitor": True})
    await rig.reconcile()
    assert rig.get("PodMonitor", "demo-scheduler")
    rig.apply_fleet(access={"transport": "PlainText", "clients": "None"})
    await rig.reconcile()
    assert ("PodMonitor", "serving", "demo-scheduler") not in rig.api.objects
    assert ("Secret", "serving", "demo-tls") not in rig.api.objects


async def test_a_monitor_is_made_only_where_its_kind_is_known(rig: Rig) -> None:
    rig.apply_fleet(scheduler={"podMonitor": True})
    await rig.reconcile()
    assert ("PodMonitor", "serving", "demo-scheduler") not in rig.api.objects
    assert rig.condition("Reconciled")["status"] == "True"


async def test_nothing_of_other_people_s_is_pruned(rig: Rig) -> None:
    rig.apply_fleet()
    labels = names.labels("demo", SETTINGS)
    mine = {"name": "mine", "namespace": "serving", "labels": labels}
    rig.api.put({"apiVersion": "v1", "kind": "ConfigMap", "metadata": mine})
    rig.watch()
    await rig.reconcile()
    assert rig.get("ConfigMap", "mine")


async def test_a_fleet_that_is_being_deleted_is_not_touched(rig: Rig) -> None:
    body = rig.apply_fleet()
    await rig.reconcile()
    rig.api.put({**body, "metadata": {**body["metadata"], "deletionTimestamp": "now"}})
    rig.watch()
    assert await rig.reconcile() is None
    assert rig.api.calls == []


def running(rig: Rig, **status: int) -> None:
    """The scheduler's Deployment says that it runs."""
    deployment = rig.get("Deployment", "demo-scheduler")
    deployment["metadata"]["generation"] = 1
    counts = {"observedGeneration": 1, "replicas": 2, "updatedReplicas": 2, "availableReplicas": 2}
    rig.api.put({**deployment, "status": {**counts, **status}})
    rig.watch()


def hooks(rig: Rig) -> Object:
    return rig.api.put(
        {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "MutatingWebhookConfiguration",
            "metadata": {"name": "servingfleet-inject"},
        }
    )


def entries(rig: Rig) -> list[str]:
    found = rig.get("MutatingWebhookConfiguration", "servingfleet-inject", "")
    return [each["name"] for each in found.get("webhooks") or ()]


async def test_pods_are_sent_to_the_webhook_once_a_pod_of_the_newest_scheduler_is_available(
    rig: Rig,
) -> None:
    hooks(rig)
    rig.apply_fleet()
    await rig.reconcile()
    await rig.shared.reconcile()
    assert entries(rig) == []
    running(rig, updatedReplicas=1, replicas=3, availableReplicas=2)
    await rig.reconcile()
    assert not rig.reconciler.shared()[0].injects, "only earlier pods are available"
    running(rig, updatedReplicas=1, replicas=3, availableReplicas=3)
    before = rig.shared_changes
    await rig.reconcile()
    assert rig.shared_changes == before + 1
    await rig.shared.reconcile()
    assert entries(rig) == [names.webhook("demo", "serving")]
    running(rig, availableReplicas=0)
    await rig.reconcile()
    await rig.shared.reconcile()
    assert entries(rig) == [names.webhook("demo", "serving")], "what was proven stays so"


async def test_a_replica_that_leads_next_believes_a_rollout_that_was_finished_once(
    rig: Rig,
) -> None:
    rig.apply_fleet()
    await rig.reconcile()
    running(rig, availableReplicas=0)
    deployment = rig.get("Deployment", "demo-scheduler")
    condition = {"type": "Progressing", "status": "True", "reason": "NewReplicaSetAvailable"}
    status = {**deployment["status"], "conditions": [condition]}
    rig.api.put({**deployment, "status": status})
    rig.term = 2
    rig.watch()
    await rig.reconcile()
    assert rig.reconciler.shared()[0].injects
    going_on = [{**condition, "reason": "ReplicaSetUpdated"}]
    rig.api.put({**deployment, "status": {**status, "conditions": going_on}})
    rig.term = 3
    rig.watch()
    await rig.reconcile()
    assert not rig.reconciler.shared()[0].injects
    # Of an earlier revision it would say nothing.
    rig.api.put({**deployment, "status": {**status, "observedGeneration": 0}})
    rig.term = 4
    rig.watch()
    await rig.reconcile()
    assert not rig.reconciler.shared()[0].injects


async def test_a_monitor_whose_kind_has_gone_keeps_nothing_from_being_done(rig: Rig) -> None:
    rig.api.served.add(POD_MONITOR.plural)
    rig.apply_fleet(scheduler={"podMonitor": True})
    rig.api.refuse(verb="apply", kind="PodMonitor", error=NotFound("404 page not found"))
    await rig.reconcile()
    assert rig.condition("Reconciled")["status"] == "True"


async def test_a_new_relay_image_is_to_be_proven_anew(rig: Rig) -> None:
    rig.apply_fleet()
    await rig.reconcile()
    running(rig)
    await rig.reconcile()
    assert rig.reconciler.shared()[0].injects
    running(rig, availableReplicas=0)
    rig.apply_fleet(relay={"image": "registry.example/relay:2"})
    await rig.reconcile()
    assert not rig.reconciler.shared()[0].injects


async def test_an_entry_stays_until_its_fleet_was_looked_at_and_goes_with_it(rig: Rig) -> None:
    configuration = hooks(rig)
    gone = {"name": names.webhook("gone", "serving"), "matchPolicy": "Exact"}
    kept = {"name": names.webhook("demo", "serving"), "matchPolicy": "Exact"}
    rig.api.put({**configuration, "webhooks": [gone, kept]})
    rig.apply_fleet()
    await rig.shared.reconcile()
    assert entries(rig) == [names.webhook("demo", "serving")]


async def test_the_schedulers_right_to_ask_about_tokens_follows_the_list_of_fleets(
    rig: Rig,
) -> None:
    rig.api.put(
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": "servingfleet-scheduler"},
        }
    )
    rig.apply_fleet()
    rig.apply_fleet("plain", access={"transport": "PlainText", "clients": "None"})
    await rig.reconcile()
    await rig.reconcile(Key("serving", "plain"))
    await rig.shared.reconcile()
    binding = rig.get("ClusterRoleBinding", "servingfleet-scheduler", "")
    assert binding["subjects"] == [
        {"kind": "ServiceAccount", "name": "demo-scheduler", "namespace": "serving"}
    ]
    rig.store.fleets.remove(rig.api.put(rig.get(names.KIND, "demo")))
    await rig.shared.reconcile()
    binding = rig.get("ClusterRoleBinding", "servingfleet-scheduler", "")
    assert binding["subjects"] == []


async def test_an_empty_list_is_not_written_over_none(rig: Rig) -> None:
    hooks(rig)
    rig.apply_fleet()
    await rig.reconcile()
    await rig.shared.reconcile()
    assert "MutatingWebhookConfiguration" not in {kind for _, kind, _ in rig.api.writes()}


async def test_shared_objects_that_the_chart_did_not_make_are_not_made_either(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.apply_fleet()
    await rig.reconcile()
    for _ in range(3):
        await rig.shared.reconcile()
    assert ("MutatingWebhookConfiguration", "", "servingfleet-inject") not in rig.api.objects
    missing = [
        line.__dict__["object"] for line in caplog.records if line.message == "object missing"
    ]
    assert sorted(missing) == ["servingfleet-inject", "servingfleet-scheduler"], "told once each"


async def test_the_authority_of_a_fleet_that_is_gone_is_removed_and_no_other(rig: Rig) -> None:
    rig.apply_fleet()
    rig.apply_fleet("other")
    await rig.reconcile()
    await rig.reconcile(Key("serving", "other"))
    rig.store.fleets.remove(rig.api.put(rig.get(names.KIND, "demo")))
    await rig.shared.reconcile()
    kept = [
        name for kind, namespace, name in rig.api.objects if (kind, namespace) == ("Secret", "ops")
    ]
    assert names.ca_secret("servingfleet", "demo", "serving") not in kept
    assert names.ca_secret("servingfleet", "other", "serving") in kept


async def test_the_webhook_s_certificate_is_made_once_and_told_each_time(rig: Rig) -> None:
    await rig.shared.reconcile()
    await rig.shared.reconcile()
    assert rig.plans[0].certificates == rig.plans[1].certificates
    served = await rig.certificates.served()
    assert served == rig.plans[1].certificates


async def test_a_spec_that_changed_while_a_status_was_written_is_left_for_the_watch_to_find(
    rig: Rig,
) -> None:
    rig.apply_fleet()
    await rig.reconcile()
    changed = rig.get(names.KIND, "demo")
    changed["spec"]["scheduler"] = {"replicas": 3}
    changed["metadata"]["generation"] = 2
    rig.api.put(changed)
    started = pod() | {"apiVersion": "v1", "kind": "Pod", "status": {"phase": "Running"}}
    rig.store.pods.put(keep_pod(rig.api.put(started)))
    await rig.reconciler.reconcile(DEMO)
    assert ("apply", names.KIND, "demo") in rig.api.writes()
    assert rig.store.fleets.put(keep_fleet(rig.get(names.KIND, "demo"))), "the watch finds it new"
    rig.reconciler.distrust(DEMO)
    await rig.reconcile()
    assert rig.get("Deployment", "demo-scheduler")["spec"]["replicas"] == 3


async def test_a_new_leader_says_nothing_until_the_schedulers_have_answered_it(rig: Rig) -> None:
    rig.apply_fleet()
    rig.api.put(scheduler_pod())
    await rig.reconcile()
    running(rig, readyReplicas=2)
    said = rig.reconciler._asking._answers
    said[DEMO] = Answers((), ("demo-scheduler-a: no answer",))
    await rig.reconcile()
    before = rig.status()
    assert rig.condition("Ready")["reason"] == "SchedulerNotAnswering"
    said.clear()
    rig.term = 2
    rig.now += 60
    await rig.reconcile()
    assert rig.status() == before


async def test_a_fleet_in_trouble_is_not_sent_anew_at_each_look(rig: Rig) -> None:
    rig.apply_fleet()
    rig.api.refuse(verb="apply", kind="Role", error=Refused("roles is forbidden", code=403))
    for _ in range(3):
        await rig.reconcile()
    assert rig.api.writes() == [("apply", "Role", "demo-client")]
    rig.now += TROUBLE_S
    await rig.reconcile()
    assert len(rig.api.writes()) > 5, "but now and then"


async def test_two_operators_do_not_overwrite_each_other_for_ever(rig: Rig) -> None:
    rig.apply_fleet()
    await rig.reconcile()
    # Both found nothing; the other was the later one. What it labelled is gone for this one's watch.
    deployment = rig.get("Deployment", "demo-scheduler")
    deployment["metadata"]["labels"][names.OPERATOR_LABEL] = "other.release"
    rig.store.children[DEPLOYMENT].remove(keep_child(rig.api.put(deployment)))
    assert await rig.reconcile() == RESYNC_S
    assert rig.api.writes() == []


def outdated_pod() -> Object:
    """A pod that serves with an earlier relay."""
    earlier = pods.fleet()
    made = inject(pod(), earlier, earlier.pools[0], SETTINGS)
    assert isinstance(made, dict)
    made["metadata"] |= {"uid": "u-pod", "resourceVersion": "1"}
    conditions = [{"type": "Ready", "status": "True"}]
    made |= {"kind": "Pod", "apiVersion": "v1"}
    return made | {"status": {"phase": "Running", "conditions": conditions}}


async def test_a_relay_that_a_policy_puts_back_is_told_until_it_is_not(rig: Rig) -> None:
    rig.apply_fleet(relay={"inPlaceUpgrade": True, "image": "registry.example/relay:2"})
    rig.api.put(outdated_pod())
    rig.watch()
    sent, told = [], []
    for passed_s in (0.0, SETTLE_S, LOOK_S, PATIENCE_S, LOOK_S):
        rig.now += passed_s
        await rig.reconcile()
        sent.append(("patch", "Pod", "vllm-0") in rig.api.calls)
        told.append(rig.condition("Reconciled")["reason"] == "RelayUpgradeUndone")
    assert sent == [True, False, False, True, False]
    assert told == [False, True, True, True, True]


async def test_a_pod_that_went_before_its_relay_was_replaced_keeps_no_status_from_being_written(
    rig: Rig,
) -> None:
    rig.apply_fleet(relay={"inPlaceUpgrade": True, "image": "registry.example/relay:2"})
    await rig.reconcile()
    rig.store.pods.put(keep_pod(outdated_pod()))
    assert await rig.reconcile() == LOOK_S
    assert ("patch", "Pod", "vllm-0") in rig.api.calls
    assert ("apply", names.KIND, "demo") in rig.api.calls


async def test_a_damaged_certificate_of_the_webhook_is_made_anew(rig: Rig) -> None:
    await rig.shared.reconcile()
    secret = rig.get("Secret", rig.certificates.webhook_secret, "ops")
    secret["data"]["tls.crt"] = base64.b64encode(b"damaged").decode()
    await rig.shared.reconcile()
    webhook = Webhook(SETTINGS, lambda *_: None, lambda: (1, 34), Metrics())
    mended = await rig.certificates.served()
    assert mended is not None
    webhook.use(mended)
    assert webhook.serving


@pytest.mark.parametrize(
    ("verb", "kind"), [("apply", "MutatingWebhookConfiguration"), ("get", "Secret")]
)
async def test_what_is_refused_of_the_shared_objects_keeps_the_others_from_nothing(
    rig: Rig, verb: str, kind: str
) -> None:
    hooks(rig)
    rig.api.put(
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": "servingfleet-scheduler"},
        }
    )
    rig.apply_fleet()
    rig.apply_fleet("gone")
    await rig.reconcile(Key("serving", "gone"))
    await rig.reconcile()
    running(rig)
    await rig.reconcile()
    rig.store.fleets.remove(rig.api.put(rig.get(names.KIND, "gone")))
    rig.api.refuse(verb=verb, kind=kind, error=Refused("no"))
    with pytest.raises(Refused):
        await rig.shared.reconcile()
    binding = rig.get("ClusterRoleBinding", "servingfleet-scheduler", "")
    assert [each["name"] for each in binding["subjects"]] == ["demo-scheduler"]
    authority = names.ca_secret("servingfleet", "gone", "serving")
    assert ("Secret", "ops", authority) not in rig.api.objects
