"""The projected decoder against signal-dataset's own: the same value, or a refusal by both."""

from __future__ import annotations

import json
import struct
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import signal_dataset as sds
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from signal_dataset.record.metadata import RecordMetadataCodec

from signal_batch.decoding import Decoded, RecordDecoder, strict_json
from signal_batch.errors import CorruptDatasetError

DTYPES = [
    *("?", "<i1", "<i2", "<i4", "<i8", "<u1", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8", "<c8"),
]
RELAXED = settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow], database=None
)

text = st.text(st.characters(blacklist_categories=["Cs"]), max_size=8)
names = st.text(st.characters(blacklist_categories=["Cs"]), min_size=1, max_size=6)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    text,
    st.sampled_from(
        [":", '":', 'a": b', "x : y", "\\", "\n", 1e-06, -0.0, 2**63, 2**64, -(2**63) - 1]
    ),
)
trees = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(text, trees, max_size=4)
numbers = st.integers(-5, 5) | st.floats(-1e9, 1e9)


@st.composite
def coordinates(draw: st.DrawFn, length: int, fields: list[str]) -> sds.Coordinate | None:
    form = draw(st.sampled_from(["none", "bare", "linear", "explicit", "reference"]))
    if form == "none":
        return None
    common: dict[str, Any] = {"unit": draw(st.none() | text), "metadata": draw(objects)}
    if form == "linear":
        return sds.Coordinate(start=draw(numbers), step=draw(numbers), **common)
    if form == "explicit":
        return sds.Coordinate(values=tuple(range(length)), **common)
    if form == "reference":
        return sds.Coordinate(reference=draw(st.sampled_from(fields)), **common)
    return sds.Coordinate(**common)


@st.composite
def records(draw: st.DrawFn) -> sds.Record:
    field_names = draw(st.lists(names, min_size=1, max_size=3, unique=True))
    fields = {}
    for name in field_names:
        shape = draw(hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=3))
        dtype = np.dtype(draw(st.sampled_from(DTYPES)))
        raw = draw(st.binary(min_size=64, max_size=64)) * 30
        size = int(np.prod(shape))
        data = np.frombuffer(raw[: size * dtype.itemsize], np.uint8)
        data = data % 2 if dtype.kind == "b" else data
        axes = tuple(
            sds.Axis(
                f"axis{i}",
                length,
                role=draw(st.none() | text),
                id=draw(st.sampled_from([None, None, f"{name}-{i}"])),
                coordinate=draw(coordinates(length, field_names)),
                metadata=draw(objects),
            )
            for i, length in enumerate(shape)
        )
        fields[name] = sds.Field(data.view(dtype).reshape(shape), axes, draw(objects))
    return sds.Record(draw(names), fields, draw(st.none() | text), draw(objects))


