"""`tfmixed compare`: does mixed precision pay for this model, on this machine.

Trains the model under each policy with several seeds, prints a table and a
verdict, and writes both as JSON and Markdown.
"""

import argparse
import importlib
import os
import pathlib
import sys
from typing import TYPE_CHECKING
from typing import Any

from tfmixed.cli import _common

if TYPE_CHECKING:
    from tfmixed.report.comparison import Comparison

_EPOCHS = 2
_BATCH_SIZE = 128
_INTERRUPTED = 130


def add_parser(subparsers: Any) -> None:
    """Registers the subcommand."""
    parser = subparsers.add_parser(
        "compare",
        help="train in float32 and in mixed precision, and judge",
        description="Trains a model under each dtype policy with several "
        "seeds, with step times taken in turns and memory in fresh processes. "
        "Prints a table and a verdict. Ctrl-C stops early and prints what has "
        "been measured.",
    )
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="module:function, a .keras file, or applications:ResNet50 "
        "(default: models.convnet:convnet)",
    )
    parser.add_argument(
        "data",
        nargs="?",
        metavar="DATA",
        help="module:function that returns (x_train, y_train), (x_val, y_val) "
        "or two tf.data.Datasets (default: what the models folder suggests)",
    )
    _add_training_options(parser)
    parser.add_argument(
        "--rounds",
        type=int,
        default=10,
        metavar="N",
        help="rounds of step times (default: 10)",
    )
    parser.add_argument(
        "--no-memory",
        action="store_true",
        help="do not measure peak memory",
    )
    parser.add_argument(
        "--output",
        default="tfmixed-compare",
        metavar="PREFIX",
        help="write PREFIX.json and PREFIX.md (default: tfmixed-compare)",
    )
    parser.add_argument(
        "--html", action="store_true", help="write PREFIX.html as well"
    )
    _common.add_json_option(parser)
    parser.set_defaults(run=run)


def _add_training_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--policies",
        metavar="A,B",
        help="dtype policies: float32, mixed_float16, mixed_bfloat16 "
        "(default: float32 and the plan for this machine)",
    )
    parser.add_argument(
        "--seeds",
        type=int,
        default=3,
        metavar="N",
        help="trainings under each policy (default: 3)",
    )
    parser.add_argument(
        "--epochs",
        type=int,
        metavar="N",
        help=f"epochs of a training (default: {_EPOCHS}, or as suggested)",
    )
    parser.add_argument(
        "--batch-size",
        type=int,
        metavar="N",
        help=f"batch size (default: {_BATCH_SIZE}, or as suggested)",
    )
    parser.add_argument(
        "--learning-rate",
        type=float,
        metavar="X",
        help="learning rate (default: the builder's, or as suggested)",
    )
    parser.add_argument(
        "--optimizer",
        metavar="NAME",
        help="Keras name of the optimizer (default: the builder's, or adam)",
    )
    parser.add_argument(
        "--loss",
        metavar="NAME",
        help="Keras name of the loss (default: the builder's, or inferred)",
    )
    parser.add_argument(
        "--jit-compile",
        action=argparse.BooleanOptionalAction,
        help="compile the step with XLA (default: as the plan says)",
    )


def run(args: argparse.Namespace) -> int:
    """Compares, prints and writes; returns the exit code."""
    prefix = _checked_prefix(args.output)
    # Read when TensorFlow first uses a GPU. Otherwise this process would take
    # all its memory, and leave none to those that measure memory.
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    settings = _settings(args)
    from tfmixed.report.compare import compare

    comparison = compare(
        policies=args.policies.split(",") if args.policies else None,
        seeds=args.seeds,
        optimizer=args.optimizer,
        loss=args.loss,
        jit_compile=args.jit_compile,
        rounds=args.rounds,
        memory=not args.no_memory,
        **settings,
    )
    paths = _write(comparison, prefix, args.html)
    if args.json:
        _common.print_json(comparison.to_dict())
    else:
        print(comparison)
    print(
        f"\nWritten: {', '.join(paths)}",
        file=sys.stderr if args.json else sys.stdout,
    )
    return _INTERRUPTED if comparison.partial else 0


def _checked_prefix(output: str) -> pathlib.Path:
    """Finds out before the long work that the result can be written."""
    prefix = pathlib.Path(output)
    if not prefix.name or prefix.is_dir():
        raise _common.CliError(
            f"--output got {output!r}, which is a folder. Expected the "
            "beginning of file names, for example results/compare."
        )
    folder = prefix.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise _common.CliError(
            f"--output got {output!r}, but {str(folder)!r} is not a folder "
            "that can be written to. Create it or pass another prefix."
        )
    return prefix


def _write(
    comparison: "Comparison", prefix: pathlib.Path, with_html: bool
) -> list[str]:
    texts = {
        ".json": comparison.to_json() + "\n",
        ".md": comparison.to_markdown(),
    }
    if with_html:
        texts[".html"] = comparison.to_html()
    paths = []
    for suffix, text in texts.items():
        path = prefix.with_name(prefix.name + suffix)
        path.write_text(text, encoding="utf-8")
        paths.append(str(path))
    return paths


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """Fills in what the person left open, from the models folder."""
    entry = _entry(args.model)
    if entry is None and args.data is None:
        raise _common.CliError(
            f"MODEL is {args.model!r} and DATA is missing. Pass DATA as "
            "module:function that returns (x_train, y_train), (x_val, y_val)."
        )

    def choose(name: str, default: Any) -> Any:
        given = getattr(args, name)
        if given is not None:
            return given
        return getattr(entry, name, default)

    return {
        "builder": entry.model if entry else args.model,
        "data": args.data or (entry.dataset if entry else None),
        "epochs": choose("epochs", _EPOCHS),
        "batch_size": choose("batch_size", _BATCH_SIZE),
        "learning_rate": choose("learning_rate", None),
    }


def _entry(model: str | None) -> Any:
    """Finds a reference model; the default one when none is named."""
    try:
        registry = importlib.import_module("models.registry")
        entries = [registry.get(name) for name in registry.names()]
    except (ImportError, AttributeError):
        # A person's own `models`, or none.
        entries = []
    if model is None:
        if not entries:
            raise _common.CliError(
                "there is no folder `models` with reference models here "
                f"({os.getcwd()}). Pass your own: tfmixed compare "
                "module:build_model module:load_data. Or run it in a clone "
                "of the repository."
            )
        return entries[0]
    return next(
        (entry for entry in entries if model in (entry.name, entry.model)),
        None,
    )
