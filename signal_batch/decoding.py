"""From the bytes of one record to the arrays and metadata that were asked for.

signal-dataset's own decoder copies every tensor twice and validates every axis of every record,
although neighbouring records differ only in samples, id and metadata. This decoder works out a
*layout* once (which tensor a field is, and that all axes are valid) and takes later records of
the same layout as views on their payload. It may only skip work, never a refusal:

- A payload is taken the fast way only if its SafeTensors header was checked to be contiguous and
  complete, its length is the one the header implies, and the bytes of its descriptor's `fields`
  object are those of a layout that was checked before. The rest of the descriptor is parsed anew.
- orjson reads duplicate keys (last wins) and integers beyond 64 bits (as floats) where the
  library's decoder refuses or keeps them. `strict_json` accepts only text for which both read the
  same value, see there.
- Everything else is decided by `signal_dataset.decode` itself: other key order, blanks,
  `__metadata__`, tensors without dimensions, very large descriptors, and, when they are first
  seen, axis ids and explicit or referring coordinates.

Deliberate differences, both towards refusing: a row of a metadata shard must have a non-empty
string as its id and a string or null as its scene, where the library takes any JSON value; and
whatever is wrong with a payload raises `CorruptDatasetError`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson
from signal_dataset import ControlPolicy, ResourcePolicy
from signal_dataset import decode as decode_whole
from signal_dataset.record.metadata import RecordMetadataCodec

from signal_batch.errors import CorruptDatasetError

Array = npt.NDArray[Any]

_DESCRIPTOR = "__sds_descriptor__"
_DTYPES = {
    "BOOL": np.dtype("?"),
    **{f"I{8 * size}": np.dtype(f"<i{size}") for size in (1, 2, 4, 8)},
    **{f"U{8 * size}": np.dtype(f"<u{size}") for size in (1, 2, 4, 8)},
    **{f"F{8 * size}": np.dtype(f"<f{size}") for size in (2, 4, 8)},
    "C64": np.dtype("<c8"),
}
_RECORD_KEYS = frozenset(("format", "id", "metadata", "scene_id", "version"))
_ROW_KEYS = frozenset(("id", "metadata", "scene_id"))
_AXIS_KEYS = frozenset(("name", "length", "role", "id", "coordinate", "metadata"))
_COORDINATE_KEYS = frozenset(("values", "start", "step", "reference", "unit", "metadata"))

#: Above these a payload goes to the library's decoder, which counts against its policy exactly.
_MAX_HEADER_BYTES = 1 << 20
_MAX_TEXT_BYTES = 1 << 18
_MAX_DIMENSION = 1 << 40
#: What is remembered: layouts for one set of tensors, headers and bytes of layouts in all.
_LAYOUTS_KEPT = 4
_HEADERS_KEPT = 4096
_LAYOUT_BYTES_KEPT = 16 << 20
_UNSURE = 1 << 60


class FieldSpec(NamedTuple):
    """How a field looks: dtype, shape and the names of its axes."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    axes: tuple[str, ...]


class Decoded(NamedTuple):
    """One record: `arrays` holds the wanted fields it has, as read-only views on the payload.

    `fields` describes every field, wanted or not.
    """

    id: str
    scene_id: str | None
    metadata: dict[str, Any]
    fields: Mapping[str, FieldSpec]
    arrays: dict[str, Array]


class _Tensor(NamedTuple):
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    items: int
    offset: int

    @property
    def nbytes(self) -> int:
        return self.items * self.dtype.itemsize


class _Layout(NamedTuple):
    prefix: bytes
    keys: dict[str, str]
    fields: dict[str, FieldSpec]


class _Family:
    """Layouts seen with one set of tensors; replaced as a whole, so readers need no lock."""

    __slots__ = ("layouts",)

    def __init__(self) -> None:
        self.layouts: tuple[_Layout, ...] = ()

    def find(self, text: bytes) -> _Layout | None:
        for layout in self.layouts:
            if text.startswith(layout.prefix):
                return layout
        return None

    def add(self, layout: _Layout) -> None:
        self.layouts = (layout, *self.layouts[: _LAYOUTS_KEPT - 1])


class _Header(NamedTuple):
    tensors: dict[str, _Tensor]
    start: int
    stop: int
    size: int
    family: _Family


