"""The fewest layers in float32 with which a model is as exact as wanted."""

import contextlib
import math
import time
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import keras

from tfmixed.audit import batches as batch_lib
from tfmixed.audit import step
from tfmixed.audit.batches import Batch
from tfmixed.audit.minimal_bench import Bench
from tfmixed.audit.minimal_found import Found
from tfmixed.audit.minimal_found import summary
from tfmixed.audit.minimal_original import unharmed
from tfmixed.audit.minimal_search import Search
from tfmixed.audit.steps_shown import watched


def minimal_float32(
    model: keras.Model,
    x: Any,
    y: Any = None,
    tolerance: float = 1e-2,
    *,
    policy: Any = None,
    loss: Any = None,
    batch_size: int = 32,
    batches: int = 2,
    limit: int = 200,
    verbose: bool = True,
) -> Any:
    """Finds the fewest layers that have to stay in float32, by measuring.

    Starts from what `prepare(model, policy)` makes. If its outputs or its
    gradients are too far from those in float32, layers are put into float32
    until they are not, and each is given back again if the others are enough:
    none of those that are left can be spared. There may be other sets of
    layers that do as well.

    Errors are relative, in the Euclidean norm, the worst of all batches
    counting: of each output, of the gradient of all weights as one vector, and
    of the gradient of each weight that has at least 1 % of the norm of that
    vector. What is not finite has an infinite error. In float16 gradients are
    measured at the loss scale of the optimizer (2^15 without one), or a lower
    one where they overflow, as dynamic loss scaling would have it. Dropout
    drops the same units in each precision; inside recurrent layers it is off.
    A custom layer that draws by itself counts as inexact. The gradient of a
    deep network is far more sensitive than its output: in bfloat16 an error
    of several percent is common, and a small tolerance keeps most layers.

    Weights, statistics, seeds, metrics and dtypes of the model are afterwards
    what they were. One that was not built is built by its data.

    Args:
        model: A Keras model, in float32 or mixed.
        x: Array, list, tuple or dict of arrays, `tf.data.Dataset`, or
            `keras.utils.PyDataset`. Datasets yield (x, y) or (x, y, weights).
        y: The targets, or None.
        tolerance: The largest relative error that is accepted.
        policy: What `prepare` takes. Entries of a `DTypePolicyMap` are kept.
        loss: What `compile(loss=...)` takes. By default the loss that the
            model was compiled with; without one a stand-in, the mean of the
            squares of the outputs.
        batch_size: How many rows of arrays are in a batch.
        batches: How many batches are measured.
        limit: After how many measurements to stop trying to give back layers.
        verbose: Whether to show progress on a terminal, and a summary.

    Returns:
        A `keras.dtype_policies.DTypePolicyMap`: the 16-bit policy by default,
        float32 for the layers that were found. `prepare(model, that_map)`
        makes what was measured. It has no entries if none are needed.

    Raises:
        TypeError: If `model` is not a Keras model.
        ValueError: For a tolerance that is not above 0 or a policy that is not
            of 16 bits; if the model is not finite in float32, gives another
            result each time, or is not within tolerance with all in float32.

    Example:

    >>> model = keras.Sequential(
    ...     [
    ...         keras.Input((4,)),
    ...         keras.layers.Dense(4, kernel_initializer="ones", name="big"),
    ...         keras.layers.LayerNormalization(),
    ...         keras.layers.Dense(1, name="last"),
    ...     ]
    ... )
    >>> x, y = np.full((8, 4), 3e4), np.zeros((8, 1))  # sums of 120,000
    >>> found = tfmixed.minimal_float32(
    ...     model, x, y, policy="mixed_float16", loss="mae", verbose=False
    ... )
    >>> list(found)
    ['big']
    >>> model = tfmixed.prepare(model, found)

    To keep it takes two lines of Keras:

    >>> config = keras.saving.serialize_keras_object(found)
    >>> list(keras.saving.deserialize_keras_object(config))
    ['big']
    """
    start = time.monotonic()
    _check(model, tolerance, batch_size, batches, limit)
    taken = _batches(model, x, y, batches, batch_size)
    _check_targets(model, loss, taken[0])
    step.build(model, taken[0])
    with unharmed(model) as original, _shown(verbose) as tick:
        bench = Bench(original, policy, taken, loss, tick)
        _check_bench(bench, tolerance)
        found = _search(bench, tolerance, limit)
        policy_map = bench.policy_map(found.kept)
    if verbose:
        rows = sum(map(len, taken))
        print(summary(model.name, bench, found, tolerance, rows))
        print(f"  It took {time.monotonic() - start:.0f} s.")
    return policy_map


