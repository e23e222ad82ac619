"""How files are cut into groups for a GPU: pure, so it is tested without one."""

from __future__ import annotations

from torchrelay.stores.reading.device_fetch import _Group, _rounds


def test_groups_lie_in_turn_and_no_round_takes_more_than_the_slab_has() -> None:
    some = [_Group(0, n * 1000, (n + 1) * 1000) for n in range(7)]
    (placed,) = _rounds(some, 7 * 1024)
    assert [group.at for group in placed] == [n * 1024 for n in range(7)]
    found = list(_rounds(some, 3 * 1024))
    assert [len(one) for one in found] == [3, 3, 1]
    assert all(one[0].at == 0 and one[-1].at + one[-1].room <= 3 * 1024 for one in found)