def thaw(value: Any) -> Any:
    """Plain JSON, with the type beside each number so that 1 and 1.0 or 0.0 and -0.0 differ."""
    if hasattr(value, "items"):
        return {key: thaw(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [thaw(item) for item in value]
    return (type(value).__name__, repr(value))


def assert_same(found: Decoded, expected: sds.Record) -> None:
    assert (found.id, found.scene_id) == (expected.id, expected.scene_id)
    assert thaw(found.metadata) == thaw(expected.metadata)
    assert found.fields.keys() == expected.fields.keys()
    for name, field in expected.items():
        axes = tuple(axis.name for axis in field.axes)
        assert found.fields[name] == (field.data.dtype, field.data.shape, axes)
        array = found.arrays[name]
        assert (array.dtype, array.shape) == (field.data.dtype, field.data.shape)
        assert array.tobytes() == field.data.tobytes()
        assert not array.flags.writeable


def compare(decoder: RecordDecoder, payload: bytes, wanted: list[str]) -> bool:
    """Whether both decoders accept the payload, after checking that they agree on it."""
    try:
        expected = sds.decode(payload)
    except Exception:
        with pytest.raises(CorruptDatasetError):
            decoder.decode(payload, wanted)
        return False
    assert_same(decoder.decode(payload, [*wanted, *expected.fields]), expected)
    return True


@RELAXED
@given(records(), objects, names)
def test_equals_the_library_for_any_record(
    record: sds.Record, metadata: dict[str, Any], record_id: str
) -> None:
    decoder = RecordDecoder()
    for _ in range(2):
        assert compare(decoder, sds.encode(record), [])
    neighbour = sds.Record(record_id, record.fields, None, metadata)
    assert compare(decoder, sds.encode(neighbour), ["no such field"])


@RELAXED
@given(records())
def test_metadata_rows_equal_the_library(record: sds.Record) -> None:
    decoder, codec = RecordDecoder(), RecordMetadataCodec()
    payload = codec.encode(sds.RecordMetadata.from_record(record))
    expected = codec.decode(payload)
    for _ in range(2):
        found = decoder.decode_row(payload)
        assert (found.id, found.scene_id) == (expected.id, expected.scene_id)
        assert thaw(found.metadata) == thaw(expected.metadata)
        for name, item in expected.items():
            axes = tuple(axis.name for axis in item.axes)
            assert found.fields[name] == (np.dtype(item.dtype), item.shape, axes)


def example(**changes: Any) -> sds.Record:
    samples = np.arange(12, dtype=np.complex64).reshape(2, 6)
    axes = (sds.Axis("channel", 2), sds.Axis("time", 6, coordinate=sds.Coordinate(None, 0.0, 1e-6)))
    fields = {
        "samples": sds.Field(samples, axes),
        "mask": sds.Field(np.array([1, 0, 1], np.uint8), (sds.Axis("bin", 3),)),
        "gain": sds.Field(np.float32([3]), (sds.Axis("one", 1),)),
    }
    values: dict[str, Any] = {
        "id": "a-1",
        "scene_id": "s",
        "fields": fields,
        "metadata": {"snr_db": 3.5, "label": 4, "radio": {"gain": 1, "name": "x"}},
    }
    return sds.Record(**values | changes)


def warmed() -> tuple[RecordDecoder, bytes]:
    payload = sds.encode(example())
    decoder = RecordDecoder()
    assert compare(decoder, payload, ["samples"])
    return decoder, payload


DECODER, PAYLOAD = warmed()
SPLICES = [b'"', b":", b",", b"{", b"}", b"[", b"]", b"0", b"1", b" ", b"\n", b'"a":1,', b"null"]


@settings(RELAXED, max_examples=1500)
@given(st.data())
def test_a_damaged_payload_is_never_read_as_something_else(data: st.DataObject) -> None:
    payload = bytearray(PAYLOAD)
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(payload) - 1))
        kind = data.draw(st.sampled_from(["flip", "set", "insert", "delete", "cut", "splice"]))
        if kind == "flip":
            payload[position] ^= 1 << data.draw(st.integers(0, 7))
        elif kind == "set":
            payload[position] = data.draw(st.sampled_from(list(b'"{}[]:,0129x \n\\')))
        elif kind == "insert":
            payload[position:position] = data.draw(st.sampled_from(SPLICES))
        elif kind == "delete":
            del payload[position : position + data.draw(st.integers(1, 8))]
        elif kind == "cut":
            del payload[position:]
        else:
            piece = data.draw(st.sampled_from(SPLICES))
            payload[position : position + len(piece)] = piece
        if not payload:
            break
    compare(DECODER, bytes(payload), ["samples"])


def test_every_single_bit_flip_of_header_and_descriptor() -> None:
    header_size = struct.unpack("<Q", PAYLOAD[:8])[0]
    start = PAYLOAD.index(b'{"fields"')
    stop = PAYLOAD.index(b"0.1", start) + 5
    positions = [*range(8 + header_size), *range(start, stop)]
    accepted = 0
    for position in positions:
        for bit in (0, 1, 4, 5):
            payload = bytearray(PAYLOAD)
            payload[position] ^= 1 << bit
            accepted += compare(DECODER, bytes(payload), ["samples"])
    assert 0 < accepted < len(positions) * 4


def test_every_truncation_is_refused() -> None:
    for size in range(len(PAYLOAD)):
        with pytest.raises(CorruptDatasetError):
            DECODER.decode(PAYLOAD[:size], ["samples"])


def pack(header: Any, buffer: bytes) -> bytes:
    raw = (
        header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    )
    return struct.pack("<Q", len(raw)) + raw + buffer


def with_text(text_bytes: bytes) -> bytes:
    """A payload of one float32 field and this descriptor."""
    header = {
        "tensor_000000": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "__sds_descriptor__": {
            "dtype": "U8",
            "shape": [len(text_bytes)],
            "data_offsets": [8, 8 + len(text_bytes)],
        },
    }
    return pack(header, np.array([1, 2], "<f4").tobytes() + text_bytes)


