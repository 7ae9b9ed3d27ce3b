"""The codec: every record comes back equal; every other byte string is a StreamError."""

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from pydantic import BaseModel

from pipelinerl.errors import CorruptStreamError, StreamError
from pipelinerl.records import ActorRecord, GroupDropped, MicroBatch, RolloutGroup, TrainerMessage
from pipelinerl.streams.codec import Codec, jsonable
from tests.says import says

DTYPES = ("i4", "f4", "i8", "f8", "u1", "i1", "u2", "i2", "u4", "u8", "f2", "?")


def equal(left: Any, right: Any) -> bool:
    """Deep equality of records; arrays by dtype, shape and value, NaN equal to itself."""
    if isinstance(left, np.ndarray):
        return (
            isinstance(right, np.ndarray)
            and (left.dtype, left.shape) == (right.dtype, right.shape)
            and np.array_equal(left, right, equal_nan=left.dtype.kind == "f")
        )
    if isinstance(left, msgspec.Struct):
        return type(left) is type(right) and all(
            equal(getattr(left, name), getattr(right, name)) for name in left.__struct_fields__
        )
    if isinstance(left, tuple | list):
        return len(left) == len(right) and all(map(equal, left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    return bool(left == right or (left != left and right != right))


arrays = st.sampled_from(DTYPES).flatmap(
    lambda dtype: hnp.arrays(np.dtype(dtype), hnp.array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=9))
)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary() | arrays,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@given(plain)
@settings(max_examples=200, deadline=None)
def test_plain_data_comes_back_equal(value: Any):
    assert equal(Codec(Any).decode(Codec(Any).encode(value)), value)


@given(arrays, st.integers(1, 3))
@settings(max_examples=100, deadline=None)
def test_arrays_that_are_not_contiguous_or_native_come_back_equal(array: np.ndarray, step: int):
    codec: Codec[Any] = Codec(Any)
    for variant in (array[::step], array.T, array.astype(array.dtype.newbyteorder(">"))):
        decoded = codec.decode(codec.encode(variant))
        assert np.array_equal(decoded, variant, equal_nan=variant.dtype.kind == "f")
        assert decoded.dtype == array.dtype
        assert decoded.flags.aligned
        assert decoded.flags.writeable


def test_records_come_back_equal(make_group: Callable[..., RolloutGroup], make_micro_batch: Callable[..., MicroBatch]):
    group, batch = make_group(attempts=3), make_micro_batch()
    assert equal(Codec(ActorRecord).decode(Codec(ActorRecord).encode(group)), group)
    assert equal(Codec(MicroBatch).decode(Codec(MicroBatch).encode(batch)), batch)
    without = msgspec.structs.replace(batch, ref_logprobs=None, sentinel=True)
    assert equal(Codec(MicroBatch).decode(Codec(MicroBatch).encode(without)), without)


def test_decode_of_every_truncation_is_an_error(make_group: Callable[..., RolloutGroup]):
    codec: Codec[RolloutGroup] = Codec(RolloutGroup)
    payload = codec.encode(make_group(attempts=1))
    for length in range(len(payload)):
        with pytest.raises(StreamError):
            codec.decode(payload[:length])


def test_decode_of_fuzzed_payloads_is_a_record_of_the_type_or_an_error(make_group: Callable[..., RolloutGroup]):
    rng = random.Random(7)
    codec: Codec[RolloutGroup | GroupDropped] = Codec(ActorRecord)
    payload = codec.encode(make_group(attempts=2))
    for _ in range(10_000):
        fuzzed = bytearray(payload)
        for _ in range(rng.randrange(1, 4)):
            fuzzed[rng.randrange(len(fuzzed))] = rng.randrange(256)
        with suppress(StreamError):
            assert isinstance(codec.decode(fuzzed), RolloutGroup | GroupDropped)


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"\xc1", "not msgpack"),
        (b"\x91" * 100_000, "not msgpack"),
        (b"\xdd\xff\xff\xff\xff", "not msgpack"),
        (b"\xc7\x01\x09x", "unknown extension type 9"),
        (b"\xc7\x00\x01", "without a valid dtype and shape"),
        (b"\xc7\x06\x01\x63\x01\x00\x00\x00\x00", "without a valid dtype and shape"),
        (b"\xc7\x06\x01\x01\x03\x00\x00\x00\x00", "without a valid dtype and shape"),
        (b"\xc7\x06\x01\x01\x01\x01\x00\x00\x00", r"shape \(1,\) and int32 in 0 bytes"),
        (b"\xc7\x0a\x01\x01\x02\xff\xff\xff\xff\xff\xff\xff\xff", r"in 0 bytes"),
    ],
)
def test_decode_of_bad_bytes_names_what_is_wrong(payload: bytes, message: str):
    with pytest.raises(CorruptStreamError, match=message):
        Codec(Any).decode(payload)


def test_decode_of_another_record_names_the_field(make_micro_batch: Callable[..., MicroBatch]):
    payload = Codec(MicroBatch).encode(make_micro_batch())
    with pytest.raises(StreamError, match=says("RolloutGroup", "GroupDropped", "OrderResumed")):
        Codec(ActorRecord).decode(payload)
    plain_list = Codec(Any).encode({**Codec(Any).decode(payload), "token_ids": [1, 2, 3]})
    with pytest.raises(StreamError, match=r"Expected `numpy.ndarray`, got `list` - at `\$.token_ids`"):
        Codec(MicroBatch).decode(plain_list)


def test_encode_refuses_what_has_no_encoding():
    for value, message in (
        (np.zeros((2, 2, 2)), "only 1-D and 2-D"),
        (np.zeros(2, np.complex64), "dtype complex64"),
        (object(), "no encoding for a value of type object"),
        (2**70, "cannot be encoded"),
    ):
        with pytest.raises(StreamError, match=message):
            Codec(Any).encode({"x": value})
    with pytest.raises(StreamError, match=says("dict", "WeightUpdateSuccess")):
        Codec(TrainerMessage).encode({})  # type: ignore[arg-type]


def test_encode_takes_numpy_scalars_and_pydantic_models():
    class Model(BaseModel):
        text: str = "x"

    value = {"a": np.float32(0.5), "b": np.int64(3), "c": np.array(2.0), "d": Model()}
    assert Codec(Any).decode(Codec(Any).encode(value)) == {"a": 0.5, "b": 3, "c": 2.0, "d": {"text": "x"}}


def test_jsonable_has_no_values_that_json_lacks():
    value = {1: np.array([1.5, np.nan], np.float32), "b": (b"\x01\xff", None, True), "c": float("inf")}
    assert jsonable(value) == {"1": [1.5, "nan"], "b": ["01ff", None, True], "c": "inf"}
