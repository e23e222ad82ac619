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

from torchrelay.dropin import torch_private as private
from torchrelay.dropin._pickles import distributed
from torchrelay.dropin._pickles import unpickler as p
from torchrelay.dropin._torch_records import _ShardedTensorMeta, _StateDictMeta, _TensorMeta
from torchrelay.errors import ManifestError, RemoteProtocolError
from torchrelay.geometry.strides import extent
from torchrelay.record.probing import FEW, check_dict

_MAX_BYTES = 1 << 50
_LEFT_UNREAD: Any = None

_RECORDS = "torch.distributed.checkpoint._pg_transport."
_PYTREE = "torch.utils._pytree."
_LEAF_SPECS = (_PYTREE + "LeafSpec", _PYTREE + "treespec_leaf")  # before torch 2.14, since

_PER_BYTE = {torch.quint4x2: 2, torch.quint2x4: 4}
_MAPPINGS = (dict, collections.OrderedDict, collections.defaultdict)
_CONTAINERS = (*_MAPPINGS, list, tuple, collections.deque)
# Factories that a defaultdict may have: each is harmless to call without arguments.
_FACTORIES: dict[str, Any] = {
    f"{kind.__module__}.{kind.__name__}": kind
    for kind in (*_CONTAINERS, bool, int, float, complex, str, bytes, set)
}
_AS_THEY_ARE = (
    *(type(None), bool, int, float, complex, str, bytes, bytearray),
    *(torch.Size, torch.dtype, torch.device),
)
_NUMPY = ("numpy._core.multiarray.", "numpy.core.multiarray.")  # since numpy 2, and before
_NUMERIC = ("numpy._core.numeric.", "numpy.core.numeric.")
_NUMBERS = "?biufc"  # kinds of dtypes of numpy