AXIS = '{"coordinate":null,"id":null,"length":2,"metadata":{},"name":"t","role":null}'
FIELDS = '{"x":{"axes":[%s],"metadata":{},"tensor":"tensor_000000"}}' % AXIS  # noqa: UP031
GOOD = (
    '{"fields":' + FIELDS + ',"format":"signal-dataset.record","id":"a","metadata":{"k":1},'
    '"scene_id":null,"version":"0.1"}'
)
EDITS = {
    "duplicate key": ('"k":1', '"k":1,"k":2'),
    "duplicate key behind a blank": ('"k":1', '"k" :1,"k":2'),
    "duplicate key behind blanks": ('"k":1', '"k"  :1,"k":2'),
    "duplicate key behind a tab": ('"k":1', '"k"\t:1,"k":2'),
    "duplicate key, escaped": ('"k":1', '"k":1,"\\u006b":2'),
    "duplicate key and a decoy": ('"k":1', '"k":":","k":2'),
    "duplicate id": ('"id":"a"', '"id":"a","id":"b"'),
    "second fields": ('"format"', '"fields":{},"format"'),
    "second fields, same": ('"format"', f'"fields":{FIELDS},"format"'),
    "duplicate field": ('{"x":{', '{"x":{},"x":{'),
    "duplicate axis key": ('"length":2', '"length":2,"length":2'),
    "unknown key": ('"version"', '"extra":1,"version"'),
    "unknown axis key": ('"role":null', '"role":null,"zzz":1'),
    "NaN": ('"k":1', '"k":NaN'),
    "Infinity": ('"k":1', '"k":Infinity'),
    "huge float": ('"k":1', '"k":1e999'),
    "minus zero": ('"k":1', '"k":-0'),
    "minus zero float": ('"k":1', '"k":-0.0'),
    "65-bit integer": ('"k":1', '"k":18446744073709551616'),
    "64-bit integer": ('"k":1', '"k":18446744073709551615'),
    "negative 65-bit integer": ('"k":1', '"k":-9223372036854775809'),
    "5000 digits": ('"k":1', '"k":' + "1" * 5000),
    "leading zero": ('"k":1', '"k":01'),
    "small exponent": ('"k":1', '"k":1e-06'),
    "colon in text": ('"k":1', '"k":"a:b \\":c"'),
    "text starting with a colon": ('"k":1', '"k":":b"'),
    "lone surrogate": ('"k":1', '"k":"\\ud800"'),
    "control character": ('"k":1', '"k":"\x01"'),
    "nul": ('"k":1', '"k":"\\u0000"'),
    "unicode id": ('"id":"a"', '"id":"☃\U0001f600"'),
    "empty id": ('"id":"a"', '"id":""'),
    "number as id": ('"id":"a"', '"id":5'),
    "null id": ('"id":"a"', '"id":null'),
    "no id": ('"id":"a",', ""),
    "number as scene": ('"scene_id":null', '"scene_id":4'),
    "no scene": ('"scene_id":null,', ""),
    "null metadata": ('{"k":1}', "null"),
    "list metadata": ('{"k":1}', "[1]"),
    "no metadata": ('"metadata":{"k":1},', ""),
    "deep metadata": ('"k":1', '"k":' + "[" * 124 + "]" * 124),
    "deeper metadata": ('"k":1', '"k":' + "[" * 125 + "]" * 125),
    "too deep metadata": ('"k":1', '"k":' + "[" * 126 + "]" * 126),
    "bottomless metadata": ('"k":1', '"k":' + "[" * 3000 + "]" * 3000),
    "other version": ('"0.1"', '"0.2"'),
    "other format": ("signal-dataset.record", "signal-dataset.recorf"),
    "blank": ('"id":"a"', '"id": "a"'),
    "newline": ('"id":"a"', '\n"id":"a"'),
    "trailing blank": ('"0.1"}', '"0.1"} '),
    "trailing garbage": ('"0.1"}', '"0.1"}x'),
    "other tensor": ("tensor_000000", "tensor_000001"),
    "the descriptor as a field": ("tensor_000000", "__sds_descriptor__"),
    "number as tensor": ('"tensor_000000"', "5"),
    "no fields": (FIELDS, "{}"),
    "null fields": (FIELDS, "null"),
    "empty field name": ('{"x":', '{"":'),
    "no axes": (f"[{AXIS}]", "[]"),
    "null axes": (f"[{AXIS}]", "null"),
    "an axis too many": (AXIS, AXIS + "," + AXIS.replace('"t"', '"u"')),
    "wrong length": ('"length":2', '"length":3'),
    "true as length": ('"length":2', '"length":true'),
    "float as length": ('"length":2', '"length":2.0'),
    "empty axis name": ('"name":"t"', '"name":""'),
    "number as role": ('"role":null', '"role":4'),
    "axis id": ('"id":null', '"id":"shared"'),
    "number as axis id": ('"id":null', '"id":3'),
    "half a linear axis": ('"coordinate":null', '"coordinate":{"start":1}'),
    "linear axis": (
        '"coordinate":null',
        '"coordinate":{"metadata":{},"reference":null,"start":0,"step":1,"unit":null,"values":null}',
    ),
    "true as start": (
        '"coordinate":null',
        '"coordinate":{"metadata":{},"reference":null,"start":true,"step":1,"unit":null,"values":null}',
    ),
    "explicit axis": ('"coordinate":null', '"coordinate":{"values":[1,2]}'),
    "short explicit axis": ('"coordinate":null', '"coordinate":{"values":[1]}'),
    "dangling reference": ('"coordinate":null', '"coordinate":{"reference":"nothing"}'),
    "list axis metadata": ('"metadata":{},"name"', '"metadata":[],"name"'),
    "null axis metadata": ('"metadata":{},"name"', '"metadata":null,"name"'),
}
REFUSED_EDITS = [name for name in EDITS if name.startswith("duplicate")]


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_descriptor_is_judged_as_the_library_does(name: str) -> None:
    old, new = EDITS[name]
    assert old in GOOD
    payload = with_text(GOOD.replace(old, new, 1).encode(errors="surrogatepass"))
    decoder = RecordDecoder()
    fresh = compare(decoder, payload, ["x"])
    assert compare(decoder, with_text(GOOD.encode()), ["x"])
    assert compare(decoder, payload, ["x"]) == fresh
    assert not (fresh and name in REFUSED_EDITS)


