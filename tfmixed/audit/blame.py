"""Which layer makes a step non-finite, and what to do about it?"""

from typing import Any

import keras
import tensorflow as tf

from tfmixed.audit import batches as batch_lib
from tfmixed.audit import culprit as culprit_lib
from tfmixed.audit import step
from tfmixed.audit import tally
from tfmixed.audit import verdicts
from tfmixed.audit.cure import Trials
from tfmixed.audit.cure import find_cure
from tfmixed.audit.verdicts import Blame
from tfmixed.model import computes_in_float16


def blame(
    model: keras.Model,
    x: Any,
    y: Any = None,
    *,
    loss: Any = None,
    loss_scale: float | None = None,
) -> Blame:
    """Finds the first layer and tensor of a step that are not finite.

    The step is run eagerly, forward and backward, without an update, and run
    again with changes until one makes it finite. The model is afterwards what
    it was.

    Args:
        model: A Keras model.
        x: The inputs of one batch: array, list, tuple or dict of arrays; or
            a dataset, whose first batch is taken.
        y: The targets, or None.
        loss: What `compile(loss=...)` takes. By default the loss that the
            model was compiled with; without one, a stand-in.
        loss_scale: The loss scale, for a model that computes in float16. By
            default that of its optimizer, or 2^15 if there is none.

    Returns:
        A `Blame`.

    Raises:
        TypeError: If `model` is not a Keras model.
        ValueError: If the arrays do not have the same number of rows.

    Example:

    >>> with tfmixed.precision("mixed_float16"):
    ...     model = keras.Sequential(
    ...         [
    ...             keras.Input((1,)),
    ...             keras.layers.Activation("exponential", name="grows"),
    ...             keras.layers.Dense(1, dtype="float32"),
    ...         ]
    ...     )
    >>> x, y = np.array([[20.0]]), np.array([[0.0]])
    >>> verdict = tfmixed.blame(model, x, y, loss="mae")
    >>> verdict.layer, verdict.tensor, verdict.float32_too
    ('grows', 'output', False)
    >>> verdict.keep_float32
    ('grows',)
    >>> model = tfmixed.prepare(model, keep_float32=verdict.keep_float32)
    """
    if not isinstance(model, keras.Model):
        raise TypeError(
            "blame(model, x, y) expects a Keras model. Received: "
            f"{model!r} of type {type(model).__name__}."
        )
    batch = batch_lib.whole(x, y)
    step.build(model, batch)
    scale = step.loss_scale_of(model) if loss_scale is None else loss_scale
    scale = float(scale) if computes_in_float16(model) else 1.0
    data = batch_lib.named(model, batch)
    trials = Trials(model, batch, loss, data)
    found = trials.run(scale)
    first = culprit_lib.find(found, data)
    if first is None:
        return verdicts.nothing(found)
    exact = trials.run(1.0, policy="float32")
    float32_too = culprit_lib.find(exact, data) is not None
    for name, tensor in data:
        bad = batch_lib.bad_data(name, tensor, batch.rows)
        if bad is not None:
            return verdicts.bad_data(bad, float32_too, tensor.dtype.name)
    weight = _bad_weight(model)
    if weight is not None:
        return verdicts.damaged(model, weight, float32_too)
    if float32_too:
        return verdicts.diverged(first)
    value = culprit_lib.value(exact, first.key)
    if value is not None and first.key[0] in ("gradients", "weight", "loss"):
        value *= scale
    order = [id(record.layer) for record in found.records]
    cure = find_cure(trials, first, scale, order)
    return verdicts.precision(first, value, cure, scale)


def _bad_weight(model: keras.Model) -> Any:
    for variable in model.variables:
        value = tf.convert_to_tensor(variable.value)
        if value.dtype.is_floating and not tally.is_finite(value):
            return variable
    return None
