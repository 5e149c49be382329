"""Rewrites of slow parts of inductor's CPU graphs: linear layers, attention, GELU.

Imported only for compilation, since importing inductor takes a second.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.lowering import make_fallback
from torch._inductor.pattern_matcher import (
    Match,
    PatternMatcherPass,
    fwd_only,
    gen_pattern,
    register_graph_pattern,
)

_GELU = [-0.5, (2 * math.pi) ** -0.5, 0.5, 0.5**0.5, 1]  # constants in its derivative
_FEWEST_ROWS = 256  # for fewer rows, the cost of a sum is negligible

aten = torch.ops.aten
_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


class CPUGraphPass(CustomGraphPass):
    """Graph pass that removes copies, slow sums and a slow GELU.

    Inductor calls the same library for matrix products as eager torch. A compiled step can
    therefore only be faster between them, by fewer passes over memory, if its kernels are as fast.
    """

    def __call__(self, graph: fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=aten.addmm.default):
            if not node.kwargs and _is_static_float32(node):  # alpha and beta are 1
                _add_after_product(graph, node)
        for node in graph.find_nodes(op="call_function", target=aten.sum.dim_IntList):
            if not node.kwargs and _sums_rows(node):
                _multiply_by_ones(graph, node)
        for node in graph.find_nodes(op="call_function", target=aten.clone.default):
            if _is_static_float32(node):
                _stack_transposed(graph, node)
        _gelu_backward().apply(graph)

    def uuid(self) -> bytes:
        """Identify this version of the pass for inductor's cache of graphs."""
        return get_hash_for_files((__file__,))


def _is_static_float32(node: fx.Node) -> bool:
    value = node.meta["val"]
    return value.dtype == torch.float32 and all(isinstance(size, int) for size in value.shape)


def _sums_rows(node: fx.Node) -> bool:
    """Return True for a sum over all dimensions but the last of an operation's result.

    Sums of elementwise products are left to inductor, which need not store the product.
    """
    source, dims = node.args[0], node.args[1]
    if not isinstance(source, fx.Node) or not _is_static_float32(source):
        return False
    value = source.meta["val"]
    return (
        list(dims) == list(range(value.dim() - 1))  # type: ignore[arg-type]
        and value.numel() >= _FEWEST_ROWS * value.shape[-1]
        and source.target is not aten.mul.Tensor
    )


def _add_after_product(graph: fx.Graph, node: fx.Node) -> None:
    """Rewrite ``addmm``, which first copies the bias into every row, as a product and a sum.

    The sum has the shape in which the next layer views it, so that inductor fuses it with the
    following operations; for two shapes it would generate two loops.
    """
    bias, left, right = node.args
    view = next((user for user in node.users if user.target in _VIEWS), None)
    with graph.inserting_before(node):
        total = _call(graph, aten.mm.default, (left, right), node.meta["val"])
        if view is not None:
            total = _view(graph, total, view.meta["val"])
        total = _call(graph, aten.add.Tensor, (total, bias), total.meta["val"])
        if view is not None:
            view.replace_all_uses_with(total)
            graph.erase_node(view)
            total = _view(graph, total, node.meta["val"])
    node.replace_all_uses_with(total)
    graph.erase_node(node)


def _multiply_by_ones(graph: fx.Graph, node: fx.Node) -> None:
    """Rewrite a sum over rows, (N, C) -> (C,), as a product with a row of ones.

    The gradients of biases, including LayerNorm's, are such sums. Inductor reads column by column,
    at a third of the speed of eager torch; the product runs at memory speed.
    """
    source: fx.Node = node.args[0]  # type: ignore[assignment]
    rows = source.meta["val"].flatten(0, -2)
    with graph.inserting_before(node):
        ones = graph.call_function(
            aten.full.default,
            ([1, len(rows)], 1.0),
            {"dtype": rows.dtype, "device": rows.device, "pin_memory": False},
        )
        ones.meta["val"] = rows.new_ones(1, len(rows))
        total = _call(graph, aten.mm.default, (ones, _view(graph, source, rows)), rows[:1])
        total = _view(graph, total, node.meta["val"])
    node.replace_all_uses_with(total)
    graph.erase_node(node)


