"""No decision and no fallback goes where it must not, whatever the fleet, the requests and their outcomes were before."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from servingfleet_protos.v1 import common_pb2, fleet_pb2, routing_pb2, stream_pb2
from servingfleet_scheduler.breaker import BreakerSettings
from servingfleet_scheduler.errors import (
    DeadlineUnreachable,
    ModelUnknown,
    NoReplicas,
    SchedulerError,
    TargetUnknown,
)
from tests.unit.scheduler.helpers import FakeRelay, finished, make_scheduler, route_request

Stage = routing_pb2.ReportRequest.Stage
Key = tuple[str, int]
TTL_S = 30.0

REPLICAS = st.sampled_from(["r0", "r1", "r2", "r3"])
NAMES = st.sampled_from(["r0", "r1", "r2", "r3", "nobody"])
LABELS = st.dictionaries(st.sampled_from(["pool", "zone"]), st.sampled_from(["a", "b"]))
TARGETS = st.lists(
    st.builds(
        lambda replica, rank: common_pb2.Target(replica=replica, rank=rank),
        st.sampled_from(["", "r0", "r1", "r2", "r3", "nobody"]),
        st.sampled_from([None, 0, 1]),
    ),
    max_size=3,
)
RANKS = st.integers(1, 2)
ADAPTERS = st.sets(st.sampled_from(["x", "y"]))
POLICIES = st.sampled_from(["cost", "least-loaded", "round-robin"])
STAGES = st.sampled_from(
    [Stage.STAGE_FINISHED, Stage.STAGE_FAILED, Stage.STAGE_ABORTED, Stage.STAGE_FIRST_TOKEN]
)


def named(targets: list[common_pb2.Target], key: Key) -> bool:
    return any(
        each.replica in ("", key[0]) and (not each.HasField("rank") or each.rank == key[1])
        for each in targets
    )


class Placement(RuleBasedStateMachine):
    """A scheduler, and what a reader of its documentation would expect of it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.relays: dict[str, FakeRelay] = {}
        self.labels: dict[str, dict[str, str]] = {}
        self.drainers: dict[str, set[str]] = {}
        self.adapters: dict[Key, tuple[set[str], float]] = {}
        self.sessions: dict[str, Key] = {}
        self.open: dict[str, routing_pb2.RouteResponse] = {}
        """By request id."""
        self.calls = 0

    @initialize(policy=POLICIES, labels=st.lists(LABELS, min_size=2, max_size=2), ranks=RANKS)
    def start(self, policy: str, labels: list[dict[str, str]], ranks: int) -> None:
        self.scheduler = make_scheduler(
            policy=policy,
            replica_ttl_s=TTL_S,
            breaker=BreakerSettings(failures=2, least=4, open_s=3.0, jitter=0.1, probe_s=2.0),
        )
        for name, said in zip(("r0", "r1"), labels, strict=True):
            self.relay_connects(name, said, ranks, {"x"} if name == "r0" else {"y"})

    # The fleet

    @rule(name=REPLICAS, labels=LABELS, ranks=RANKS, adapters=st.none() | ADAPTERS)
    def relay_connects(
        self, name: str, labels: dict[str, str], ranks: int, adapters: set[str] | None
    ) -> None:
        if name in self.relays:
            self.relays[name].session.close(self.now)
        self.calls += 1
        relay = FakeRelay(self.scheduler, name, now=self.now)
        relay.hello(
            labels=labels,
            ranks=tuple(range(ranks)),
            stream_id=f"life {self.calls}",
        )
        self.relays[name], self.labels[name] = relay, labels
        self.drainers.setdefault(name, set())
        self.adapters = {key: told for key, told in self.adapters.items() if key[0] != name}
        if adapters is not None:
            self.adapters_told(name, adapters)

    @rule(name=REPLICAS)
    def replica_goes(self, name: str) -> None:
        """For so long that it is forgotten; the others stay, and say so."""
        if name not in self.relays:
            return
        self.relays.pop(name).session.close(self.now)
        del self.labels[name], self.drainers[name]
        self.now += TTL_S + 1.0
        self.scheduler.tick(self.now)

    @rule(name=REPLICAS, by=st.sampled_from(["cli", "operator"]), draining=st.booleans())
    def drain(self, name: str, by: str, draining: bool) -> None:
        if name not in self.relays:
            return
        asked = fleet_pb2.SetDrainingRequest(replica=name, by=by, draining=draining)
        self.scheduler.set_draining(asked)
        (self.drainers[name].add if draining else self.drainers[name].discard)(by)

    @rule(name=REPLICAS, adapters=ADAPTERS)
    def adapters_told(self, name: str, adapters: set[str]) -> None:
        if name not in self.relays:
            return
        relay = self.relays[name]
        relay.now = self.now
        relay.tell(
            load=stream_pb2.EngineLoad(rank=0, adapters=sorted(adapters), adapters_known=True)
        )
        self.adapters[name, 0] = (adapters, self.now)

    @rule(seconds=st.sampled_from([0.1, 1.0, 4.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.scheduler.tick(self.now)

    # Requests

    @rule(
        only=st.just([]) | TARGETS,
        exclude=st.just([]) | TARGETS,
        labels=st.just({}) | LABELS,
        adapter=st.sampled_from(["", "", "x"]),
        session=st.sampled_from(["", "s", "t"]),
        pin=st.booleans(),
        deadline_s=st.sampled_from([None, None, 0.05, 5.0]),
        again=st.booleans(),
    )
    def route(
        self,
        only: list[common_pb2.Target],
        exclude: list[common_pb2.Target],
        labels: dict[str, str],
        adapter: str,
        session: str,
        pin: bool,
        deadline_s: float | None,
        again: bool,
    ) -> None:
        self.calls += 1
        request = route_request(
            first=self.calls % 3 * 1000,
            only=only,
            exclude=exclude,
            labels=labels,
            session_id=session,
            pin_session=pin and bool(session),
            deadline_s=deadline_s,
            max_fallbacks=16,
            request_id=f"q{self.calls}",
        )
        request.prompt.adapter = adapter
        allowed = self._allowed(request)
        broken = self._broken()
        try:
            answer = self.scheduler.route(request, self.now)
        except (NoReplicas, TargetUnknown, ModelUnknown):
            assert not allowed
            return
        except DeadlineUnreachable:
            assert allowed
            assert deadline_s is not None
            return
        target = (answer.target.replica, answer.target.rank)
        listed = [target, *((each.target.replica, each.target.rank) for each in answer.fallbacks)]
        assert len(set(listed)) == len(listed)
        assert set(listed) <= allowed
        working = allowed - broken
        assert answer.last_resort == (not working)
        if working:
            assert set(listed) <= working
        # If it is open everywhere, only those stay that opened least often.
        self._check_adapter(adapter, working or set(listed), set(listed))
        replicas = [name for name, _ in listed]
        first = list(dict.fromkeys(replicas))
        assert replicas[: len(first)] == first
        self._check_pin(request, answer, target, set(listed))
        if session:
            self.sessions[session] = target
        self.open[request.request_id] = answer
        if again:
            count = len(self.scheduler.decisions)
            assert self.scheduler.route(request, self.now) == answer
            assert len(self.scheduler.decisions) == count

    @rule(stage=STAGES, choose=st.randoms(use_true_random=False), elsewhere=st.none() | NAMES)
    def outcome(self, stage: Stage.ValueType, choose: Any, elsewhere: str | None) -> None:
        if not self.open:
            return
        request_id = choose.choice(sorted(self.open))
        answer = self.open[request_id]
        ran: dict[str, Any] = {}
        if elsewhere is not None:
            ran = {"ran_on": common_pb2.Target(replica=elsewhere), "failed_on": [answer.target]}
            # It moves the session to where it ran, which the next request sees.
            self.sessions.clear()
        self.scheduler.report(finished(answer.decision_id, stage=stage, **ran), self.now)
        if stage != Stage.STAGE_FIRST_TOKEN:
            del self.open[request_id]

    @rule(replica=REPLICAS, times=st.integers(2, 3))
    def requests_fail(self, replica: str, times: int) -> None:
        """Whatever the constraints: it was sent there before they were made."""
        for _ in range(times):
            request = route_request(only=[common_pb2.Target(replica=replica, rank=0)])
            try:
                answer = self.scheduler.route(request, self.now)
            except SchedulerError:
                return
            self.now += 0.1
            said = finished(answer.decision_id, stage=Stage.STAGE_FAILED)
            self.scheduler.report(said, self.now)

    @invariant()
    def what_it_lists_is_what_it_was_told(self) -> None:
        listed = self.scheduler.list_replicas(fleet_pb2.ListReplicasRequest(), self.now).replicas
        assert {each.replica: set(each.draining_by) for each in listed} == self.drainers
        assert {each.replica: dict(each.labels) for each in listed} == self.labels

    # What is expected

    def _ranks(self) -> set[Key]:
        listed = self.scheduler.list_replicas(fleet_pb2.ListReplicasRequest(), self.now).replicas
        return {(each.replica, rank.rank) for each in listed for rank in each.ranks}

    def _broken(self) -> set[Key]:
        listed = self.scheduler.list_replicas(fleet_pb2.ListReplicasRequest(), self.now).replicas
        return {
            (each.replica, rank.rank) for each in listed for rank in each.ranks if rank.broken_s > 0
        }

    def _allowed(self, request: routing_pb2.RouteRequest) -> set[Key]:
        return {
            key
            for key in self._ranks()
            if (not request.only or named(list(request.only), key))
            and not named(list(request.exclude), key)
            and request.labels.items() <= self.labels[key[0]].items()
            and not self.drainers[key[0]]
        }

    def _check_adapter(self, adapter: str, usable: set[Key], listed: set[Key]) -> None:
        if not adapter:
            return
        known = {
            key: adapter in names
            for key, (names, at) in self.adapters.items()
            if key in usable and self.now - at <= 10.0
        }
        if any(known.values()):
            assert not any(known.get(key) is False for key in listed)

    def _check_pin(
        self,
        request: routing_pb2.RouteRequest,
        answer: routing_pb2.RouteResponse,
        target: Key,
        listed: set[Key],
    ) -> None:
        last = self.sessions.get(request.session_id)
        if answer.pinned:
            assert request.pin_session
            if last is not None:
                assert target == last
        elif request.pin_session and last is not None:
            # It may not be chosen, or can't answer in time: else it would be among those that are named.
            assert last not in listed


TestPlacement = Placement.TestCase
TestPlacement.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
