"""The record that a stock torch `PGTransport` pickles, read without running what it names.

The closed unpickler gives inert values. Torch's records are made of these, each by its own
constructor, of fields whose types and bounds were checked; the work is linear in the length of the
input, however much of it is shared.
"""

from __future__ import annotations

import collections
import io
import itertools
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_flatten_with_path

from torchrelay.dropin._pickles import distributed
from torchrelay.dropin._pickles.unpickler import (
    DTYPES,
    MAX_DEPTH,
    MAX_DIMS,
    Global,
    PickledCall,
    PickleRefusedError,
    WorkLimit,
    count,
    counts,
    device,
    dtype,
    fields,
    made,
    refuse,
    size,
    typed,
    unpickled,
)
from torchrelay.dropin._torch_records import _ShardedTensorMeta, _StateDictMeta, _TensorMeta
from torchrelay.errors import RemoteProtocolError
from torchrelay.geometry.strides import extent

_MAX_BYTES = 1 << 50
_MOST_ODD_KEYS = 1024  # that may collide in one dict: each is compared with all before it
_SMALL = 1 << 20

_RECORDS = "torch.distributed.checkpoint._pg_transport."
_PYTREE = "torch.utils._pytree."

_PER_BYTE = {torch.quint4x2: 2, torch.quint2x4: 4}
_CONTAINERS: dict[str, type] = {
    "builtins.dict": dict,
    "builtins.list": list,
    "builtins.tuple": tuple,
    "collections.OrderedDict": collections.OrderedDict,
    "collections.defaultdict": collections.defaultdict,
    "collections.deque": collections.deque,
}
# Factories that a defaultdict may have: each is harmless to call without arguments.
_FACTORIES: dict[str, type] = {
    **_CONTAINERS,
    **{f"builtins.{t.__name__}": t for t in (bool, int, float, complex, str, bytes, set)},
}
_AS_THEY_ARE = (type(None), bool, int, float, str, bytes, bytearray)
_NUMPY = ("numpy._core.multiarray.", "numpy.core.multiarray.")  # since numpy 2, and before
_NUMBERS = "?biufc"  # kinds of dtypes of numpy


def loads(data: bytes, limit: int = 1 << 30) -> _StateDictMeta:
    """The record in `data`, checked whole; `RemoteProtocolError` for anything else."""
    try:
        if len(data) > limit:
            refuse(f"its record of {len(data)} bytes is over the limit of {limit}")
        return _Builder(WorkLimit(len(data))).state(unpickled(data, _NAMES, _loaded_namedtuple))
    except PickleRefusedError as fault:
        raise RemoteProtocolError(f"a torch PGTransport peer was refused: {fault}") from fault
    except Exception as fault:  # every way in which hostile bytes can fail has this one meaning
        raise RemoteProtocolError(f"torch's state record is malformed: {fault!r:.200}") from fault


def _loaded_namedtuple(module: str, name: str) -> type | None:
    """A namedtuple that this process has already imported; modules are looked at, not run."""
    found = vars(sys.modules[module]).get(name) if module in sys.modules else None
    if (
        isinstance(found, type)
        and found.__bases__ == (tuple,)
        # The constructor that `namedtuple` generates, and no other: it only packs its arguments.
        and getattr(found.__new__, "__module__", None) == f"namedtuple_{found.__name__}"
        and isinstance(vars(found).get("_fields"), tuple)
    ):
        return found
    return None