def _search(bench: Bench, tolerance: float, limit: int) -> Found:
    before = bench.errors(())
    if before.worst <= tolerance:
        return Found((), before, before)
    for exact in (False, True):
        # Only where one dtype decides about another is the first not enough.
        bench.is_exact = exact
        everything = bench.errors(bench.units)
        if everything.worst > tolerance:
            continue
        search = Search(
            lambda kept, quick: bench.errors(kept, tolerance, int(quick)).worst,
            tolerance,
            limit,
        )
        search.run(bench.units)
        kept = [unit for unit in bench.units if unit in search.best]
        after = bench.proof(kept)
        if after is not None and after.worst <= tolerance:
            return Found(kept, before, after, search.is_complete)
    other = ""
    if bench.policy == "mixed_float16":
        other = 'try policy="mixed_bfloat16", which has the range of float32, '
    raise ValueError(
        f"minimal_float32: with all layers in float32 that `prepare` gives to "
        f"{bench.policy} the error is {everything}, and without any {before}; "
        f"neither is within the tolerance of {tolerance:g}. The cause is not "
        "in one of these layers, but in the data, in the output, or in an "
        f"operation between layers. Raise the tolerance, {other}or look at "
        "the model with tfmixed.audit."
    )


def _check_bench(bench: Bench, tolerance: float) -> None:
    if bench.policy == "float32":
        raise ValueError(
            "minimal_float32: the policy is float32, so there is nothing to "
            'search for. Expected `policy="mixed_float16"` or '
            '`policy="mixed_bfloat16"`.'
        )
    difference = bench.reference()
    if difference.worst > tolerance:
        raise ValueError(
            "minimal_float32: the same step in float32 gives another result "
            f"each time ({difference}), by more than the tolerance of "
            f"{tolerance:g}, so nothing can be measured. Use random layers of "
            "Keras, or keras.random with a seed generator, in place of "
            "tf.random."
        )


def _check(
    model: Any, tolerance: float, batch_size: int, batches: int, limit: int
) -> None:
    if not isinstance(model, keras.Model):
        raise TypeError(
            "minimal_float32(model, x, y) expects a Keras model. Received: "
            f"{model!r} of type {type(model).__name__}."
        )
    is_number = isinstance(tolerance, int | float)
    if not is_number or not 0 < tolerance < math.inf:
        raise ValueError(
            f"minimal_float32: `tolerance` got {tolerance!r}. Expected a "
            "number above 0, a relative error such as 0.01."
        )
    counts = {"batch_size": batch_size, "batches": batches, "limit": limit}
    for name, value in counts.items():
        if value < 1:
            raise ValueError(
                f"minimal_float32: `{name}` got {value}. Expected 1 or more."
            )


def _check_targets(model: Any, loss: Any, batch: Batch) -> None:
    own = type(model).compute_loss is not keras.Model.compute_loss
    compiled = getattr(model, "loss", None) is not None and not own
    if batch.y is None and (loss is not None or compiled):
        raise ValueError(
            "minimal_float32: there is a loss, but no targets: `y` is None. "
            "Pass the targets; without a loss, of a model that is not "
            "compiled, the mean of the squares of the outputs is used."
        )


def _batches(
    model: keras.Model, x: Any, y: Any, batches: int, batch_size: int
) -> list[Batch]:
    inputs = getattr(model, "inputs", None) or []
    fixed = next((int(t.shape[0]) for t in inputs if t.shape[0]), None)
    taken = list(batch_lib.take(x, y, batches, fixed or batch_size))
    taken = [b for b in taken if fixed in (None, len(b))]
    if not taken:
        raise ValueError(
            "minimal_float32: the data yields no batch"
            + (f" of {fixed} rows, which the model needs." if fixed else ".")
        )
    return taken


@contextlib.contextmanager
def _shown(visible: bool) -> Iterator[Callable[[int], None]]:
    """Yields a function that shows how many measurements there were."""
    console = watched()
    if console is None or not visible:
        yield lambda count: None
        return
    with console.status("measuring in float32") as status:
        yield lambda count: status.update(f"{count} measurements")
