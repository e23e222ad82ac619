"""What a rank does when it is told: make its state, run a lap, say what it has."""

from __future__ import annotations

import gc
from typing import Any

import torch

from benchmarks.contenders import ByCopy, ByTorchft
from benchmarks.harness import SECONDS
from benchmarks.rows import Kind
from benchmarks.versus import SOURCE, Contender, Course, Lap, Who
from benchmarks.workloads import clear, suite
from torchrelay.demo.job import fingerprint, leaves

_state: Any = None
_made = ""
_courses: dict[Kind, Course] = {}


def prepare(group: Any, name: str, small: bool, destination: bool) -> tuple[int, int]:
    """Make the state that rank 0 sends and that is written into; its tensors and bytes.

    Without `destination` the receivers have none: new tensors may need the room.
    """
    global _state, _made
    while _courses:
        _courses.popitem()[1].close()
    needed = name if destination or group.rank() == SOURCE else ""
    if _made != needed:
        _state, _made = None, needed  # before the next one is made: two may not fit
        gc.collect()
        if needed:
            _state = next(w for w in suite(small) if w.name == name).make()
    tensors = [leaf for _, leaf in leaves(_state) if isinstance(leaf, torch.Tensor)]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return len(tensors), sum({one.data_ptr(): one.nbytes() for one in storages}.values())


def first_lap(group: Any, kind: Kind) -> tuple[Lap, str]:
    """A lap that is not counted, and the fingerprint of what was sent or has come."""
    lap = held_lap(group, kind)
    return lap, seen(group, kind)


def held_lap(group: Any, kind: Kind) -> Lap:
    """The first lap; what has come is kept until `seen`."""
    course = _courses[kind] = _course(group, kind)
    if group.rank() != SOURCE and not kind.fresh:
        clear(_state)
    return course.lap()


def seen(group: Any, kind: Kind) -> str:
    course = _courses[kind]
    here = group.rank() == SOURCE or not kind.fresh  # in place is where it has to be
    found = fingerprint(_state if here else course.received)
    course.received = None
    return found


def lap(group: Any, kind: Kind) -> Lap:
    course = _courses[kind]
    gc.collect()  # the garbage of another lap is not this one's cost
    found = course.lap()
    course.received = None
    return found


def _course(group: Any, kind: Kind) -> Course:
    who: Who | Contender
    if kind.by == "torchft":
        who = ByTorchft(group, SECONDS)
    elif kind.by == "copy_":
        who = ByCopy(_state, sends=group.rank() == SOURCE)
    else:
        who = kind.by
    return Course(who, kind.mode, group, _state, SECONDS, kind.setup)