class RecordDecoder:
    """Decodes payloads of data, annotation and metadata shards; safe to share between threads.

    `safe` sends every payload through signal-dataset's own decoders.
    """

    def __init__(
        self,
        *,
        resources: ResourcePolicy | None = None,
        control: ControlPolicy | None = None,
        safe: bool = False,
    ) -> None:
        self._resources = resources or ResourcePolicy()
        self._control = control or ControlPolicy()
        self._safe = safe
        self._rows = RecordMetadataCodec(control=self._control, resources=self._resources)
        self._headers: dict[bytes, _Header] = {}
        self._families: dict[tuple[Any, ...], _Family] = {}
        self._row_family = _Family()
        self._layout_bytes = 0
        limits = self._resources
        self._max_depth = min(limits.max_json_depth, self._control.max_json_depth)
        # Re-serialized metadata is at most a few times longer than its text, and text has at
        # least as many bytes as nodes: below this no limit of the policy can be exceeded.
        self._max_text = min(
            _MAX_TEXT_BYTES,
            limits.max_metadata_bytes // 64,
            limits.max_descriptor_bytes,
            limits.max_json_nodes,
            self._control.max_json_nodes,
        )

    def decode(self, payload: bytes, names: Iterable[str] = ()) -> Decoded:
        """Decode one data record; raises `CorruptDatasetError` for anything malformed.

        The arrays may be unaligned views: copy them before arithmetic that needs speed.
        """
        found = None if self._safe else self._decode_known(payload, names)
        return self._decode_whole(payload, names) if found is None else found

    def decode_row(self, payload: bytes) -> Decoded:
        """Decode one row of a metadata shard; its `arrays` are empty."""
        found = None if self._safe else self._decode_known_row(payload)
        return self._decode_whole_row(payload) if found is None else found

    def _decode_known(self, payload: bytes, names: Iterable[str]) -> Decoded | None:
        if len(payload) > self._resources.max_encoded_record_bytes:
            return None
        header_size = int.from_bytes(payload[:8], "little")
        if header_size > _MAX_HEADER_BYTES:
            return None
        raw = payload[8 : 8 + header_size]
        header = self._headers.get(raw) or self._learn_header(raw)
        if header is None or header.size != len(payload):
            return None
        text = payload[header.start : header.stop]
        if len(text) > self._max_text:
            return None
        layout = header.family.find(text) or self._learn_layout(header, text, payload)
        if layout is None:
            return None
        rest = strict_json(b"{" + text[len(layout.prefix) :], self._max_depth)
        if rest is None or rest.keys() != _RECORD_KEYS:
            return None
        if rest["format"] != "signal-dataset.record" or rest["version"] != "0.1":
            return None
        if not _identified(rest):
            return None
        arrays: dict[str, Array] = {}
        for name in names:
            key = layout.keys.get(name)
            if key is not None:
                arrays[name] = _view(payload, header.tensors[key])
        return Decoded(rest["id"], rest["scene_id"], rest["metadata"], layout.fields, arrays)

    def _decode_known_row(self, payload: bytes) -> Decoded | None:
        if len(payload) > self._max_text:
            return None
        layout = self._row_family.find(payload) or self._learn_row_layout(payload)
        if layout is None:
            return None
        rest = strict_json(b"{" + payload[len(layout.prefix) :], self._max_depth)
        if rest is None or rest.keys() != _ROW_KEYS or not _identified(rest):
            return None
        return Decoded(rest["id"], rest["scene_id"], rest["metadata"], layout.fields, {})

    def _decode_whole(self, payload: bytes, names: Iterable[str]) -> Decoded:
        try:
            record = decode_whole(payload, policy=self._resources)
            metadata = _thawed(record.metadata)
        except MemoryError:
            raise
        except Exception as exc:
            raise CorruptDatasetError(f"not a valid record: {exc}") from exc
        fields = {
            name: FieldSpec(item.data.dtype, item.data.shape, tuple(a.name for a in item.axes))
            for name, item in record.items()
        }
        arrays = {name: record[name].data for name in names if name in record}
        return Decoded(record.id, record.scene_id, metadata, fields, arrays)

    def _decode_whole_row(self, payload: bytes) -> Decoded:
        try:
            row = self._rows.decode(payload)
            metadata = _thawed(row.metadata)
            fields = {
                name: FieldSpec(np.dtype(item.dtype), item.shape, tuple(a.name for a in item.axes))
                for name, item in row.items()
            }
        except MemoryError:
            raise
        except Exception as exc:
            raise CorruptDatasetError(f"not a valid metadata row: {exc}") from exc
        result = Decoded(row.id, row.scene_id, metadata, fields, {})
        if not _identified(result._asdict()):
            raise CorruptDatasetError("not a valid metadata row: id or scene id is not a string")
        return result

    def _learn_header(self, raw: bytes) -> _Header | None:
        tensors = _parse_header(raw)
        if tensors is None or len(tensors) - 1 > self._resources.max_fields:
            return None
        descriptor = tensors.pop(_DESCRIPTOR, None)
        if descriptor is None or descriptor.dtype != np.uint8 or len(descriptor.shape) != 1:
            return None
        sizes = [tensor.nbytes for tensor in tensors.values()]
        limits = self._resources
        if max(sizes, default=0) > limits.max_tensor_bytes:
            return None
        if sum(sizes) > limits.max_total_tensor_bytes:
            return None
        shapes = tuple((key, item.dtype, item.shape) for key, item in sorted(tensors.items()))
        self._forget_if_full()
        family = self._families.setdefault(shapes, _Family())
        stop = descriptor.offset + descriptor.items
        size = 8 + len(raw) + sum(sizes) + descriptor.items
        header = _Header(tensors, descriptor.offset, stop, size, family)
        self._headers[raw] = header
        return header

    def _forget_if_full(self) -> None:
        """Start over where records are too varied to be worth remembering."""
        if len(self._headers) >= _HEADERS_KEPT or self._layout_bytes > _LAYOUT_BYTES_KEPT:
            self._headers.clear()
            self._families.clear()
            self._layout_bytes = 0

    def _learn_layout(self, header: _Header, text: bytes, payload: bytes) -> _Layout | None:
        split = _split_fields(text, self._max_depth)
        if split is None:
            return None
        prefix, fields = split
        if not self._plain_record(fields, header.tensors):
            self._decode_whole(payload, ())
        keys = {name: item["tensor"] for name, item in fields.items()}
        specs = {
            name: FieldSpec(*header.tensors[key][:2], _axis_names(fields[name]))
            for name, key in keys.items()
        }
        layout = _Layout(prefix, keys, specs)
        header.family.add(layout)
        self._layout_bytes += len(prefix)
        return layout

    def _learn_row_layout(self, payload: bytes) -> _Layout | None:
        split = _split_fields(payload, self._max_depth)
        if split is None:
            return None
        prefix, fields = split
        specs: dict[str, FieldSpec] = {}
        if self._plain_row(fields):
            for name, item in fields.items():
                dtype, shape = np.dtype(item["dtype"]), tuple(item["shape"])
                specs[name] = FieldSpec(dtype, shape, _axis_names(item))
        else:
            specs |= self._decode_whole_row(payload).fields
        layout = _Layout(prefix, {}, specs)
        self._row_family.add(layout)
        return layout

    def _plain_record(self, fields: dict[str, Any], tensors: dict[str, _Tensor]) -> bool:
        """Whether fields surely pass the library's validation; anything unusual says no."""
        used: set[str] = set()
        total = 0
        for name, item in fields.items():
            if not name or type(item) is not dict or item.keys() != {"tensor", "axes", "metadata"}:
                return False
            key = item["tensor"]
            tensor = tensors.get(key) if type(key) is str else None
            if tensor is None or type(item["metadata"]) is not dict:
                return False
            used.add(key)
            total += tensor.nbytes
            if not self._plain_axes(item["axes"], tensor.shape):
                return False
        limits = self._resources
        return used == tensors.keys() and bool(fields) and total <= limits.max_total_tensor_bytes

    def _plain_row(self, fields: dict[str, Any]) -> bool:
        for item in fields.values():
            if type(item) is not dict or item.keys() != {"dtype", "shape", "axes", "metadata"}:
                return False
            dtype = item["dtype"]
            if type(dtype) is not str or dtype not in _ROW_DTYPES:
                return False
            if type(item["metadata"]) is not dict:
                return False
            if type(item["shape"]) is not list or not self._plain_axes(item["axes"], item["shape"]):
                return False
        return len(fields) <= self._resources.max_fields

    def _plain_axes(self, axes: Any, shape: Iterable[int]) -> bool:
        sizes = list(shape)
        if type(axes) is not list or len(axes) != len(sizes):
            return False
        if len(axes) > self._resources.max_axes_per_field:
            return False
        names = [_plain_axis(axis, size) for axis, size in zip(axes, sizes, strict=True)]
        return None not in names and len(set(names)) == len(names)


