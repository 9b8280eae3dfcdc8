"""Follows loss and gradients through the source of a training step.

Only what is certain is reported: each name carries what is known of its value
(loss, scaled, gradient, ...), a name of unknown origin carries nothing.
"""

import ast
import dataclasses
from collections.abc import Iterable
from collections.abc import Iterator

LOSS = "loss"
SCALED = "scaled"
GRADIENT = "gradient"
UNSCALED = "gradient of an unscaled loss"
DIVIDED = "unscaled gradient"
OPEN = "of unknown scale"

_CLIPS = ("clip_by_global_norm", "clip_by_norm", "clip_by_value", "clip")
_SCALES = ("dynamic_scale", "loss_scale", "loss_scale_factor", "_scale")
_REDUCES = ("reduce_", "mean", "sum", "norm", "global_norm")
_APPLIES = ("apply", "apply_gradients")
_HALF = ("float16", "bfloat16", "half")


@dataclasses.dataclass(frozen=True)
class Misuse:
    """One wrong line.

    Args:
        line: Its number in the file.
        message: What is wrong.
        fix: What to do.
    """

    line: int
    message: str
    fix: str


def misuses(
    tree: ast.Module,
    first: int,
    scaled: set[str],
    unscaled: set[str],
    helpers: Iterable[str] = (),
) -> list[Misuse]:
    """Finds what a step does wrong with the loss scale.

    Args:
        tree: The source of one function.
        first: Number of its first line in the file.
        scaled: Attributes of the model that hold scaling optimizers.
        unscaled: Attributes that hold optimizers without scaling.
        helpers: Methods that scale the loss themselves.

    Returns:
        What is wrong, in the order of the lines.
    """
    reader = _Reader(scaled, unscaled, {"scale_loss", *helpers})
    for node in tree.body:
        reader.visit(node)
    found = {(m.line, m.message): m for m in reader.found}
    ordered = sorted(found.values(), key=lambda misuse: misuse.line)
    return [
        dataclasses.replace(misuse, line=misuse.line + first - 1)
        for misuse in ordered
    ]


