"""An open model file: configuration, metadata and tensors, through the native reader's mapping."""

from __future__ import annotations

import ctypes as ct
import os
import struct
from collections.abc import Iterator
from typing import Any, TypeVar

from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.gguf_format import Activation, Key
from powerinfer_toolkit.runtime import native_lib
from powerinfer_toolkit.runtime.model_parts import TensorEntry, model_bytes, read_firing
from powerinfer_toolkit.runtime.native_handle import NativeHandle
from powerinfer_toolkit.runtime.plan.shape import ModelShape

T = TypeVar("T")

# GGUF value type ids -> struct codes of the little-endian scalars
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_DAMAGED = "the file is damaged: convert or download it again"
_ACTIVATIONS = (Activation.SILU, Activation.RELU)  # by PI_ACTIVATION_*


class ModelFile(NativeHandle):
    """The native model behind a path; engines on it must be freed before it is closed."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Map the file and check it; PiError when it is no model this toolkit runs."""
        self.path = os.fspath(path)
        self._library = native_lib.load()
        super().__init__(self._library.pi_model_close, "model")
        self._library.pi_model_open(os.fsencode(self.path), ct.byref(self.handle))
        try:
            self.shape = self._read_shape()
        except BaseException:
            self.close()
            raise

    def metadata(self, name: str) -> Any:  # noqa: ANN401 - the type is the file's
        """Return a key's value (int, float, bool, str or a list of these), None when it is absent.

        PiError for a text that is not UTF-8.
        """
        value = native_lib.Value()
        self._library.pi_model_find_key(self.handle, name.encode(), ct.byref(value))
        return _decode(value, name) if value.data else None

    def keys(self) -> list[str]:
        """Return the names of all metadata keys in file order."""
        name, value = ct.c_char_p(), native_lib.Value()
        names = []
        for index in range(self._library.pi_model_key_count(self.handle)):
            self._library.pi_model_key(self.handle, index, ct.byref(name), ct.byref(value))
            names.append((name.value or b"").decode("utf-8", "replace"))
        return names

    def tensors(self) -> Iterator[TensorEntry]:
        """Yield all tensors in file order."""
        name, info = ct.c_char_p(), native_lib.TensorInfo()
        for index in range(self._library.pi_model_tensor_count(self.handle)):
            self._library.pi_model_tensor(self.handle, index, ct.byref(name), ct.byref(info))
            text = (name.value or b"").decode("utf-8", "replace")
            yield TensorEntry(text, info.type, tuple(info.shape[: info.n_dims]), info.n_bytes)

    def _read_shape(self) -> ModelShape:
        native = native_lib.ModelConfig()
        self._library.pi_model_get_config(self.handle, ct.byref(native))
        fields = {name: getattr(native, name) for name, *_ in native._fields_ if name != "size"}
        for name in ("sparse_layout", "has_predictors", "tied_head", "float32_weights"):
            fields[name] = bool(fields[name])
        fields["activation"] = _ACTIVATIONS[native.activation]
        sizes = model_bytes(self.tensors(), native.n_layers)
        # upstream's files carry trained predictors and no key about them
        kind = "mlp" if native.has_predictors else "none"
        return ModelShape(
            **fields,
            predictor_kind=self._typed(Key.PREDICTOR_KIND, str) or kind,
            perplexity_loss=self._typed(Key.PREDICTOR_PERPLEXITY_LOSS, float),
            predictor_bytes=sum(layer.predictor for layer in sizes.layers),
            sizes=sizes,
            firing=read_firing(self.metadata, native.n_layers),
            predicted_density=self._typed(Key.PREDICTOR_DENSITY, float),
            exact_layers=tuple(self._typed(Key.PREDICTOR_EXACT_LAYERS, list) or ()),
        )

    def _typed(self, name: str, kind: type[T]) -> T | None:
        value = self.metadata(name)
        if value is not None and not isinstance(value, kind):
            message = f"metadata key {name} should be a {kind.__name__}, not {value!r:.40}"
            raise PiError(message, hint=_DAMAGED)
        return value


def _decode(value: native_lib.Value, name: str) -> Any:  # noqa: ANN401 - the type is the file's
    data = ct.string_at(value.data, value.n_bytes)
    if value.type == _STRING:
        return _decode_text(data, name)
    kind = value.element_type
    if value.type == _ARRAY and kind == _STRING:
        return _decode_texts(data, value.count, name)
    if kind not in _SCALARS:
        raise PiError(
            f"metadata key {name} has the unsupported value type {kind}",
            hint=_DAMAGED,
        )
    numbers = struct.unpack(f"<{value.count}{_SCALARS[kind]}", data)
    return list(numbers) if value.type == _ARRAY else numbers[0]


def _decode_texts(data: bytes, count: int, name: str) -> list[str]:
    texts, begin = [], 0
    for _ in range(count):
        (length,) = struct.unpack_from("<Q", data, begin)
        begin += 8
        texts.append(_decode_text(data[begin : begin + length], name))
        begin += length
    return texts


def _decode_text(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as failure:
        raise PiError(
            f"metadata key {name} holds a text that is not UTF-8",
            hint=_DAMAGED,
        ) from failure