_ROW_DTYPES = frozenset(dtype.str for dtype in _DTYPES.values())


def strict_json(text: bytes, max_depth: int) -> dict[str, Any] | None:
    """Parse an object that a strict decoder reads as the same value; None where that is not sure.

    Text that orjson writes back byte for byte has no duplicate key and no number out of reach.
    Where it does not, as with exponents that are written another way, keys are counted. Without
    blanks before a colon, every key in the text ends in `":`. The count of that pair is
    therefore at least the number of keys in the text, which is at least the number of keys in
    the parsed value; where the first and last agree no key occurs twice. Numbers that orjson
    may have turned into a float, and nesting near the limit, are left to the caller as well.
    """
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    if type(value) is not dict:
        return None
    if text.count(b"{") + text.count(b"[") < max_depth and orjson.dumps(value) == text:
        return value
    if b"\n" in text or b"\r" in text or b"\t" in text or b" :" in text:
        return None
    keys = len(value) + _count_keys(value.values(), max_depth - 1)
    return value if keys == text.count(b'":') else None


def _count_keys(values: Iterable[Any], depth: int) -> int:
    """Keys in nested objects, or far too many if a number or the nesting is doubtful."""
    if depth < 1:
        return _UNSURE
    total = 0
    for value in values:
        kind = type(value)
        if kind is dict:
            total += len(value) + _count_keys(value.values(), depth - 1)
        elif kind is list:
            total += _count_keys(value, depth - 1)
        elif kind is float and not -9e18 < value < 9e18:
            total += _UNSURE
    return total


