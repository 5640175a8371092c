"""The grammar of selectors and columns, every refusal, and what a spec's identity is made of."""

from __future__ import annotations

import json
import math
import traceback
from hashlib import sha256
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from signal_batch.columns import FIELD_DTYPES, VALUE_DTYPES, Column, Selector, annotation_sets
from signal_batch.errors import SpecError
from signal_batch.execution import Execution
from signal_batch.frozen import canonical_json, check_json, checked, digest, parse_size
from signal_batch.specs import NOT_IDENTITY, ExportSpec
from signal_batch.uris import redact, refuse_credentials

BASE: dict[str, Any] = {
    "dataset": "s3://signals/radar",
    "output": "out",
    "columns": ["field:samples", "label=annotation:review-v1/label:int32"],
}

#: Another value for every field of a spec. A new field has to be given one here, and a place in
#: or out of the identity: out of it only if it can never change what is written.
CHANGED: dict[str, Any] = {
    "dataset": "s3://elsewhere/radar",
    "output": "other",
    "columns": ["field:samples"],
    "where": ["metadata:snr_db >= 5"],
    "features": "package.module:function",
    "feature_args": {"bins": 64},
    "batch_size": 64,
    "part_bytes": "64MB",
    "row_group_bytes": "8MB",
    "compression": "snappy",
    "tensors": "extension",
    "ragged": ["samples"],
    "on_error": "skip",
    "max_bad_fraction": 0.5,
    "pin": "pin.json",
    "execution": {"workers": 7},
}
OUT_OF_IDENTITY = {"dataset", "output", "where", "pin", "execution", "max_bad_fraction"}
CHANGED_EXECUTION: dict[str, Any] = {
    "runner": "dask:tcp://127.0.0.1:8786",
    "workers": 5,
    "retries": 0,
    "retry_delay_s": 0.5,
    "timeout_s": 10.0,
    "safe_decode": True,
    "credentials": "team-storage",
    "limits": ("gpu",),
}


def spec(**changes: Any) -> ExportSpec:
    return checked(ExportSpec, BASE | changes)


# --- grammar -------------------------------------------------------------------------------

names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,12}", fullmatch=True).filter(
    lambda name: name not in ("id", "ordinal")
)
set_names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,12}", fullmatch=True)
paths = st.text(st.characters(exclude_characters="?", exclude_categories=["Cs"]), min_size=1)