def loads(data: bytes, limit: int = 1 << 30) -> _StateDictMeta:
    """The record in `data`, checked whole; `RemoteProtocolError` for anything else."""
    try:
        if len(data) > limit:
            p.refuse(f"its record of {len(data)} bytes is over the limit of {limit}")
        return _Builder(p.WorkLimit(len(data))).state(p.unpickled(data, _NAMES, _loaded_namedtuple))
    except p.PickleRefusedError as fault:
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

    def __init__(self, work: p.WorkLimit) -> None:
        self.work = work
        self.numbers = itertools.count()  # of the leaves of the tree
        self.leaves: dict[int, object] = {}  # by the identity of their values, which may be shared
        self.dtensors = distributed.DTensors(work)

    def state(self, value: object) -> _StateDictMeta:
        f = p.fields(value, _RECORDS + "_StateDictMeta")
        tree, width = self.tree(f["treespec"]), next(self.numbers)
        paths, leaves = p.typed(f["paths"], list), p.typed(f["non_tensor_leaves"], list)
        if not len(paths) == len(leaves) == width:
            p.refuse(
                f"its tree has {width} leaves, but {len(paths)} paths and {len(leaves)} leaves "
                "came with it"
            )
        # A leaf takes more bytes than this with its path.
        if width > self.work.length // 16 + 10_000:
            p.refuse("it has more leaves than its length allows")
        if not all(type(path) is tuple for path in paths):
            p.refuse("its paths are malformed")
        # The tree tells the paths; those of the record could point one leaf at another's place.
        found, spec = private.tree_flatten_with_path(tree)
        if [number for _, number in found] != list(range(width)):
            p.refuse("its tree does not rebuild to itself")
        return _StateDictMeta(spec, [path for path, _ in found], [self.leaf(v) for v in leaves])

    def leaf(self, value: Any) -> object:
        if id(value) not in self.leaves:
            self.leaves[id(value)] = self.new_leaf(value)
        found = self.leaves[id(value)]
        if isinstance(found, _ShardedTensorMeta):
            self.work.charge(len(found.local_shards_meta))
        return found

    def new_leaf(self, value: Any) -> object:
        name = value.name if type(value) is p.PickledCall else ""
        if name:  # each object has a copy of the bytes that it is made of
            found = (*value.args, *(value.state if type(value.state) is tuple else ()))
            self.work.charge(sum(len(data) for data in found if type(data) is bytes))
        if name == _RECORDS + "_TensorMeta":
            return _tensor(value)
        if name == _RECORDS + "_DTensorMeta":
            f = p.fields(value, name)
            return self.dtensors.record(_tensor(f["local"]), f["spec"])
        if name == _RECORDS + "_ShardedTensorMeta":
            f = p.fields(value, name)
            mine = p.typed(f["local_shards_meta"], list)
            self.work.charge(8 * len(mine))
            # The receiver refuses it by its path, and takes the messages that are on the way.
            return _ShardedTensorMeta([_tensor(tensor) for tensor in mine], [], _LEFT_UNREAD)
        return _plain(value)

    def tree(self, value: Any, depth: int = 0) -> Any:
        """The containers that a `TreeSpec` tells, with the number of each leaf in its place."""
        if depth > p.MAX_DEPTH:
            p.refuse(f"its tree is deeper than {p.MAX_DEPTH}")
        if type(value) is p.PickledCall and value.name in _LEAF_SPECS:
            self.work.charge(1 + depth)  # the steps of its path
            return next(self.numbers)
        self.work.charge(1)
        f = p.fields(value, _PYTREE + "TreeSpec", "type", "_context", "_children")
        # torch before 2.12 keeps these two in public fields.
        context = f.get("_context", f.get("context"))
        below = p.typed(f.get("_children", f.get("children_specs")), list)
        children = [self.tree(child, depth + 1) for child in below]
        return self.container(p.typed(f["type"], p.Global).name, context, children)

    def container(self, kind: str, context: Any, children: list[Any]) -> Any:
        if kind == "collections.namedtuple":
            named = p.typed(context, p.Global).kind
            if named is None or len(vars(named)["_fields"]) != len(children):
                p.refuse("a namedtuple does not fit its class")
            return named(*children)
        cls = _FACTORIES.get(kind)
        if cls in (list, tuple):
            p.typed(context, type(None))
            return cls(children)
        if cls is collections.deque:
            return collections.deque(children, None if context is None else p.count(context))
        if cls not in _MAPPINGS:
            p.refuse(f"{kind!r} is not a container of a state")
        made = cls()
        if cls is collections.defaultdict:
            factory, context = p.typed(context, list)
            if factory is not None:
                made.default_factory = _FACTORIES[p.typed(factory, p.Global).name]
        keys = [self.key(key) for key in p.typed(context, list)]
        if len(keys) > FEW:
            hashes = np.fromiter(map(hash, keys), np.int64, len(keys)).astype(np.uint64)
            try:
                check_dict(hashes, [*map(_width, keys)])
            except ManifestError as fault:
                p.refuse(fault.message)
        made.update(zip(keys, children, strict=True))
        if len(made) != len(keys):
            p.refuse("the keys of a dict do not fit its items")
        return made

    def key(self, value: Any, depth: int = 0) -> object:
        # Each use of a key hashes it whole, and tuples that share their parts have vast wholes.
        self.work.left -= 4
        if self.work.left < 0 or depth > 16:
            p.refuse("a key of a dict is too large")
        if type(value) is tuple:
            return tuple([self.key(item, depth + 1) for item in value])
        return _plain(value)


def _width(key: object) -> int:
    """How many items may have to be compared to tell a key from another."""
    if isinstance(key, tuple):
        return 1 + sum(map(_width, key))
    return 1 + key.bit_length() // 64 if isinstance(key, int) else 1


def _tensor(value: object) -> _TensorMeta:
    f = p.fields(value, _RECORDS + "_TensorMeta")
    shape, stride = p.typed(f["shape"], torch.Size), p.counts(f["stride"])
    kind, nbytes = p.typed(f["dtype"], torch.dtype), p.count(f["nbytes"], _MAX_BYTES)
    offset = p.count(f["storage_offset"])
    if len(shape) != len(stride) or math.prod(shape) >= 1 << 62:
        p.refuse("a tensor has a malformed shape")
    reach = offset + extent(shape, stride)
    if 0 not in shape and reach * kind.itemsize > nbytes * _PER_BYTE.get(kind, 1):
        p.refuse(f"a tensor reaches past its {nbytes} bytes")
    return _TensorMeta(shape, kind, offset, stride, nbytes)


# Leaves other than tensors.


