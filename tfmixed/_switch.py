"""Switching what a model computes in, and switching it back."""

import keras

from tfmixed import _keras

_16_BIT = ("float16", "bfloat16")


class ModelSwitch:
    """Switches the computing of one model, and switches it back.

    What the model is like is remembered when the switch is made.

    Args:
        model: The model.
        policy: The policy for its layers.

    Raises:
        TypeError: If `model` is not a Keras model.
        ValueError: For a quantized policy.
    """

    def __init__(self, model: keras.Model, policy: keras.DTypePolicy) -> None:
        if not isinstance(model, keras.Model):
            raise TypeError(
                "precision(model=...) expects a Keras model. Received: "
                f"{model!r} of type {type(model).__name__}."
            )
        if policy.quantization_mode is not None:
            raise ValueError(
                f"precision(model=...) cannot switch to {policy.name!r}: "
                "quantizing changes the weights. Use model.quantize."
            )
        self._model = model
        self._policy = policy
        layers = _keras.flatten_layers(model)
        self._before = [(layer, _keras.layer_policy(layer)) for layer in layers]
        self._inputs = [(layer, _keras.input_dtype(layer)) for layer in layers]
        self._functions = _keras.compiled_functions(model)
        self._token = _keras.compile_token(model)

    def on(self) -> None:
        """Switches the model."""
        has_16_bit = any(
            layer.compute_dtype in _16_BIT for layer, _ in self._before
        )
        to_16_bit = self._policy.compute_dtype in _16_BIT
        exempt = ["float32"] if has_16_bit and to_16_bit else []
        to_switch = [
            layer
            for layer, _ in self._before
            if layer.quantization_mode is None
            # Not float64, nor the integers and strings of lookup layers.
            and layer.compute_dtype in (*_16_BIT, "float32")
            and layer.compute_dtype not in exempt
        ]
        for layer in to_switch:
            _keras.set_layer_policy(layer, self._policy)
        for layer, dtype in self._inputs:
            if dtype in _16_BIT:
                _keras.set_input_dtype(layer, self._policy.compute_dtype)
        _keras.set_compiled_functions(self._model, None)

    def off(self) -> None:
        """Gives every layer its own policy back, and the model its functions.

        Layers that the model made inside the block follow the layer that they
        stand in.
        """
        for layer, policy in self._before:
            _keras.set_layer_policy(layer, policy)
        for layer, dtype in self._inputs:
            if dtype is not None:
                _keras.set_input_dtype(layer, dtype)
        known = {id(layer) for layer, _ in self._before}
        for layer, _ in self._before:
            self._adopt(layer, known)
        # After a `compile` inside the block the old functions are out of date.
        recompiled = _keras.compile_token(self._model) is not self._token
        _keras.set_compiled_functions(
            self._model, None if recompiled else self._functions
        )

    def _adopt(self, parent: keras.Layer, known: set[int]) -> None:
        for layer in _keras.child_layers(parent):
            if id(layer) in known:
                continue
            known.add(id(layer))
            if _keras.layer_policy(layer) == self._policy:
                _keras.set_layer_policy(layer, _keras.layer_policy(parent))
            if _keras.input_dtype(layer) in _16_BIT:
                _keras.set_input_dtype(layer, parent.compute_dtype)
            self._adopt(layer, known)
