"""`python -m models`: measures the reference models and fills the table."""

import argparse
import os
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

from models import registry

_SEEDS = 3
_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: the arguments; `sys.argv` when `None`.

    Returns:
        0 when all went well, 1 if a model failed, 2 for bad input, 130 after
        Ctrl-C.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        entries = _chosen(args)
        return _list(entries) if args.list else _run(entries, args)
    except ValueError as error:
        print(f"models: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            "models: interrupted. What was finished is kept; the same command "
            "without --fresh goes on from there.",
            file=sys.stderr,
        )
        return _INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m models",
        description="Trains every reference model in float32 and under the "
        "plan for this machine, and writes the table of models/README.md. "
        "Results are kept in models/results.json after each model: Ctrl-C "
        "loses only the one that runs, and the same command goes on. A model "
        "that has results with the same settings is left out.",
    )
    parser.add_argument(
        "--models",
        metavar="A,B",
        help="measure these, and these again (default: all without results)",
    )
    parser.add_argument(
        "--seeds",
        type=_count,
        default=_SEEDS,
        metavar="N",
        help=f"trainings under each policy (default: {_SEEDS})",
    )
    parser.add_argument(
        "--epochs",
        type=_count,
        metavar="N",
        help="epochs of a training (default: what the registry suggests)",
    )
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="measure also what has results",
    )
    parser.add_argument(
        "--list", action="store_true", help="list the models and stop"
    )
    parser.add_argument(
        "--folder",
        type=pathlib.Path,
        default=pathlib.Path(__file__).parent,
        metavar="PATH",
        help="where README.md and results.json are (default: models)",
    )
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f"got {text!r}; expected a whole number of at least 1"
        )
    return int(text)


def _chosen(args: argparse.Namespace) -> list[registry.Entry]:
    names = args.models.split(",") if args.models else registry.names()
    return [registry.get(name.strip()) for name in names]


def _list(entries: Sequence[registry.Entry]) -> int:
    width = max(len(entry.name) for entry in entries)
    for entry in entries:
        print(f"{entry.name:{width}}  {entry.description}")
    return 0


def _run(entries: list[registry.Entry], args: argparse.Namespace) -> int:
    # Before TensorFlow is imported: its notes, and on a GPU the memory that
    # the processes which measure memory need.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    from models import table

    readme = args.folder / "README.md"
    kept = args.folder / "results.json"
    table.check_readme(readme)
    results = table.read_results(kept)
    again = args.fresh or args.models
    todo = [
        entry for entry in entries if again or not _has(results, entry, args)
    ]
    if args.fresh:
        # So that an interrupted run goes on without `--fresh`.
        for entry in todo:
            results.pop(entry.name, None)
        table.write_results(kept, results)
    _say(f"{len(todo)} to measure, {len(entries) - len(todo)} have results.")
    failed = []
    for index, entry in enumerate(todo):
        _say(f"[{index + 1}/{len(todo)}] {entry.name}: {entry.description}")
        start = time.monotonic()
        try:
            result = _measure(entry, args)
        except Exception as error:
            failed.append(entry.name)
            _say(f"{entry.name}: failed: {type(error).__name__}: {error}")
            continue
        results[entry.name] = result
        table.write_results(kept, results)
        table.write_table(readme, table.to_markdown(results, registry.names()))
        _say(f"{entry.name}: kept after {time.monotonic() - start:.0f} s.")
    _say(f"The table is in {readme}.")
    if failed:
        _say(f"Without results: {', '.join(failed)}.")
    return 1 if failed else 0


def _measure(entry: registry.Entry, args: argparse.Namespace) -> dict[str, Any]:
    from tfmixed.report.compare import compare

    comparison = compare(
        entry.model,
        entry.dataset,
        seeds=args.seeds,
        epochs=args.epochs or entry.epochs,
        batch_size=entry.batch_size,
        learning_rate=entry.learning_rate,
    )
    if comparison.partial:
        # Half a result would look like a whole one in the table.
        raise KeyboardInterrupt
    return comparison.to_dict()


def _has(
    results: dict[str, Any], entry: registry.Entry, args: argparse.Namespace
) -> bool:
    """Whether the results of a model are those that were asked for."""
    wanted = {
        "model": entry.model,
        "data": entry.dataset,
        "seeds": args.seeds,
        "epochs": args.epochs or entry.epochs,
        "batch_size": entry.batch_size,
        "learning_rate": entry.learning_rate,
    }
    settings = results.get(entry.name, {}).get("settings", {})
    return all(settings.get(name) == wanted[name] for name in wanted)


def _say(message: str) -> None:
    print(f"models: {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