def test_text_that_is_not_utf_8() -> None:
    decoder = RecordDecoder()
    assert compare(decoder, with_text(GOOD.encode()), ["x"])
    assert compare(decoder, with_text(GOOD.encode("utf-16")), ["x"])
    assert not compare(decoder, with_text(GOOD.encode().replace(b'"a"', b'"\xff"')), ["x"])


HEADERS: dict[str, Any] = {
    "hole": [(0, 8), (9, None)],
    "overlap": [(0, 8), (7, None)],
    "not from zero": [(1, 9), (9, None)],
    "short tensor": [(0, 4), (4, None)],
    "backwards": [(8, 0), (8, None)],
    "negative": [(-8, 0), (0, None)],
    "float": [(0.0, 8), (8, None)],
    "huge": [(0, 2**64), (2**64, None)],
}


@pytest.mark.parametrize("name", HEADERS)
def test_tensor_offsets_that_do_not_tile_the_payload_are_refused(name: str) -> None:
    text_bytes = GOOD.encode()
    (a, b), (c, _) = HEADERS[name]
    header = {
        "tensor_000000": {"dtype": "F32", "shape": [2], "data_offsets": [a, b]},
        "__sds_descriptor__": {
            "dtype": "U8",
            "shape": [len(text_bytes)],
            "data_offsets": [c, c + len(text_bytes)],
        },
    }
    assert not compare(RecordDecoder(), pack(header, bytes(8) + text_bytes + bytes(1)), ["x"])


@pytest.mark.parametrize("tail", [b"\0", b"{}", b" " * 8])
def test_bytes_after_the_last_tensor_are_refused(tail: bytes) -> None:
    decoder, payload = warmed()
    assert not compare(decoder, payload + tail, ["samples"])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"dtype":"F32"', '"dtype":"F64"'),
        ('"dtype":"F32"', '"dtype":"BF16"'),
        ('"dtype":"F32"', '"dtype":"U32"'),
        ('"dtype":"F32"', '"dtype":["F32"]'),
        ('"shape":[2]', '"shape":[-2]'),
        ('"shape":[2]', '"shape":[1,2]'),
        ('"shape":[2]', '"shape":[true,2]'),
        ('"shape":[2]', '"shape":2'),
        ('"shape":[2]', '"shape":[]'),
        ('"shape":[2]', '"shape":[2],"extra":1'),
        ('"shape":[2]', '"shape":[2],"shape":[2]'),
        ('"shape":[2]', '"shape": [2]'),
        ('{"tensor', '{"__metadata__":{"a":"b"},"tensor'),
        ('{"tensor', '{"__metadata__":{"a":1},"tensor'),
        ("__sds_descriptor__", "__sds_descriptof__"),
        ('"dtype":"U8"', '"dtype":"I8"'),
    ],
)
def test_an_edited_header_is_judged_as_the_library_does(old: str, new: str) -> None:
    payload = with_text(GOOD.encode())
    size = struct.unpack("<Q", payload[:8])[0]
    header, buffer = payload[8 : 8 + size].decode(), payload[8 + size :]
    assert old in header
    compare(RecordDecoder(), pack(header.replace(old, new, 1).encode(), buffer), ["x"])
    compare(RecordDecoder(), pack(header.replace(old, new, 1).encode() + b"  ", buffer), ["x"])


