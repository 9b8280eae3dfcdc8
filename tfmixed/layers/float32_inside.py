"""Twins that compute in float32 and give 16 bits on.

In a functional model a layer that needs float32 simply has a float32 policy:
whatever follows casts for itself. Code of a user's own layer is not so
tolerant: `x + self.norm(y)` fails in TensorFlow when one side is float16. There
these twins stand, with the dtypes that the layer around them expects.
"""

import functools
from typing import Any

import keras

_HALF = ("float16", "bfloat16")


class Float32Inside:
    """Mixed into a layer of Keras: 16 bits in and out, float32 between.

    It adds no state and no arguments: a layer of Keras becomes its twin, and
    its old self again, by a change of class.
    """

    compute_dtype: str

    @property
    def autocast(self) -> bool:
        """False: inputs beyond the range of 16 bits come in as they are."""
        return False

    @autocast.setter
    def autocast(self, value: bool) -> None:
        # Keras sets it for every layer.
        del value

    def _widen(self, tensor: Any) -> Any:
        # Keras would have cast to the compute dtype.
        is_half = self.compute_dtype in _HALF
        return _cast(tensor, "float32" if is_half else self.compute_dtype)

    def _narrow(self, tensor: Any) -> Any:
        return _cast(tensor, self.compute_dtype)


def _cast(tensor: Any, dtype: str) -> Any:
    """Casts what is floating point; ids, masks and the like stay."""
    present = getattr(tensor, "dtype", None)
    if present is None or not keras.backend.is_float_dtype(present):
        return tensor
    if keras.backend.standardize_dtype(present) == dtype:
        return tensor
    return keras.ops.cast(tensor, dtype)


def _twin(stock: Any) -> type:
    """The twin of a layer class, registered under the name of its stock."""

    # Keras reads from the signature what the layer can be called with.
    @functools.wraps(stock.call)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = keras.tree.map_structure(self._widen, (args, kwargs))
        outputs = stock.call(self, *args, **kwargs)
        return keras.tree.map_structure(self._narrow, outputs)

    twin = type(
        stock.__name__,
        (Float32Inside, stock),
        {
            "call": call,
            "__doc__": f"`keras.layers.{stock.__name__}` in 16 bits, with "
            "float32 inside.",
            "__module__": __name__,
        },
    )
    register = keras.saving.register_keras_serializable(package="tfmixed")
    registered: type = register(twin)
    return registered


# Not Normalization and Rescaling, which cast by themselves.
_NAMES = (
    "UnitNormalization AveragePooling1D AveragePooling2D AveragePooling3D "
    "GlobalAveragePooling1D GlobalAveragePooling2D GlobalAveragePooling3D "
    "AdaptiveAveragePooling1D AdaptiveAveragePooling2D "
    "AdaptiveAveragePooling3D MaxPooling3D GlobalMaxPooling3D "
    "AdaptiveMaxPooling1D AdaptiveMaxPooling2D AdaptiveMaxPooling3D "
    "Multiply Dot Average Softmax Masking Lambda ELU"
)

# From a layer class of Keras to its twin.
INSIDE: dict[type, type] = {
    getattr(keras.layers, name): _twin(getattr(keras.layers, name))
    for name in _NAMES.split()
    if hasattr(keras.layers, name)
}
