"""The memory of an endpoint: which step its slots have while the next one is published."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from torchrelay.endpoint.server.messages import FinishPublish, Listen, Show, StepRecord, Volume
from torchrelay.endpoint.server.service import Service
from torchrelay.endpoint.server.step_server import StepServer
from torchrelay.endpoint.server.two_slots import TwoSlots
from torchrelay.memory.sealed import sealed_memory
from torchrelay.sources.access import Access

NBYTES = 1 << 12


@pytest.fixture
def service() -> Iterator[Service]:
    server = StepServer(Listen.at("127.0.0.1", 0, Access()), lends=False)
    yield server.service
    server.close()
    for slot in list(server.service.snapshots.slots):
        server.service.snapshots.detach(slot)


def publish(slots: TwoSlots, service: Service, step: int) -> None:
    slot = slots.reserve(on_device=False).slot
    slots.take()
    service.snapshots.attach(slot, sealed_memory(NBYTES), NBYTES)
    volumes = [Volume("volume", 0, NBYTES, NBYTES)]
    whole = StepRecord(b"{}", volumes, 1, ["http://a"], [0])
    slots.show(Show(slot, step, f"snapshot-{step}", volumes, whole))
    slots.finish(FinishPublish(step))


def listed(service: Service) -> list[int]:
    return [one.step for one in service.snapshots.listed]


def test_the_step_before_is_back_after_a_publish_that_wrote_nothing(service: Service) -> None:
    slots = TwoSlots(service, hold=60.0)
    with service.lock:
        publish(slots, service, 1)
        publish(slots, service, 2)
        assert listed(service) == [1, 2]
        slots.reserve(on_device=False)
        assert listed(service) == [2] and service.snapshots.by_id("snapshot-1") is None
        assert service.pending
        slots.finish(FinishPublish(3, skipped="another rank has no memory", unused=True))
        assert listed(service) == [1, 2] and not service.pending
        publish(slots, service, 4)
        assert listed(service) == [2, 4]


def test_the_step_before_is_gone_after_a_publish_that_failed_amid_its_copy(
    service: Service,
) -> None:
    slots = TwoSlots(service, hold=60.0)
    with service.lock:
        publish(slots, service, 1)
        publish(slots, service, 2)
        older = service.snapshots.by_step(1)
        assert older is not None
        slots.reserve(on_device=False)
        slots.finish(FinishPublish(3, failed=True))
        assert listed(service) == [2] and older.place("volume") is None
        publish(slots, service, 4)
        assert listed(service) == [2, 4]