class _Builder:
    """Makes torch's records of inert values; a field that does not fit is refused."""

    def __init__(self, work: WorkLimit) -> None:
        self.work = work
        self.numbers = itertools.count()  # of the leaves of the tree
        self.leaves: dict[int, object] = {}  # by the identity of their values, which may be shared
        self.dtensors = distributed.DTensors(work)

    def state(self, value: object) -> _StateDictMeta:
        f = fields(value, _RECORDS + "_StateDictMeta")
        tree, width = self.tree(f["treespec"]), next(self.numbers)
        paths, leaves = typed(f["paths"], list), typed(f["non_tensor_leaves"], list)
        if not len(paths) == len(leaves) == width:
            refuse(
                f"its tree has {width} leaves, but {len(paths)} paths and {len(leaves)} leaves "
                "came with it"
            )
        # A leaf takes more bytes than this with its path.
        if width > self.work.length // 16 + 10_000:
            refuse("it has more leaves than its length allows")
        if not all(type(path) is tuple for path in paths):
            refuse("its paths are malformed")
        # The tree tells the paths; those of the record could point one leaf at another's place.
        told, spec = tree_flatten_with_path(tree)
        if [number for _, number in told] != list(range(width)):
            refuse("its tree does not rebuild to itself")
        return _StateDictMeta(spec, [path for path, _ in told], [self.leaf(v) for v in leaves])

    def leaf(self, value: Any) -> object:
        if id(value) not in self.leaves:
            self.leaves[id(value)] = self.new_leaf(value)
        found = self.leaves[id(value)]
        if isinstance(found, _ShardedTensorMeta):
            shared = len(found.sharded_tensor_metadata.shards_metadata)
            self.work.charge(len(found.local_shards_meta) + 64 * shared)
        return found

    def new_leaf(self, value: Any) -> object:
        name = value.name if type(value) is PickledCall else ""
        if name:  # each object has a copy of the bytes that it is made of
            told = (*value.args, *(value.state if type(value.state) is tuple else ()))
            self.work.charge(sum(len(data) for data in told if type(data) is bytes))
        if name == _RECORDS + "_TensorMeta":
            return _tensor(value)
        if name == _RECORDS + "_DTensorMeta":
            f = fields(value, name)
            return self.dtensors.record(_tensor(f["local"]), f["spec"])
        if name == _RECORDS + "_ShardedTensorMeta":
            f = fields(value, name)
            mine = typed(f["local_shards_meta"], list)
            self.work.charge(8 * len(mine))
            return distributed.sharded_record(
                [_tensor(tensor) for tensor in mine],
                f["local_shards_shard_metadata"],
                f["sharded_tensor_metadata"],
                self.work,
            )
        return _plain(value)

    def tree(self, value: Any, depth: int = 0) -> Any:
        """The containers that a `TreeSpec` tells, with the number of each leaf in its place."""
        if depth > MAX_DEPTH:
            refuse(f"its tree is deeper than {MAX_DEPTH}")
        if type(value) is PickledCall and value.name == _PYTREE + "LeafSpec":
            self.work.charge(1 + depth)  # the steps of its path
            return next(self.numbers)
        self.work.charge(1)
        f = fields(value, _PYTREE + "TreeSpec", "type", "_context", "_children")
        # torch before 2.12 keeps these two in public fields.
        context = f.get("_context", f.get("context"))
        below = typed(f.get("_children", f.get("children_specs")), list)
        children = [self.tree(child, depth + 1) for child in below]
        return self.container(typed(f["type"], Global).name, context, children)

    def container(self, kind: str, context: Any, children: list[Any]) -> Any:
        if kind == "collections.namedtuple":
            named = typed(context, Global).kind
            if named is None or len(vars(named)["_fields"]) != len(children):
                refuse("a namedtuple does not fit its class")
            return named(*children)
        if kind not in _CONTAINERS:
            refuse(f"{kind!r} is not a container of a state")
        cls = _CONTAINERS[kind]
        if cls in (list, tuple):
            typed(context, type(None))
            return cls(children)
        if cls is collections.deque:
            return collections.deque(children, None if context is None else count(context))
        made: Any = cls()
        if cls is collections.defaultdict:
            factory, context = typed(context, list)
            if factory is not None:
                made.default_factory = _FACTORIES[typed(factory, Global).name]
        keys = [self.key(key) for key in typed(context, list)]
        # Keys that have one hash would take far longer to look up than to read.
        if sum(not _is_even(key) for key in keys) > _MOST_ODD_KEYS:
            refuse(f"over {_MOST_ODD_KEYS} keys of a dict whose hashes may collide")
        made.update(zip(keys, children, strict=True))
        if len(made) != len(keys):
            refuse("the keys of a dict do not fit its items")
        return made

    def key(self, value: Any, depth: int = 0) -> object:
        # Each use of a key hashes it whole, and tuples that share their parts have vast wholes.
        self.work.left -= 4
        if self.work.left < 0 or depth > 16:
            refuse("a key of a dict is too large")
        if type(value) is tuple:
            return tuple([self.key(item, depth + 1) for item in value])
        return _plain(value)