def _plain(value: Any) -> object:
    if type(value) in _AS_THEY_ARE:
        return value
    if type(value) is p.PickledCall and value.name in _MAKERS:
        return _MAKERS[value.name](value)
    p.refuse("a leaf is neither a tensor nor a plain value")


def _bytearray(value: p.PickledCall) -> bytearray:
    return bytearray(p.typed(value.args[0], bytes)) if value.args else bytearray()


def _buffer(value: p.PickledCall) -> io.BytesIO:
    data, position, _ = p.typed(value.state, tuple)
    buffer = io.BytesIO(p.typed(data, bytes))
    buffer.seek(p.count(position))
    return buffer


def _array(value: p.PickledCall) -> np.ndarray[Any, Any]:
    """An array of numbers, in memory of its own."""
    _, shape, described, fortran, data = p.typed(value.state, tuple)
    sizes, kind = p.counts(shape), _dtype(described)
    if len(p.typed(data, bytes)) != math.prod(sizes) * kind.itemsize:
        p.refuse("an array has another size than its bytes")
    found: np.ndarray[Any, Any] = np.ndarray(
        sizes, kind, bytearray(data), order="F" if fortran else "C"
    )
    return found


def _array_of_buffer(value: p.PickledCall) -> np.ndarray[Any, Any]:
    """The same as protocol 5 has it, which is the default of Python 3.14."""
    data, described, shape, order, *axes = value.args
    sizes, kind = p.counts(shape), _dtype(described)
    if type(data) not in (bytes, bytearray) or len(data) != math.prod(sizes) * kind.itemsize:
        p.refuse("an array has another size than its bytes")
    if order not in ("C", "F", "K"):
        p.refuse("an array has an order that numpy does not know")
    found: np.ndarray[Any, Any] = np.ndarray(
        sizes, kind, bytearray(data), order="F" if order == "F" else "C"
    )
    if order != "K":
        return found
    turned = p.counts(axes[0])
    if sorted(turned) != [*range(len(sizes))]:
        p.refuse("an array has axes that are not its own")
    made: np.ndarray[Any, Any] = found.transpose(turned)
    return made


def _scalar(value: p.PickledCall) -> Any:
    described, data = value.args
    kind = _dtype(described)
    if len(p.typed(data, bytes)) != kind.itemsize:
        p.refuse("a scalar has another size than its bytes")
    return np.frombuffer(data, kind)[0]


def _dtype(value: object) -> np.dtype[Any]:
    found = p.named(value, "numpy.dtype")
    text, order = p.typed(found.args[0], str), p.typed(found.state, tuple)[1]
    if len(text) > 3 or order not in ("<", ">", "|", "="):
        p.refuse("a dtype of numpy is malformed")
    kind: np.dtype[Any] = np.dtype(text).newbyteorder("=" if order == "|" else order)
    if kind.kind not in _NUMBERS:
        p.refuse(f"an array of dtype {kind} in torch's protocol")
    return kind


_MAKERS: dict[str, Callable[[p.PickledCall], object]] = {
    **{module + "_reconstruct": _array for module in _NUMPY},
    **{module + "scalar": _scalar for module in _NUMPY},
    **{module + "_frombuffer": _array_of_buffer for module in _NUMERIC},
    "_io.BytesIO": _buffer,
    "builtins.bytearray": _bytearray,
}

# The record of a ShardedTensor is left unread, but for the tensors that follow it.
_SHARDED_NAMES = (
    "torch.distributed._shard.sharded_tensor.metadata.ShardedTensorMetadata",
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
    "torch.distributed._shard.metadata.ShardMetadata",
    "torch.distributed.remote_device._remote_device",
)

# Every name a pickle may hold, but for namedtuples.
_NAMES = frozenset(
    [
        *(_RECORDS + n for n in ("_StateDictMeta", "_TensorMeta")),
        *(_RECORDS + n for n in ("_DTensorMeta", "_ShardedTensorMeta")),
        _PYTREE + "TreeSpec",
        *_LEAF_SPECS,
        *(_PYTREE + n for n in ("MappingKey", "SequenceKey", "GetAttrKey")),
        "collections.namedtuple",
        *("numpy.dtype", "numpy.ndarray"),
        *_MAKERS,
        *_FACTORIES,
        *distributed.NAMES,
        *_SHARDED_NAMES,
    ]
)
