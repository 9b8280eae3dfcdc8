"""The layer that `prepare` puts before an operation that needs float32."""

import keras


@keras.saving.register_keras_serializable(package="tfmixed")
class ToFloat32(keras.layers.Identity):
    """Gives its input on as float32.

    It stands before those `keras.ops` operations of a functional model that
    are unsafe in 16 bits, which have no dtype policy of their own.
    `tfmixed.to_float32` takes it out again.

    Example:

    >>> layer = ToFloat32(dtype="float32")
    >>> keras.backend.standardize_dtype(layer(np.ones(2, "float16")).dtype)
    'float32'
    """
