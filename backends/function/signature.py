"""``Reading``: what the parameters of a function say, read from its signature and nothing else."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from attnswitch.errors import InvalidProblem

from .likes import LIKES, UNSAID, Like, Manner

__all__ = ["Reading", "read"]

_NAMED = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.KEYWORD_ONLY,
)
#: Parameters that only one like has, and those of which any two tell flash-attn from a plain function.
_OF_VARLEN, _OF_PAGES = "cu_seqlens_k", ("block_table", "block_tables", "page_table")
_OF_OWN = {"causal_alignment", "key_lengths"}
_OF_TORCH = {"enable_gqa", "attn_mask", "is_causal"}
_OF_FLASH = {"softmax_scale", "window_size", "alibi_slopes", "deterministic", "return_attn_probs"}


@dataclass(frozen=True, slots=True)
class Reading:
    """A function, and how it is called."""

    #: What it is called in messages: ``attention()``.
    call: str
    function: Callable[..., Any]
    signature: inspect.Signature
    like: Like
    library: str
    promises: frozenset[str]
    #: Its parameters by what they say, and what of that has to be given.
    says: Mapping[str, str]
    required: frozenset[str]
    #: Whether its backward is known to be missing.
    forward_alone: bool
    #: Whether the like was deduced.
    deduced: bool

    def takes(self, word: str) -> bool:
        """Whether a parameter says ``word``, or two that have a side of the window each."""
        return word in self.says or (word == "window" and {"left", "right"} <= self.says.keys())

    def __call__(self, arguments: Mapping[str, Any]) -> Any:
        """What the function returns for arguments by what they say; parameters left out have their defaults."""
        bound = inspect.BoundArguments(
            self.signature,
            {self.says[word]: value for word, value in arguments.items()},
        )
        bound.apply_defaults()
        return self.function(*bound.args, **bound.kwargs)


def read(function: Callable[..., Any], name: str, manner: Manner) -> Reading:
    """Read the signature of ``function``, called ``name``.

    Raises ``InvalidProblem`` where it does not tell how the function is called.
    """
    call = f"{name}()"
    signature, forward_alone = _signature(function, call)
    named = {p.name.lower(): p for p in signature.parameters.values() if p.kind in _NAMED}
    like = LIKES[manner.like or _deduced(set(named), call)]
    says: dict[str, str] = {}
    required = set()
    for lower, parameter in named.items():
        word = next((word for word, names in like.words.items() if lower in names), None)
        if lower == UNSAID and (type(parameter.default) not in (float, int) or parameter.default != 0):
            word = None
        needed = parameter.default is inspect.Parameter.empty
        if word in says:
            raise InvalidProblem(f"{call} has both {says[word]} and {parameter.name}: expected one of them")
        if word is None and needed:
            raise InvalidProblem(
                f"{call} needs {parameter.name!r}, which a function like {like.name} does not have: give it a default,"
                f" or a name that is known ({', '.join(names[0] for names in like.words.values())})"
            )
        if word is not None:
            says[word] = parameter.name
            required |= {word} if needed else set()
    for side in ("left", "right"):
        if "window" in says and side in says:
            raise InvalidProblem(f"{call} has both {says['window']} and {says[side]}: expected one of them")
    for word in _operands(like):
        if word not in says:
            raise InvalidProblem(
                f"{call} has no parameter for {like.words[word][0]}: expected {' or '.join(like.words[word])},"
                f" and its signature is {signature}"
            )
    library = manner.library or _library(signature.parameters[says["query"]], function)
    promises, deduced = manner.promises, not manner.like
    return Reading(
        call, function, signature, like, library, promises, says, frozenset(required), forward_alone, deduced
    )


def _operands(like: Like) -> tuple[str, ...]:
    """What every function like it has to take."""
    beside = {"THD": ("edges_q", "edges_k", "longest_q", "longest_k"), "pages": ("table", "lengths")}
    return ("query", "key", "value", *beside.get(like.layout, ()))


def _signature(function: Callable[..., Any], call: str) -> tuple[inspect.Signature, bool]:
    """The signature, and whether a backward is known to be missing. ``apply`` of torch's is read from its forward."""
    torch: Any = sys.modules.get("torch")
    owner: Any = getattr(function, "__self__", None)
    forward_alone = False
    try:
        if torch is not None and inspect.isclass(owner) and issubclass(owner, torch.autograd.Function):
            kind: Any = owner
            base: Any = torch.autograd.Function
            forward_alone = kind.backward is base.backward and kind.vjp is base.vjp
            signature = inspect.signature(kind.forward)
            if kind.setup_context is base.setup_context:  # else forward has no context
                signature = signature.replace(parameters=list(signature.parameters.values())[1:])
        else:
            signature = inspect.signature(function)
    except (TypeError, ValueError):
        raise InvalidProblem(
            f"{call} has no signature that Python can read: wrap it in a def with parameters"
        ) from None
    if not any(p.kind in _NAMED for p in signature.parameters.values()):
        raise InvalidProblem(f"{call} has the signature {signature}: expected parameters with names")
    return signature, forward_alone


def _deduced(names: set[str], call: str) -> str:
    """The like of a function with parameters ``names``. Raises ``InvalidProblem`` where there are several."""
    if names.intersection(_OF_PAGES):
        return "paged"
    if _OF_VARLEN in names:
        return "flash-attn-varlen"
    if names & _OF_OWN:
        return "attnswitch"
    if {"query", "key", "value"} <= names and names & _OF_TORCH:
        return "torch"
    if len(names & _OF_FLASH) > 1:
        return "flash-attn"
    raise InvalidProblem(
        f"{call} may take (B, H, L, D) or (B, L, H, D), which its parameters do not tell:"
        f" add --like bhsd or --like bshd ({', '.join(LIKES)} are known)"
    )


def _library(parameter: inspect.Parameter, function: Callable[..., Any]) -> str:
    """The library of an annotation, which may be text; torch where there is none."""
    annotation = parameter.annotation
    with contextlib.suppress(Exception):  # text that means nothing where the function is
        annotation = inspect.get_annotations(inspect.unwrap(function), eval_str=True).get(parameter.name, annotation)
    text = annotation if isinstance(annotation, str) else repr(annotation)
    for library, words in {"cupy": ("cupy", "cp."), "numpy": ("numpy", "np.", "ndarray", "NDArray")}.items():
        if any(word in text for word in words):
            return library
    return "torch"