@pytest.mark.parametrize("axes", ["[]", "[%s]" % AXIS.replace("2", "1")])  # noqa: UP031
def test_a_tensor_without_dimensions_is_judged_as_the_library_does(axes: str) -> None:
    text_bytes = GOOD.replace(f"[{AXIS}]", axes).encode()
    header = {
        "tensor_000000": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]},
        "__sds_descriptor__": {
            "dtype": "U8",
            "shape": [len(text_bytes)],
            "data_offsets": [4, 4 + len(text_bytes)],
        },
    }
    accepted = compare(RecordDecoder(), pack(header, bytes(4) + text_bytes), ["x"])
    assert accepted == (axes != "[]")


def test_fields_may_name_tensors_in_any_order() -> None:
    texts = GOOD.replace('{"x":', '{"b":%s,"x":' % FIELDS[5:-1])  # noqa: UP031
    texts = texts.replace("tensor_000000", "tensor_000001", 1)
    text_bytes = texts.encode()
    header = {
        "tensor_000000": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "tensor_000001": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]},
        "__sds_descriptor__": {
            "dtype": "U8",
            "shape": [len(text_bytes)],
            "data_offsets": [16, 16 + len(text_bytes)],
        },
    }
    payload = pack(header, np.array([1, 2, 3, 4], "<f4").tobytes() + text_bytes)
    decoder = RecordDecoder()
    assert compare(decoder, payload, ["b", "x"])
    assert decoder.decode(payload, ["b"]).arrays["b"].tolist() == [3, 4]


def test_a_resource_policy_is_kept() -> None:
    payload = sds.encode(example())
    for limits in (
        {"max_fields": 2},
        {"max_tensor_bytes": 95},
        {"max_total_tensor_bytes": 100},
        {"max_axes_per_field": 1},
        {"max_encoded_record_bytes": len(payload) - 1},
        {"max_metadata_bytes": 10},
        {"max_json_depth": 3},
        {"max_json_nodes": 10},
    ):
        policy = sds.ResourcePolicy(**limits)
        with pytest.raises(sds.ValidationError):
            sds.decode(payload, policy=policy)
        decoder = RecordDecoder(resources=policy)
        for _ in range(2):
            with pytest.raises(CorruptDatasetError):
                decoder.decode(payload, ["samples"])


def test_known_layouts_do_not_go_through_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    explicit = sds.Field(np.zeros(2), (sds.Axis("f", 2, coordinate=sds.Coordinate((1, 2))),))
    records = [example(), example(fields={"spectrum": explicit})]
    decoder = RecordDecoder()
    for record in records:
        decoder.decode(sds.encode(record), list(record))
    monkeypatch.setattr("signal_batch.decoding.decode_whole", None)
    for record in records:
        neighbour = sds.Record("other", record.fields, "s2", {"snr_db": 1e-7, "t": "12:30"})
        assert_same(decoder.decode(sds.encode(neighbour), list(record)), neighbour)


def test_safe_mode_only_uses_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = RecordDecoder(safe=True)
    payload = sds.encode(example())
    assert_same(decoder.decode(payload, ["samples", "mask", "gain"]), example())
    monkeypatch.setattr("signal_batch.decoding.decode_whole", None)
    with pytest.raises(CorruptDatasetError):
        decoder.decode(payload)


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("signal_batch.decoding._HEADERS_KEPT", 5)
    decoder = RecordDecoder()
    for length in range(20):
        fields = {"x": sds.Field(np.arange(length), (sds.Axis("t", length),))}
        assert compare(decoder, sds.encode(example(fields=fields)), ["x"])
        assert len(decoder._headers) <= 5
    for start in range(20):
        axis = sds.Axis("t", 2, coordinate=sds.Coordinate(None, start, 1))
        fields = {"x": sds.Field(np.arange(2), (axis,))}
        assert compare(decoder, sds.encode(example(fields=fields)), ["x"])
    assert max(len(family.layouts) for family in decoder._families.values()) <= 4


