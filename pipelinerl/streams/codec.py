"""Encodes records as msgpack. A numpy array is one extension value that holds its raw bytes.

    array = Ext 1: dtype code (uint8) | number of dimensions (uint8, 1 or 2) | dimensions (uint32) | raw bytes, C order

All numbers are little-endian. Any input gives either a record of the type or a ``StreamError``. Decoded arrays own
their memory and are writable.
"""

import math
import struct
import types
from typing import Annotated, Any, Generic, TypeVar, Union, get_args, get_origin

import msgspec
import numpy as np

from pipelinerl.errors import CorruptStreamError, StreamError
from pipelinerl.streams.frames import Buffer

R = TypeVar("R")

_EXT_ARRAY = 1  # of the format above
_DTYPES = {
    code: np.dtype(name)
    for code, name in enumerate(
        ("<i4", "<f4", "<i8", "<f8", "|u1", "|i1", "<u2", "<i2", "<u4", "<u8", "<f2", "|b1"),
        start=1,
    )
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_DIMS = {1: struct.Struct("<BBI"), 2: struct.Struct("<BBII")}


class Codec(Generic[R]):
    """Encodes and decodes records of one type: a Struct, a union of tagged Structs, or ``Any`` for plain data.

    Example: ``Codec(MicroBatch).decode(Codec(MicroBatch).encode(batch))``.
    """

    def __init__(self, record_type: Any):
        self._classes = _struct_classes(record_type)
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_encode_other)
        self._decoder: msgspec.msgpack.Decoder[R] = msgspec.msgpack.Decoder(record_type, ext_hook=_decode_ext)

    def encode(self, record: R) -> bytes:
        """Encodes one record. Raises ``StreamError`` for a record of another type or a value without an encoding."""
        if self._classes and not isinstance(record, self._classes):
            raise StreamError(f"a {type(record).__name__} was written where {_names(self._classes)} belongs")
        try:
            return self._encoder.encode(record)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise StreamError(f"a {type(record).__name__} cannot be encoded: {error}") from error

    def decode(self, payload: Buffer) -> R:
        """Decodes one record. Raises ``StreamError`` if ``payload`` is not a record of this type."""
        try:
            return self._decoder.decode(payload)
        except msgspec.ValidationError as error:
            raise StreamError(f"not a record of type {_names(self._classes)}: {error}") from error
        except (ValueError, RecursionError, MemoryError) as error:
            raise CorruptStreamError(f"not msgpack: {error}") from error


def jsonable(value: Any) -> Any:
    """Converts a value for ``json.dumps``: arrays to lists, bytes to hex, non-finite numbers to strings."""
    if isinstance(value, np.ndarray):
        return jsonable(value.tolist())
    if isinstance(value, dict):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).hex()
    if value is None or isinstance(value, str | int | float):
        return value
    return str(value)


def _encode_other(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.ndim:
        return _encode_array(value)
    if isinstance(value, np.ndarray | np.generic):
        return value.item()
    if hasattr(value, "model_dump"):  # a pydantic model of a user's domain
        return value.model_dump()
    raise TypeError(f"no encoding for a value of type {type(value).__name__}")


def _encode_array(array: np.ndarray) -> msgspec.msgpack.Ext:
    if array.ndim not in _DIMS:
        raise ValueError(f"an array of shape {array.shape}: only 1-D and 2-D arrays are records' fields")
    dtype = array.dtype.newbyteorder("<")
    if dtype not in _CODES:
        raise ValueError(f"an array of dtype {array.dtype}: use one of {', '.join(map(str, _CODES))}")
    raw = np.ascontiguousarray(array, dtype=dtype)
    return msgspec.msgpack.Ext(
        _EXT_ARRAY, b"".join((_DIMS[array.ndim].pack(_CODES[dtype], array.ndim, *array.shape), raw.data))
    )


def _decode_ext(code: int, data: memoryview) -> np.ndarray:
    if code != _EXT_ARRAY:
        raise CorruptStreamError(f"unknown extension type {code}")
    dims = _DIMS.get(data[1]) if len(data) >= 2 else None
    if dims is None or len(data) < dims.size or data[0] not in _DTYPES:
        raise CorruptStreamError("an array without a valid dtype and shape")
    dtype_code, _, *shape = dims.unpack_from(data)
    dtype = _DTYPES[dtype_code]
    if math.prod(shape) * dtype.itemsize != len(data) - dims.size:
        raise CorruptStreamError(f"an array of shape {tuple(shape)} and {dtype} in {len(data) - dims.size} bytes")
    return np.frombuffer(data, np.uint8, offset=dims.size).copy().view(dtype).reshape(shape)


def _struct_classes(record_type: Any) -> tuple[type, ...]:
    """Returns the classes of a Struct or union type. Empty if every type is accepted."""
    origin = get_origin(record_type)
    if record_type is Any:
        return ()
    if origin is Annotated:
        return _struct_classes(get_args(record_type)[0])
    if origin in (Union, types.UnionType):
        return tuple(cls for arg in get_args(record_type) for cls in _struct_classes(arg))
    return (record_type,) if isinstance(record_type, type) else ()


def _names(classes: tuple[type, ...]) -> str:
    return " | ".join(cls.__name__ for cls in classes) or "Any"