class _Reader(ast.NodeVisitor):
    def __init__(
        self, scaled: set[str], unscaled: set[str], scaling: set[str]
    ) -> None:
        self.found: list[Misuse] = []
        self._scaling = scaling
        self._scaled = scaled
        self._unscaled = unscaled
        self._tags: dict[str, set[str]] = {}
        self._aliases: dict[str, str] = {}

    def visit_Assign(self, node: ast.Assign) -> None:  # noqa: N802
        self.generic_visit(node)
        tags = self._tags_of(node.value)
        for target in node.targets:
            self._assign(target, node.value, tags)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:  # noqa: N802
        self.generic_visit(node)
        if isinstance(node.target, ast.Name):
            known = self._tags.setdefault(node.target.id, set())
            known |= self._tags_of(node.value) & {SCALED, OPEN}

    def _assign(
        self, target: ast.expr, value: ast.expr, tags: set[str]
    ) -> None:
        if isinstance(target, ast.Tuple):
            for element in target.elts:
                self._assign(element, value, tags)
        elif isinstance(target, ast.Name):
            old = self._tags.get(target.id, set())
            # A branch may or may not have scaled it: take it as scaled.
            keeps = {SCALED} if SCALED in old and LOSS in old else set()
            mentions = target.id in _names(value)
            self._tags[target.id] = tags | (keeps if mentions else set())
            if "loss" in target.id.lower():
                self._tags[target.id].add(LOSS)
            holder = _attribute(value)
            if holder in self._scaled | self._unscaled:
                self._aliases[target.id] = holder

    def _tags_of(self, node: ast.expr) -> set[str]:
        """What is known of the value of an expression."""
        tags: set[str] = set()
        for name in _names(node):
            tags |= self._tags.get(name, set())
        if isinstance(node, ast.Call) and _called(node).startswith(_REDUCES):
            # A penalty on gradients is no gradient.
            tags.discard(GRADIENT)
        for call in _calls(node):
            name = _called(call)
            if name in self._scaling:
                tags = {SCALED, LOSS}
            elif _hands_on_optimizer(call):
                # It may scale the loss.
                tags.add(OPEN)
            elif name == "gradient" and call.args:
                target = self._tags_of(call.args[0])
                tags -= {SCALED, LOSS, OPEN}
                tags.add(GRADIENT)
                tags.add(self._kind_of(call.args[0], target))
            elif name in ("unscale", "get_unscaled_gradients"):
                tags.add(DIVIDED)
            elif name.startswith(("compute_loss", "_compute_loss")):
                tags.add(LOSS)
        return tags

    def _kind_of(self, target: ast.expr, tags: set[str]) -> str:
        if SCALED in tags:
            return SCALED
        # A loss of which nothing says that it was scaled.
        is_loss = LOSS in tags or _is_called_loss(target)
        return UNSCALED if is_loss and OPEN not in tags else OPEN

    def visit_BinOp(self, node: ast.BinOp) -> None:  # noqa: N802
        self.generic_visit(node)
        if not isinstance(node.op, ast.Div):
            return
        if self._is_gradient(node.left) and _mentions_scale(node.right):
            self._report(
                node,
                "gradients are divided by the loss scale by hand, and "
                "`apply` divides them again.",
                "Use `gradients = optimizer.unscale(gradients)`, after which "
                "`apply` does not divide.",
            )

    def visit_ListComp(self, node: ast.ListComp) -> None:  # noqa: N802
        # [g / scale for g in gradients]: g is what gradients are.
        for generator in node.generators:
            tags = self._tags_of(generator.iter)
            for name in _names(generator.target):
                self._tags[name] = set(tags)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:  # noqa: N802
        self.generic_visit(node)
        name = _called(node)
        if name in _CLIPS and node.args:
            self._check_clip(node)
        elif name in _APPLIES and isinstance(node.func, ast.Attribute):
            self._check_apply(node, node.func.value)
        elif name == "cast" and len(node.args) > 1:
            self._check_cast(node)

    def _check_clip(self, node: ast.Call) -> None:
        tags = self._tags_of(node.args[0])
        if GRADIENT in tags and SCALED in tags and DIVIDED not in tags:
            self._report(
                node,
                f"`{_called(node)}` clips gradients that are still multiplied "
                "by the loss scale, so it clips far too much.",
                "Clip what `optimizer.unscale(gradients)` returns, or give "
                "the inner optimizer `clipnorm`.",
            )

    def _check_apply(self, node: ast.Call, optimizer: ast.expr) -> None:
        if isinstance(optimizer, ast.Attribute) and (
            optimizer.attr == "inner_optimizer"
        ):
            self._report(
                node,
                "`inner_optimizer.apply` goes past the loss scaling: the "
                "gradients are too large by the scale, and bad steps are not "
                "skipped.",
                "Call `apply` of the loss-scaling optimizer itself.",
            )
            return
        holder = self._holder(optimizer)
        if holder is None or not node.args:
            return
        tags = self._tags_of(node.args[0])
        if holder in self._scaled and UNSCALED in tags and SCALED not in tags:
            self._report(
                node,
                f"`{holder}.{_called(node)}` gets the gradients of a loss "
                "that did not pass through `scale_loss`, and divides them by "
                "the loss scale.",
                "Pass the loss through `optimizer.scale_loss(loss)` inside "
                "the GradientTape.",
            )

    def _check_cast(self, node: ast.Call) -> None:
        value, dtype = node.args[0], ast.unparse(node.args[1])
        tags = self._tags_of(value)
        is_half = dtype.strip("'\"").rpartition(".")[2] in _HALF
        is_loss = LOSS in tags or _is_called_loss(value)
        if is_half and is_loss and GRADIENT not in tags:
            self._report(
                node,
                f"the loss is cast to {dtype}: times the loss scale it "
                "overflows.",
                "Keep the loss in float32.",
            )

    def _holder(self, optimizer: ast.expr) -> str | None:
        if isinstance(optimizer, ast.Name):
            return self._aliases.get(optimizer.id)
        return _attribute(optimizer)

    def _is_gradient(self, node: ast.expr) -> bool:
        return GRADIENT in self._tags_of(node)

    def _report(self, node: ast.expr, message: str, fix: str) -> None:
        self.found.append(Misuse(node.lineno, message, fix))


def _names(node: ast.AST) -> list[str]:
    return [n.id for n in ast.walk(node) if isinstance(n, ast.Name)]


def _hands_on_optimizer(call: ast.Call) -> bool:
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    words = [word for one in arguments for word in _words(one)]
    return any("optimizer" in word.lower() for word in words)


def _words(node: ast.AST) -> list[str]:
    attributes = [
        n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)
    ]
    return attributes + _names(node)


def _is_called_loss(node: ast.AST) -> bool:
    return any("loss" in name.lower() for name in _names(node))


def _calls(node: ast.AST) -> Iterator[ast.Call]:
    return (n for n in ast.walk(node) if isinstance(n, ast.Call))


def _called(call: ast.Call) -> str:
    function = call.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _attribute(node: ast.AST) -> str | None:
    """`self.optimizer` as `"optimizer"`."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return node.attr
    return None


def _mentions_scale(node: ast.AST) -> bool:
    return any(
        word in _SCALES or word.endswith("_scale") for word in _words(node)
    )