def _is_even(key: object) -> bool:
    """Whether keys of this kind spread over a table: text and small numbers."""
    if type(key) is int:
        return 0 <= key < _SMALL
    return type(key) in (str, bytes, bool, type(None))


def _tensor(value: object) -> _TensorMeta:
    f = fields(value, _RECORDS + "_TensorMeta")
    shape, stride = size(f["shape"]), counts(f["stride"], MAX_DIMS)
    kind, nbytes = dtype(f["dtype"]), count(f["nbytes"], _MAX_BYTES)
    offset = count(f["storage_offset"])
    if len(shape) != len(stride) or math.prod(shape) >= 1 << 62:
        refuse("a tensor has a malformed shape")
    reach = offset + extent(shape, stride)
    if 0 not in shape and reach * kind.itemsize > nbytes * _PER_BYTE.get(kind, 1):
        refuse(f"a tensor reaches past its {nbytes} bytes")
    return _TensorMeta(shape, kind, offset, stride, nbytes)


# Leaves other than tensors.


def _plain(value: Any) -> object:
    if type(value) in _AS_THEY_ARE:
        return value
    if type(value) is Global and value.name in DTYPES:
        return DTYPES[value.name]
    if type(value) is PickledCall and value.name in _MAKERS:
        return _MAKERS[value.name](value)
    refuse("a leaf is neither a tensor nor a plain value")


def _complex(value: PickledCall) -> complex:
    real, imag = made(value, value.name)
    return complex(typed(real, float), typed(imag, float))


def _bytearray(value: PickledCall) -> bytearray:
    args = made(value, value.name)
    return bytearray(typed(args[0], bytes)) if args else bytearray()


def _buffer(value: PickledCall) -> io.BytesIO:
    data, position, _ = typed(value.state, tuple)
    buffer = io.BytesIO(typed(data, bytes))
    buffer.seek(count(position))
    return buffer


def _array(value: PickledCall) -> np.ndarray[Any, Any]:
    """An array of numbers, in memory of its own."""
    _, shape, described, fortran, data = typed(value.state, tuple)
    sizes, kind = counts(shape, MAX_DIMS), _dtype(described)
    if len(typed(data, bytes)) != math.prod(sizes) * kind.itemsize:
        refuse("an array has another size than its bytes")
    found: np.ndarray[Any, Any] = np.ndarray(
        sizes, kind, bytearray(data), order="F" if fortran else "C"
    )
    return found


def _scalar(value: PickledCall) -> Any:
    described, data = made(value, value.name)
    kind = _dtype(described)
    if len(typed(data, bytes)) != kind.itemsize:
        refuse("a scalar has another size than its bytes")
    return np.frombuffer(data, kind)[0]


def _dtype(value: object) -> np.dtype[Any]:
    if type(value) is not PickledCall or value.name != "numpy.dtype":
        refuse("a dtype of numpy was expected")
    text, order = typed(value.args[0], str), typed(value.state, tuple)[1]
    if len(text) > 3 or order not in ("<", ">", "|", "="):
        refuse("a dtype of numpy is malformed")
    found: np.dtype[Any] = np.dtype(text).newbyteorder("=" if order == "|" else order)
    if found.kind not in _NUMBERS:
        refuse(f"an array of dtype {found} in torch's protocol")
    return found


_MAKERS: dict[str, Callable[[PickledCall], object]] = {
    **{module + "_reconstruct": _array for module in _NUMPY},
    **{module + "scalar": _scalar for module in _NUMPY},
    "_io.BytesIO": _buffer,
    "builtins.bytearray": _bytearray,
    "builtins.complex": _complex,
    "torch.Size": size,
    "torch.device": device,
}

# Every name a pickle may hold, but for namedtuples.
_NAMES = frozenset(
    [
        *(_RECORDS + n for n in ("_StateDictMeta", "_TensorMeta")),
        *(_RECORDS + n for n in ("_DTensorMeta", "_ShardedTensorMeta")),
        *(_PYTREE + n for n in ("TreeSpec", "LeafSpec")),
        *(_PYTREE + n for n in ("MappingKey", "SequenceKey", "GetAttrKey")),
        "collections.namedtuple",
        *_MAKERS,
        "numpy.dtype",
        "numpy.ndarray",
        *distributed.NAMES,
        *DTYPES,
        *_FACTORIES,
    ]
)