@st.composite
def columns(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A column as text and what it must mean."""
    name = draw(names)
    source = draw(st.sampled_from(["field", "metadata", "annotation", "annotation-field", "scene"]))
    meaning: dict[str, Any] = {"source": source, "set_name": None, "path": None}
    text = f"{name}={source}"
    if source == "scene":
        return text, meaning | {"name": name, "dtype": None, "has_default": False, "default": None}
    path = meaning["path"] = draw(paths)
    if source.startswith("annotation"):
        meaning["set_name"] = draw(set_names)
        text += f":{meaning['set_name']}/{path}"
    else:
        text += f":{path}"
    array = source in ("field", "annotation-field")
    dtype = draw(st.none() | st.sampled_from(FIELD_DTYPES if array else VALUE_DTYPES))
    if dtype is not None:
        text += f":{dtype}"
    elif path.rpartition(":")[2] in FIELD_DTYPES or path.endswith(":str"):
        path = meaning["path"] = path + "_"
        text += "_"
    meaning |= {"name": name, "dtype": dtype, "has_default": False, "default": None}
    if not array and draw(st.booleans()):
        values = st.booleans() | st.integers(-(2**63), 2**64) | st.text()
        values |= st.floats(allow_nan=False, allow_infinity=False)
        if dtype is not None and dtype.startswith(("float", "str")):
            values |= st.none()
        default = draw(values)
        text += f"?{json.dumps(default)}"
        meaning |= {"has_default": True, "default": default}
    return text, meaning


@given(columns())
def test_columns_mean_what_they_say_and_are_written_as_they_were(
    drawn: tuple[str, dict[str, Any]],
) -> None:
    text, meaning = drawn
    column = Column.parse(text)
    found = {
        **column.selector.model_dump(),
        "name": column.name,
        "dtype": column.dtype,
        "has_default": column.has_default,
        "default": column.default,
    }
    assert found == meaning
    assert type(column.default) is type(meaning["default"])
    assert str(column) == text
    assert Column.parse(str(column)) == column
    assert Column.model_validate(column.model_dump(mode="json")) == column
    assert Column.model_validate_json(column.model_dump_json()) == column


@pytest.mark.parametrize(
    ("text", "name", "source", "set_name", "path"),
    [
        ("field:samples", "samples", "field", None, "samples"),
        ("metadata:radio.snr_db", "snr_db", "metadata", None, "radio.snr_db"),
        ("annotation:a-v1/label", "label", "annotation", "a-v1", "label"),
        ("annotation:a.b/who/name", "name", "annotation", "a.b", "who/name"),
        ("annotation-field:a-v1/mask", "mask", "annotation-field", "a-v1", "mask"),
        ("id", "id", "id", None, None),
        ("ordinal", "ordinal", "ordinal", None, None),
        ("scene", "scene", "scene", None, None),
        ("where=scene", "where", "scene", None, None),
        (" x =metadata:a=b", "x", "metadata", None, "a=b"),
        ("metadata:int32", "int32", "metadata", None, "int32"),
    ],
)
def test_selectors(
    text: str, name: str, source: str, set_name: str | None, path: str | None
) -> None:
    column = Column.parse(text)
    assert (column.name, column.dtype, column.has_default) == (name, None, False)
    assert column.selector.model_dump() == {"source": source, "set_name": set_name, "path": path}
    assert column.selector.is_array is (source in ("field", "annotation-field"))
    assert Selector.parse(str(column.selector)) == column.selector


@pytest.mark.parametrize(
    ("text", "default"),
    [
        ("metadata:x?0", 0),
        ("metadata:x?-2.5", -2.5),
        ("metadata:x?true", True),
        ('metadata:x?"7"', "7"),
        ("metadata:x?dipole", "dipole"),
        ("metadata:x?", ""),
        ("metadata:x:float32?null", None),
        ("metadata:x:float64?NaN", None),
        ("metadata:x:str?null", None),
        ('metadata:x?"a=b?c"', "a=b?c"),
    ],
)
def test_defaults(text: str, default: Any) -> None:
    column = Column.parse(text)
    assert column.has_default
    assert column.default == default
    assert type(column.default) is type(default)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("samples", "starts with 'samples'; it must be one of field, metadata, annotation"),
        ("fields:samples", "starts with 'fields'"),
        ("", "starts with ''"),
        (" field:samples", "starts with ' field'"),
        ("field:", "needs a name after the colon"),
        ("metadata", "needs a name after the colon"),
        ("id:x", "'id' takes nothing after it"),
        ("scene:", "'scene' takes nothing after it"),
        ("annotation:review-v1", "must read annotation:SET/KEY"),
        ("annotation:review-v1/", "must read annotation:SET/KEY"),
        ("annotation-field:/mask", "must read annotation-field:SET/KEY"),
        ("annotation:.hidden/x", "must read annotation:SET/KEY"),
        ("metadata:a-b", "column 'a-b': a column name is letters, digits and underscores; put one"),
        ("1st=metadata:a", "column '1st': a column name is"),
        ("=metadata:a", "column '': a column name is"),
        ("x=id:int32", "'id' takes nothing after it"),
        ("id=metadata:x", "column 'id': that name always means the record's own id"),
        ("ordinal=field:x", "column 'ordinal': that name always means the record's own ordinal"),
        ("x=field:samples:str", "column 'x': dtype 'str' is not one of bool, int8"),
        ("x=metadata:a:complex64", "column 'x': dtype 'complex64' is not one of bool, int8"),
        ("x=field:a?0", "column 'x': only metadata and annotation values take a default"),
        ("x=annotation-field:s/a?0", "only metadata and annotation values take a default"),
        ("x=scene?none", "only metadata and annotation values take a default"),
        ("x=metadata:a?null", "column 'x': a null default needs a float dtype or str"),
        ("x=metadata:a:int32?null", "a null default needs a float dtype or str"),
        ("x=metadata:a:bool?NaN", "a null default needs a float dtype or str"),
        ("x=metadata:a?[1]", r"a default is a single value, not a \[1\]"),
        ('x=metadata:a?{"b": 1}', "a default is a single value"),
        ("x=metadata:a:float32?Infinity", "column 'x': a default must be finite"),
        ("x=metadata:a:float32?-Infinity", "column 'x': a default must be finite"),
        ("x=metadata:a:float32?1e999", "column 'x': a default must be finite"),
    ],
)
def test_columns_that_are_refused(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Column.parse(text)


def test_dtypes_that_do_not_exist_stay_part_of_the_key() -> None:
    # `metadata:a:b` is a key with a colon in it; only a known dtype is taken off its end.
    assert Column.parse("x=metadata:gain:half").selector.path == "gain:half"
    with pytest.raises(SpecError, match="dtype 'half' is not one of bool, int8"):
        checked(Column, {"name": "x", "selector": "metadata:gain", "dtype": "half"})


@pytest.mark.parametrize(
    "selector",
    [
        Selector(source="metadata", path="a?b"),
        Selector(source="metadata", path="gain:int32"),
        Selector(source="field", path="gain:str"),
        Selector(source="annotation", set_name="s", path="a?0"),
    ],
)
def test_keys_that_text_cannot_carry_are_refused(selector: Selector) -> None:
    """A spec travels to workers as text, so such a column would be read there as another."""
    with pytest.raises(SpecError, match=r"column 'x': .* reads as something else"):
        checked(Column, {"name": "x", "selector": selector})


def test_a_selector_without_its_key_is_refused() -> None:
    with pytest.raises(SpecError, match="needs a name after the colon"):
        checked(Column, {"name": "x", "selector": Selector(source="metadata")})


@pytest.mark.parametrize("name", ["id", "ordinal"])
def test_identity_columns_have_a_dtype_of_their_own(name: str) -> None:
    with pytest.raises(SpecError, match=f"column '{name}': {name} has a dtype of its own"):
        checked(Column, {"name": name, "selector": name, "dtype": "int32"})


def test_annotation_sets_of_columns_are_sorted_and_distinct() -> None:
    texts = ("a=annotation:z/x", "b=annotation-field:b/m", "c=annotation:z/y", "field:samples")
    assert annotation_sets(tuple(map(Column.parse, texts))) == ("b", "z")


# --- sizes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (1, 1),
        (134217728, 134217728),
        ("17", 17),
        ("17B", 17),
        ("1k", 1024),
        ("2KB", 2048),
        ("2KiB", 2048),
        ("128MB", 134217728),
        ("128MiB", 134217728),
        (" 128 mb ", 134217728),
        ("1.5GB", 1610612736),
        ("1T", 1099511627776),
    ],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "MB", "1XB", "1 000", "-1MB", "1e6", "1,5GB", True, 1.5, None]
)
def test_other_sizes_are_refused(text: Any) -> None:
    with pytest.raises(SpecError, match="is not a size; write bytes or something like 128MB"):
        parse_size(text)


@pytest.mark.parametrize("text", [0, -5, "0", "0GB", "0.5"])
def test_a_size_is_at_least_one_byte(text: Any) -> None:
    with pytest.raises(SpecError, match="at least one byte"):
        parse_size(text)


@given(st.integers(1, 10**6), st.sampled_from("KMGT"), st.sampled_from(["", "B", "iB"]))
def test_units_are_powers_of_1024(number: int, unit: str, rest: str) -> None:
    power = {"K": 10, "M": 20, "G": 30, "T": 40}[unit]
    assert parse_size(f"{number}{unit}{rest}") == number << power


# --- the spec ------------------------------------------------------------------------------

FULL = """
dataset: s3://signals/radar
output: out
columns:
  - field:samples
  - label=annotation:review-v1/label:int32
  - snr=metadata:radio.snr_db:float32?null
where: metadata:split == "train"
features: package.module:function
feature_args: {bins: 64, window: hann, levels: [1, 2.5]}
batch_size: 128
part_bytes: 64MB
row_group_bytes: 8388608
compression: zstd
ragged: samples
on_error: quarantine
max_bad_fraction: 0.25
execution: {workers: 4, timeout_s: 60}
"""


def test_a_spec_from_yaml() -> None:
    found = checked(ExportSpec, yaml.safe_load(FULL))
    assert [str(column) for column in found.columns] == [
        "samples=field:samples",
        "label=annotation:review-v1/label:int32",
        "snr=metadata:radio.snr_db:float32?null",
    ]
    assert found.where == ('metadata:split == "train"',)
    assert found.ragged == ("samples",)
    assert (found.part_bytes, found.row_group_bytes) == (67108864, 8388608)
    assert found.feature_args == {"bins": 64, "window": "hann", "levels": [1, 2.5]}
    assert (found.execution.workers, found.execution.timeout_s) == (4, 60.0)
    assert found.execution.retries == Execution().retries


@pytest.mark.parametrize("changes", [{}, *({name: CHANGED[name]} for name in CHANGED), "full"])
def test_a_spec_survives_json(changes: Any) -> None:
    found = checked(ExportSpec, yaml.safe_load(FULL)) if changes == "full" else spec(**changes)
    document = json.loads(json.dumps(found.model_dump(mode="json")))
    assert ExportSpec.model_validate(document) == found
    assert ExportSpec.model_validate_json(found.model_dump_json()) == found
    assert document["columns"] == [str(column) for column in found.columns]


@pytest.mark.parametrize("mode", ["validation", "serialization"])
def test_the_json_schema_has_columns_as_strings(mode: Any) -> None:
    schema = ExportSpec.model_json_schema(mode=mode)
    assert schema["properties"]["columns"]["items"] == {"type": "string"}
    assert set(schema["properties"]) == set(ExportSpec.model_fields)
    assert schema["additionalProperties"] is False
    if mode == "validation":
        assert schema["required"] == ["dataset", "output", "columns"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"columns": []}, "name at least one column"),
        ({"columns": ["metadata:a", "b=metadata:a", "a=field:x"]}, "unique; a is used twice"),
        ({"columns": ["field:samples", "nonsense"]}, "columns: selector 'nonsense' starts with"),
        ({"columns": 7}, "columns: Input should be a list$"),
        ({"ragged": 7}, "ragged: Input should be a list$"),
        ({"where": {"a": 1}}, "where: Input should be a list$"),
        ({"columns": [7]}, r"columns\.0"),
        ({"dataset": ""}, "a dataset or output URI is empty"),
        ({"output": "  "}, "a dataset or output URI is empty"),
        ({"batch_size": 0}, "batch_size: .* greater than or equal to 1"),
        ({"part_bytes": "big"}, "part_bytes: 'big' is not a size"),
        ({"row_group_bytes": 0}, "row_group_bytes: a size must be at least one byte"),
        ({"compression": "brotli"}, "compression: .*'zstd', 'snappy', 'lz4', 'gzip' or 'none'"),
        ({"tensors": "flat"}, "tensors: .*'nested' or 'extension'"),
        ({"on_error": "ignore"}, "on_error: .*'fail', 'skip' or 'quarantine'"),
        ({"max_bad_fraction": 1.5}, "max_bad_fraction: .* less than or equal to 1"),
        ({"workers": 3}, "workers: there is no such field; it is execution.workers"),
        ({"execution": {"workers": 0}}, r"execution\.workers: .* greater than or equal to 1"),
        (
            {"execution": {"threads": 4}},
            r"execution\.threads: there is no such field; there are runner, workers",
        ),
        ({"execution": {"timeout_s": 0}}, r"execution\.timeout_s: .* greater than 0"),
        ({"dataset": "gs://"}, "gs:// names no bucket or host; write it as in gs://NAME/folder"),
        ({"output": "s3:///x"}, "s3:///x names no bucket or host"),
        ({"output": "s3:// /x"}, "names no bucket or host"),
        ({"output": "https://host/out"}, "https://host/out can only be read; an output is"),
        ({"feature_args": {"a": math.nan}}, "feature_args"),
    ],
)
def test_specs_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        spec(**changes)


def test_options_that_no_json_can_hold() -> None:
    itself: dict[str, Any] = {}
    itself["more"] = itself
    deep: Any = 1
    for _ in range(100_000):
        deep = [deep]
    for value, words in (
        (itself, "nested too deeply or in itself"),
        (deep, "nested too deeply or in itself"),
        ({"a": math.inf}, "NaN or an infinity"),
        ({"a": {1, 2}}, "has no JSON"),
        ({"a": "\ud800"}, "a text that is not UTF-8"),
    ):
        with pytest.raises(SpecError, match=f"options .*{words}"):
            check_json("options", value)


def test_every_fault_of_a_spec_is_named_at_once() -> None:
    with pytest.raises(SpecError) as caught:
        spec(batch_size=0, part_bytes="big", execution={"retries": -1})
    for name in ("batch_size: ", "part_bytes: ", "execution.retries: "):
        assert name in str(caught.value)


def test_a_spec_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        spec().batch_size = 3  # type: ignore[misc]


SECRETS = [
    "s3://AKIAKEY:hunter2@bucket/path",
    "s3://hunter2@bucket/path",
    "s3://AKIAKEY:hun/hunter2@bucket/path",
    "s3://AKIAKEY:hunter2#x@bucket/path",
    "s3://AKIAKEY:hunter2?x@bucket/path",
    "s3://bucket/path?token=hunter2",
    "gs://bucket/path#hunter2",
    "https://me:hunter2@host:9000/a?b=hunter2#hunter2",
    "simplecache::s3://k:hunter2@bucket/x",
]


@pytest.mark.parametrize("field", ["dataset", "output"])
@pytest.mark.parametrize("uri", SECRETS)
def test_credentials_in_a_uri_are_refused_and_not_repeated(uri: str, field: str) -> None:
    with pytest.raises(SpecError, match="carries credentials or a query") as caught:
        spec(**{field: uri})
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))
    assert "hunter2" not in redact(uri)
    with pytest.raises(ValidationError) as direct:
        ExportSpec(**BASE | {field: uri})
    assert "hunter2" not in str(direct.value)
    with pytest.raises(SpecError, match="carries credentials"):
        refuse_credentials(uri)


@pytest.mark.parametrize(
    "uri",
    [
        "s3://bucket/path",
        "gs://bucket/a@b/c",
        "s3://bucket/a:b@c",
        "http://host:9000/a@b",
        "https://host/path",
        "/data/set?x#y",
        "relative/with@sign",
        "memory://out",
    ],
)
def test_uris_without_secrets_are_left_alone(uri: str) -> None:
    assert redact(uri) == uri
    refuse_credentials(uri)


def test_redaction_keeps_where_it_is() -> None:
    assert redact("s3://k:secret@bucket/a/b?x=1#y") == "s3://bucket/a/b"
    assert redact("https://me@host:9000/a") == "https://host:9000/a"


# --- identity ------------------------------------------------------------------------------


def test_every_field_has_a_place_in_or_out_of_the_identity() -> None:
    assert set(CHANGED) == set(ExportSpec.model_fields)
    assert set(CHANGED_EXECUTION) == set(Execution.model_fields)
    assert set(NOT_IDENTITY) == OUT_OF_IDENTITY


@pytest.mark.parametrize("name", CHANGED)
def test_what_can_change_the_result_changes_the_identity(name: str) -> None:
    changed = spec(**{name: CHANGED[name]})
    assert changed != spec()
    same = digest(changed.identity()) == digest(spec().identity())
    assert same is (name in OUT_OF_IDENTITY)


@pytest.mark.parametrize("name", CHANGED_EXECUTION)
def test_how_a_job_is_run_never_changes_the_identity(name: str) -> None:
    changed = spec(execution={name: CHANGED_EXECUTION[name]})
    assert changed != spec()
    assert changed.identity() == spec().identity()


@pytest.mark.parametrize(
    "name", [name for name, field in ExportSpec.model_fields.items() if not field.is_required()]
)
def test_an_explicit_default_is_the_same_identity(name: str) -> None:
    default = ExportSpec.model_fields[name].get_default(call_default_factory=True)
    assert spec(**{name: default}).identity() == spec().identity()


def test_the_identity_of_a_plain_spec_holds_nothing_but_its_columns() -> None:
    """An option added later must not change the run keys of outputs that exist."""
    assert spec().identity() == {
        "columns": ["samples=field:samples", "label=annotation:review-v1/label:int32"]
    }


def test_ways_to_write_the_same_column_are_one_identity() -> None:
    ways = ("field:samples", "samples=field:samples"), ("samples=field:samples",) * 2
    short, long = (spec(columns=[column]).identity() for column in ways[0])
    assert short == long
    nan, null = (spec(columns=[f"metadata:x:float32?{text}"]) for text in ("NaN", "null"))
    assert nan.identity() == null.identity()


def test_canonical_json_is_sorted_compact_and_strict() -> None:
    assert canonical_json({"b": [1, 2.5], "a": "é"}) == '{"a":"é","b":[1,2.5]}'.encode()
    assert digest({"a": None}) == sha256(b'{"a":null}').hexdigest()
    with pytest.raises(ValueError):
        canonical_json(math.nan)