def test_threads_share_a_decoder() -> None:
    payloads = [
        sds.encode(example(id=f"r{i}", metadata={"n": i, "pad": "x" * (i % 9)})) for i in range(200)
    ]
    decoder = RecordDecoder()
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda p: decoder.decode(p, ["samples"]), payloads * 5))
    assert [(item.id, item.metadata["n"]) for item in found] == [
        (f"r{i}", i) for i in range(200)
    ] * 5


ROW = (
    '{"fields":{"x":{"axes":[%s],"dtype":"<f4","metadata":{},"shape":[2]}},"id":"a",'  # noqa: UP031
    '"metadata":{"k":1},"scene_id":"s"}' % AXIS
)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"k":1', '"k":1,"k":2'),
        ('"k":1', '"k" :1,"k":2'),
        ('"k":1', '"k":NaN'),
        ('"id":"a"', '"id":"a","id":"b"'),
        ('"id":"a"', '"id":""'),
        ('"id":"a"', '"id":7'),
        ('"id":"a",', ""),
        ('"scene_id":"s"', '"scene_id":7'),
        ('"metadata":{"k":1}', '"metadata":[1]'),
        ('"shape":[2]', '"shape":[3]'),
        ('"shape":[2]', '"shape":[-2]'),
        ('"shape":[2]', '"shape":[2.0]'),
        ('"shape":[2]', '"shape":2'),
        ('"dtype":"<f4"', '"dtype":"float99"'),
        ('"dtype":"<f4"', '"dtype":["<f4"]'),
        ('"length":2', '"length":1'),
        ('"s"}', '"s"'),
        ('"s"}', '"s"}}'),
        (ROW, "[]"),
        (ROW, ""),
    ],
)
def test_a_malformed_metadata_row_is_refused(old: str, new: str) -> None:
    decoder = RecordDecoder()
    for _ in range(2):
        with pytest.raises(CorruptDatasetError):
            decoder.decode_row(ROW.replace(old, new, 1).encode())
        assert decoder.decode_row(ROW.encode()).metadata == {"k": 1}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"scene_id":"s"', '"scene_id":null'),
        (',"scene_id":"s"', ""),
        ('"id":"a"', '"id": "a"'),
        ('"k":1', '"k":18446744073709551616'),
        ('"dtype":"<f4"', '"dtype":"float32"'),
        ('"role":null', '"role":"x","zzz":1'),
    ],
)
def test_an_unusual_metadata_row_reads_as_the_library_does(old: str, new: str) -> None:
    payload = ROW.replace(old, new, 1).encode()
    expected = RecordMetadataCodec().decode(payload)
    found = RecordDecoder().decode_row(payload)
    assert (found.id, found.scene_id) == (expected.id, expected.scene_id)
    assert thaw(found.metadata) == thaw(expected.metadata)
    assert found.fields["x"].dtype == np.dtype("<f4")


@settings(RELAXED, max_examples=500)
@given(st.data())
def test_a_damaged_metadata_row_is_never_read_as_something_else(data: st.DataObject) -> None:
    payload = bytearray(ROW.encode())
    position = data.draw(st.integers(0, len(payload) - 1))
    piece = data.draw(st.sampled_from(SPLICES))
    stop = position + data.draw(st.integers(0, 3))
    payload[position:stop] = piece
    decoder = RecordDecoder()
    decoder.decode_row(ROW.encode())
    try:
        expected = RecordMetadataCodec().decode(bytes(payload))
    except Exception:
        with pytest.raises(CorruptDatasetError):
            decoder.decode_row(bytes(payload))
        return
    try:
        found = decoder.decode_row(bytes(payload))
    except CorruptDatasetError:
        named = isinstance(expected.id, str) and expected.id
        assert not named or not isinstance(expected.scene_id, str | None)
    else:
        assert found.id == expected.id
        assert thaw(found.metadata) == thaw(expected.metadata)


@RELAXED
@given(trees)
def test_strict_json_never_differs_from_a_strict_parser(tree: Any) -> None:
    payload = json.dumps({"v": tree}, ensure_ascii=False, separators=(",", ":")).encode()
    found = strict_json(payload, 128)
    assert found is None or thaw(found) == thaw({"v": tree})
