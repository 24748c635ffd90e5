"""What is known of the engine: its adapter, its release, its lanes; and how schedulers are to read what it holds.

Pure.
"""

from __future__ import annotations

from servingfleet_protos.v1.stream_pb2 import Profile

from .adapters import registry
from .adapters.events import Adapter
from .lanes import Lanes
from .settings import PipelineSettings

MAX_VERSION_BYTES = 512


class Engine:
    """One replica's engine, shared by its ranks."""

    def __init__(self, settings: PipelineSettings) -> None:
        """Raises ValueError for an engine that nobody wrote an adapter for, or that has no events to pull."""
        self.adapter = registry.named(settings.engine)
        if settings.pull:
            _check_pull(self.adapter, settings)
        self._settings = settings
        self.version = settings.engine_version
        self.lanes = self._new_lanes()

    @property
    def known(self) -> bool:
        """It has said what it is, or it was configured."""
        return self.adapter is not registry.UNKNOWN

    @property
    def name(self) -> str:
        """Of the adapter that reads it. "": not known yet."""
        return self.adapter.profile.engine

    def found(self, engine: str) -> bool:
        """It says what it is. True: that was not known before, and now there are its adapter and its lanes.

        Raises ValueError as above."""
        adapter = registry.named(engine)
        if self.known:
            return False
        if self._settings.pull:
            _check_pull(adapter, self._settings)
        self.adapter = adapter
        told = self.lanes.version
        self.lanes = self._new_lanes()
        self.lanes.version = told + 1
        return True

    def released(self, version: str) -> bool:
        """It says which release it is. True: another than was known."""
        # Out of the engine's JSON, which may hold half a surrogate pair; a profile with more is refused.
        text = version.encode(errors="replace")[:MAX_VERSION_BYTES].decode(errors="ignore")
        changed = text != self.version
        if changed:
            self.version = text
            self.lanes.version += 1
        self.lanes.release(text)
        return changed

    def profile(self) -> Profile:
        """What schedulers are told."""
        profile = self.lanes.message()
        profile.engine = self.name
        profile.engine_version = self.version
        return profile

    def _new_lanes(self) -> Lanes:
        settings = self._settings
        lanes = Lanes(
            self.adapter.profile,
            block_tokens=settings.block_tokens,
            engine_block_tokens=settings.engine_block_tokens,
            host_unit_tokens=settings.host_unit_tokens,
            layer_groups=settings.layer_groups,
            less_units=settings.less_units,
            shared_store=settings.shared_store,
        )
        lanes.release(self.version)
        if settings.hybrid:
            lanes.set_hybrid()
        lanes.version = 0  # what schedulers are told first is in the hello
        return lanes


def _check_pull(adapter: Adapter, settings: PipelineSettings) -> None:
    if adapter is not registry.UNKNOWN and adapter.pulled is None:
        raise ValueError(f"engine {adapter.profile.engine!r} has no events to pull")
    if not settings.engine_block_tokens:
        raise ValueError("pulled events don't tell the engine's block: configure it")