def _stack_transposed(graph: fx.Graph, node: fx.Node) -> None:
    """Rewrite the contiguous clone of a permuted stack as the stack of its permuted parts.

    The gradients of queries, keys and values are then copied once, not twice. In the graph, a stack
    along dimension 0 is a ``cat`` and a ``view``.
    """
    permute = _only_source(node, (aten.permute.default,))
    view = permute and _only_source(permute, _VIEWS)
    cat = view and _only_source(view, (aten.cat.default,))
    if not permute or not view or not cat or len(cat.args) > 1 or cat.kwargs:  # another dimension
        return
    parts: Any = cat.args[0]
    dims: Any = permute.args[1]
    shapes = {part.meta["val"].shape for part in parts}
    whole = (len(parts), *parts[0].meta["val"].shape)
    is_stack = len(shapes) == 1 and view.meta["val"].shape == whole
    if not is_stack or not node.meta["val"].is_contiguous():
        return
    order = [dim % len(whole) for dim in dims]  # of which some may count from the end
    to, of_part = order.index(0), [dim - 1 for dim in order if dim]
    with graph.inserting_before(node):
        moved: list[fx.Node] = []
        for part in parts:
            value = part.meta["val"].permute(of_part)
            part = _call(graph, aten.permute.default, (part, of_part), value)
            moved.append(_call(graph, aten.unsqueeze.default, (part, to), value.unsqueeze(to)))
        total = _call(graph, aten.cat.default, (moved, to), node.meta["val"])
    node.replace_all_uses_with(total)
    for old in (node, permute, view, cat):
        graph.erase_node(old)


@functools.cache
def _gelu_backward() -> PatternMatcherPass:
    """Return the pass that runs the backward pass of GELU in oneDNN, as eager torch does.

    Inductor's kernel for the formula takes 1.6 times as long.
    """
    passes = PatternMatcherPass()
    make_fallback(aten.gelu_backward.default, warn=False, override_decomp=True)
    formula = gen_pattern(
        lambda grad, x: aten.gelu_backward(grad, x), [torch.empty(1), torch.empty(1)], fwd_only
    )

    def is_gelu(match: Match) -> bool:
        """Compare the constants, which the pattern leaves open."""
        numbers = [arg for node in match.nodes for arg in node.args if isinstance(arg, int | float)]
        return (
            len(numbers) == len(_GELU)
            and all(map(math.isclose, sorted(numbers), _GELU))
            and _is_static_float32(match.output_node())
        )

    @register_graph_pattern(formula, extra_check=is_gelu, pass_dict=passes)
    def call_library(match: Match, grad: fx.Node, x: fx.Node) -> None:
        old = match.output_node()
        with match.graph.inserting_before(old):
            new = _call(match.graph, aten.gelu_backward.default, (grad, x), old.meta["val"])
        old.replace_all_uses_with(new)
        match.erase_nodes()

    return passes


def _only_source(node: fx.Node, targets: tuple[object, ...]) -> fx.Node | None:
    """Return the first argument if it is one of these operations and has no other user."""
    source = node.args[0]
    if isinstance(source, fx.Node) and source.target in targets and len(source.users) == 1:
        return source
    return None


def _view(graph: fx.Graph, node: fx.Node, value: torch.Tensor) -> fx.Node:
    return _call(graph, aten.reshape.default, (node, list(value.shape)), value)


def _call(graph: fx.Graph, target: object, args: tuple[object, ...], value: object) -> fx.Node:
    """Add a node whose result has the properties of ``value``, a fake tensor."""
    node = graph.call_function(target, args)  # type: ignore[arg-type]
    node.meta["val"] = value
    return node
