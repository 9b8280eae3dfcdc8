"""`tfmixed audit`: what would go wrong with this model in 16 bits.

Looks at the model without running it; with data it measures as well.
"""

import importlib
import sys
from typing import Any

from tfmixed.cli import _common


def add_parser(subparsers: Any) -> None:
    """Registers the subcommand."""
    parser = subparsers.add_parser(
        "audit",
        help="find what goes wrong with a model in 16 bits",
        description="Looks for what goes wrong with a model in 16 bits: "
        "unprotected outputs, absent loss scaling, constants out of range, "
        "layers that need float32, sizes that miss tensor cores. With data it "
        "runs a few batches and measures. The exit code is 1 if there are "
        "errors. docs/audit-codes.md explains the codes.",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="module:function, a .keras file, applications:ResNet50, or the "
        "name of a reference model",
    )
    parser.add_argument(
        "--data",
        metavar="DATA",
        help="module:function that returns (x_train, y_train), (x_val, y_val) "
        "or two tf.data.Datasets: measure on the first batches",
    )
    parser.add_argument(
        "--policy",
        metavar="NAME",
        help="audit a float32 model as if it had this policy (default: the "
        "plan for this machine, or mixed_float16)",
    )
    parser.add_argument(
        "--batch-size",
        type=int,
        metavar="N",
        help="batch size of the training",
    )
    parser.add_argument(
        "--loss",
        metavar="NAME",
        help="Keras name of the loss (default: the model's own)",
    )
    _common.add_json_option(parser)
    parser.set_defaults(run=run)


def run(args: Any) -> int:
    """Audits and prints; returns the exit code."""
    from tfmixed.audit.audit import audit

    entry = _reference(args.model)
    model, data = _load(args, entry)
    x, y = _examples(data)
    batch_size = args.batch_size
    if batch_size is None and entry is not None:
        batch_size = entry.batch_size
    result = audit(
        model,
        x,
        y,
        loss=args.loss,
        policy=args.policy,
        batch_size=batch_size,
    )
    if args.json:
        _common.print_json(result.to_dict())
    else:
        print(result)
    return 0 if result.ok else 1


def _load(args: Any, entry: Any) -> tuple[Any, Any]:
    """The model that the person names, and the data if any."""
    import keras

    from tfmixed.report.dataset import load_data
    from tfmixed.report.sources import find_source

    source = find_source(args.model if entry is None else entry.model)
    data = load_data(args.data) if args.data else None
    print(f"building {source.name}", file=sys.stderr)
    model = source.build(data)
    if not isinstance(model, keras.Model):
        raise _common.CliError(
            f"MODEL is {args.model!r}, which returned "
            f"{type(model).__name__}. Expected a function without arguments "
            "that returns a Keras model."
        )
    return model, data


def _examples(data: Any) -> tuple[Any, Any]:
    """`x` and `y` for the audit; a dataset brings both."""
    if data is None:
        return None, None
    if data.is_dataset:
        return data.train, None
    return data.train[0], data.train[1]


def _reference(name: str) -> Any:
    """The reference model of that name; None for a name of another kind."""
    if ":" in name or name.endswith(".keras"):
        return None
    try:
        registry = importlib.import_module("models.registry")
        names = registry.names()
    except (ImportError, AttributeError):
        # A person's own `models`, or none.
        names = ()
    if name in names:
        return registry.get(name)
    known = f", or one of {', '.join(names)}" if names else ""
    raise _common.CliError(
        f"MODEL is {name!r}. Expected module:function, a .keras file, "
        f"applications:ResNet50{known}."
    )
