"""Problems of KernelBench as requirements, if the model is attention: a call of scaled_dot_product_attention.

The file is Python, and is read as a syntax tree: nothing of it is run. Understood are integers that have names, tensors
of ``torch.rand`` and the like in ``get_inputs``, and one call in ``forward`` whose operands are its own arguments. Head
dimensions and lengths are required as they are; batch and heads are bounds, since float64 takes long for all of them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from attnswitch.errors import InvalidProblem
from attnswitch.names import one_of, shown
from attnswitch.verify.demands.requirement import Requirement

__all__ = ["requirement"]

_CALL = "scaled_dot_product_attention"
_MAKERS = ("rand", "randn", "zeros", "ones", "empty")
_DTYPES = {"float16": "fp16", "half": "fp16", "bfloat16": "bf16", "float32": "fp32", "float": "fp32", "float64": "fp64"}
#: Letters of a file that is read.
_MOST = 2**18


class _Tensor(NamedTuple):
    shape: tuple[int, ...]
    dtype: str


def requirement(text: str) -> Requirement:
    """What the source ``text`` requires. Raises ``InvalidProblem`` for what is not understood."""
    if len(text) > _MOST:
        raise InvalidProblem(f"it has {len(text):,} letters: expected at most {_MOST:,}")
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InvalidProblem(f"it is not Python that can be read: {error}") from None
    forward = _function(tree, "forward")
    calls = [node for node in _calls(forward) if _name(node.func) == _CALL]
    if len(calls) != 1:
        raise InvalidProblem(f"forward calls {_CALL} {len(calls)} times: expected once, of a model that is attention")
    arguments, inputs = [argument.arg for argument in forward.args.args[1:]], _inputs(tree)
    words = {word.arg: word.value for word in calls[0].keywords if word.arg is not None}
    if len(words) < len(calls[0].keywords):
        raise InvalidProblem(f"{_CALL} is given **{{...}}, which is not read: expected its arguments by name")
    operands = [*calls[0].args, *(words.pop(name) for name in ("query", "key", "value") if name in words)]
    names = [node.id if isinstance(node, ast.Name) else "" for node in operands]
    if len(names) != 3 or not set(names) <= set(arguments) or len(arguments) != len(inputs):
        raise InvalidProblem(
            f"{_CALL} is given {shown(', '.join(map(ast.unparse, operands)))}: expected three arguments of forward"
            f" ({', '.join(arguments)}), which get_inputs makes"
        )
    made = dict(zip(arguments, inputs, strict=True))
    return Requirement.parse(",".join([*_sizes(*(made[name] for name in names)), *_features(words)]))


def _sizes(query: _Tensor, key: _Tensor, value: _Tensor) -> Iterator[str]:
    """Bounds of batch and heads, the lengths and dimensions, and the dtype."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if len(tensor.shape) != 4 or tensor.dtype != query.dtype:
            raise InvalidProblem(
                f"{name} is of shape {tensor.shape} in {tensor.dtype}: expected batch, heads, length, head dimension,"
                " and one dtype"
            )
    (batch, heads, queries, dim), (_, shared, keys, _), dim_v = query.shape, key.shape, value.shape[3]
    yield from (f"B<={batch}", f"H<={heads}", f"Lq={queries}", f"Lk={keys}", f"D={dim}", f"dtype={query.dtype}")
    if dim_v != dim:
        yield f"Dv={dim_v}"
    if shared != heads:
        yield "gqa"


def _features(words: dict[str, ast.expr]) -> Iterator[str]:
    """What the other arguments of the call ask for."""
    for name, node in words.items():
        value = node.value if isinstance(node, ast.Constant) else ast.unparse(node)
        if name == "is_causal" and value is True:
            yield "causal!"
        elif name == "scale" and value is not None:
            yield "scale"
        elif value not in (None, False, 0.0) and name != "enable_gqa":
            raise InvalidProblem(f"{_CALL} is given {name}={shown(value)}: expected is_causal, scale or enable_gqa")


def _inputs(tree: ast.Module) -> list[_Tensor]:
    """The tensors that ``get_inputs`` returns."""
    function, numbers = _function(tree, "get_inputs"), _integers(tree)
    local = {
        node.targets[0].id: node.value
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    returned = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
    if len(returned) != 1 or not isinstance(returned[0], ast.List | ast.Tuple):
        raise InvalidProblem("get_inputs returns no list that is written out: expected return [Q, K, V]")
    items = (local.get(node.id, node) if isinstance(node, ast.Name) else node for node in returned[0].elts)
    return [_tensor(node, numbers) for node in items]


def _tensor(node: ast.expr, numbers: dict[str, int]) -> _Tensor:
    if not isinstance(node, ast.Call) or _name(node.func) not in _MAKERS:
        raise InvalidProblem(f"get_inputs returns {shown(ast.unparse(node))}: expected torch.rand of sizes")
    arguments = node.args
    if len(arguments) == 1 and isinstance(arguments[0], ast.Tuple | ast.List):
        arguments = arguments[0].elts
    shape = tuple(_integer(argument, numbers) for argument in arguments)
    dtype = next((_name(word.value) for word in node.keywords if word.arg == "dtype"), "float32")
    if dtype not in _DTYPES:
        raise InvalidProblem(f"dtype {shown(dtype)}: {one_of(dtype, _DTYPES)}")
    return _Tensor(shape, _DTYPES[dtype])


def _integers(tree: ast.Module) -> dict[str, int]:
    """Module-level names of integers."""
    return {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and type(node.value.value) is int
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _integer(node: ast.expr, numbers: dict[str, int]) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name) and node.id in numbers:
        return numbers[node.id]
    raise InvalidProblem(f"a size is {shown(ast.unparse(node))}: expected an integer, or the name of one")


def _function(tree: ast.Module, name: str) -> ast.FunctionDef:
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name]
    if len(found) != 1:
        raise InvalidProblem(f"it has {len(found)} functions named {name}: expected one")
    return found[0]


def _calls(function: ast.FunctionDef) -> Iterator[ast.Call]:
    return (node for node in ast.walk(function) if isinstance(node, ast.Call))


def _name(node: ast.expr) -> str:
    """The last part of a dotted name."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