def _split_fields(text: bytes, max_depth: int) -> tuple[bytes, dict[str, Any]] | None:
    """The bytes up to and including the comma after a leading `fields` object, and that object.

    Text that starts with the same bytes has the same `fields` value, whatever follows.
    """
    document = strict_json(text, max_depth)
    start = len('{"fields":')
    if document is None or not text.startswith(b'{"fields":{'):
        return None
    characters = text.decode()
    _, stop = json.JSONDecoder().raw_decode(characters, start)
    prefix = characters[: stop + 1].encode()
    return (prefix, document["fields"]) if prefix.endswith(b"},") else None


def _parse_header(raw: bytes) -> dict[str, _Tensor] | None:
    """Tensors with absolute payload offsets, if the header is in the form that save() writes.

    Tensors must begin at 0 and follow each other without a hole or an overlap.
    """
    try:
        header = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None
    # Equal bytes leave no room for duplicate keys, blanks or unusual numbers.
    if type(header) is not dict or "__metadata__" in header:
        return None
    if orjson.dumps(header) != raw.rstrip(b" "):
        return None
    tensors: dict[str, _Tensor] = {}
    spans: list[tuple[int, int]] = []
    for key, item in header.items():
        if type(item) is not dict or item.keys() != {"dtype", "shape", "data_offsets"}:
            return None
        tensor = _parse_tensor(item, 8 + len(raw))
        if tensor is None:
            return None
        tensors[key] = tensor
        spans.append(tuple(item["data_offsets"]))
    end = 0
    for start, stop in sorted(spans):
        if start != end:
            return None
        end = stop
    return tensors


def _parse_tensor(item: dict[str, Any], base: int) -> _Tensor | None:
    dtype = _DTYPES.get(item["dtype"]) if type(item["dtype"]) is str else None
    shape, offsets = item["shape"], item["data_offsets"]
    if dtype is None or not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
        return None
    # The library reads a tensor without dimensions as one with a single dimension: leave it to it.
    if not 0 < len(shape) <= 32 or max(shape) > _MAX_DIMENSION:
        return None
    count = math.prod(shape)
    if offsets[1] - offsets[0] != count * dtype.itemsize:
        return None
    return _Tensor(dtype, tuple(shape), count, base + offsets[0])


def _naturals(value: Any) -> bool:
    return type(value) is list and all(type(item) is int and item >= 0 for item in value)


def _plain_axis(axis: Any, size: int) -> str | None:
    """The axis's name if the axis is certainly valid."""
    if type(axis) is not dict or axis.keys() != _AXIS_KEYS or axis["id"] is not None:
        return None
    name, length, role = axis["name"], axis["length"], axis["role"]
    if type(name) is not str or not name or type(length) is not int or type(size) is not int:
        return None
    if length != size or length < 0 or not (role is None or type(role) is str):
        return None
    plain = type(axis["metadata"]) is dict and _plain_coordinate(axis["coordinate"])
    return name if plain else None


def _plain_coordinate(value: Any) -> bool:
    if value is None:
        return True
    if type(value) is not dict or value.keys() != _COORDINATE_KEYS:
        return False
    if value["values"] is not None or value["reference"] is not None:
        return False
    start, step, unit = value["start"], value["step"], value["unit"]
    linear = type(start) in (int, float) and type(step) in (int, float)
    if not (linear or (start is None and step is None)):
        return False
    return (unit is None or type(unit) is str) and type(value["metadata"]) is dict


def _axis_names(field: dict[str, Any]) -> tuple[str, ...]:
    return tuple(axis["name"] for axis in field.get("axes", ()))


def _identified(value: Mapping[str, Any]) -> bool:
    scene = value["scene_id"]
    if type(value["id"]) is not str or not value["id"] or type(value["metadata"]) is not dict:
        return False
    return scene is None or type(scene) is str


def _view(payload: bytes, tensor: _Tensor) -> Array:
    flat = np.frombuffer(payload, tensor.dtype, tensor.items, tensor.offset)
    return flat.reshape(tensor.shape)


def _thawed(value: Any) -> Any:
    """Plain dicts and lists from the library's frozen JSON."""
    if isinstance(value, Mapping):
        return {key: _thawed(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_thawed(item) for item in value]
    return value
