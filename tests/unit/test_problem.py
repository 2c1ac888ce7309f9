"""``Problem``: validation, the one spelling of each meaning, and the text form."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attnswitch import InvalidProblem, Mask, Memory, Problem

PLAIN = Problem(2, 4, 2, 8, 16, 32, 24, "float32")

# -- validation --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": -1}, r"batch=-1: expected an integer of at least 0"),
        ({"heads_q": 0}, r"heads_q=0: expected an integer of at least 1"),
        ({"heads_kv": 0}, r"heads_kv=0: expected an integer of at least 1"),
        ({"seq_q": -1}, r"seq_q=-1: expected an integer of at least 0"),
        ({"seq_k": 2.0}, r"seq_k=2\.0: expected an integer"),
        ({"dim_qk": 0}, r"dim_qk=0: expected an integer of at least 1"),
        ({"dim_v": True}, r"dim_v=True: expected an integer"),
        ({"heads_q": 3}, r"query has 3 heads and key has 2: .* multiple"),
        ({"heads_q": 1}, r"query has 1 heads and key has 2: .* multiple"),
        ({"scale": float("nan")}, r"scale=nan: expected a finite number"),
        ({"scale": float("-inf")}, r"scale=-inf: expected a finite number"),
        ({"scale": "0.5"}, r"scale=.*0\.5"),
        ({"softcap": -1.0}, r"softcap=-1\.0: expected a finite number >= 0"),
        ({"softcap": float("nan")}, r"softcap=nan: expected a finite number >= 0"),
        ({"softcap": float("inf")}, r"softcap=inf: expected a finite number >= 0"),
        ({"dropout": -0.1}, r"dropout_p=-0\.1: expected a probability"),
        ({"dropout": 1.5}, r"dropout_p=1\.5: expected a probability"),
        ({"dropout": float("nan")}, r"dropout_p=nan: expected a probability"),
        ({"dropout": "0.5"}, r"dropout_p=.*0\.5"),
        ({"dtype": "int8"}, r"dtype int8: expected one of float16, bfloat16, float32, float64"),
        ({"alignment": "centre"}, r"causal_alignment='centre': expected one of top_left, bottom_right"),
        ({"window": (-1, 0)}, r"window=\(-1, 0\): each side is .* >= 0, or None"),
        ({"window": (0, -2)}, r"window=\(0, -2\): each side is .* >= 0, or None"),
        ({"window": (1.0, None)}, r"window=\(1\.0, None\)"),
        ({"window": (True, None)}, r"window=\(True, None\)"),
        ({"window": (1,)}, r"window=\(1,\)"),
        ({"window": (1, 2, 3)}, r"window=\(1, 2, 3\)"),
        ({"grads": "kq"}, r"grads='kq': expected a subset of 'qkvm' in that order"),
        ({"grads": "qq"}, r"grads='qq': expected a subset"),
        ({"grads": "x"}, r"grads='x': expected a subset"),
        ({"grads": "m"}, r"gradient of attn_mask was asked for, but there is no float attn_mask"),
        ({"grads": "m", "mask": Mask("bool")}, r"there is no float attn_mask"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_what_no_backend_could_mean_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidProblem, match=message):
        PLAIN.replace(**changes)


@pytest.mark.parametrize("align", [0, 3, 32, -16])
def test_an_alignment_is_a_power_of_two(align: int) -> None:
    with pytest.raises(InvalidProblem, match=f"align={align}: alignment is a power of two from 1 to 16"):
        Memory(align=align)


@pytest.mark.parametrize("axes", ["kq", "qq", "x", "bhkq", "Q"])
def test_mask_axes_are_a_subset_in_order(axes: str) -> None:
    with pytest.raises(InvalidProblem, match=f"mask axes '{axes}': expected a subset of 'bhqk'"):
        Mask("bool", axes)


def test_a_mask_of_integers_is_refused() -> None:
    with pytest.raises(InvalidProblem, match="attn_mask of dtype int32: a mask is bool"):
        Mask("int32")


def test_a_problem_is_frozen() -> None:
    with pytest.raises(AttributeError, match="set attribute"):
        PLAIN.batch = 3  # type: ignore[misc]
    with pytest.raises(AttributeError, match="no attribute"):
        PLAIN.note = ""  # type: ignore[attr-defined]


def test_a_problem_travels_and_is_checked_on_arrival() -> None:
    problem = PLAIN.replace(window=(3, None), mask=Mask("bool", "bk"))
    assert pickle.loads(pickle.dumps(problem)) == copy.deepcopy(problem) == problem
    assert type(pickle.loads(pickle.dumps(problem))) is Problem


def test_fields_in_their_order_are_checked_as_by_name() -> None:
    assert Problem.of(*PLAIN) == PLAIN
    with pytest.raises(InvalidProblem, match="batch=-1"):
        Problem.of(-1, *PLAIN[1:])


# -- one spelling ------------------------------------------------------------------------------------------------------


def test_an_unlimited_window_is_none() -> None:
    same = PLAIN.replace(window=(None, None))
    assert same == PLAIN
    assert same.window is None
    assert hash(same) == hash(PLAIN)


def test_alignment_means_nothing_without_position() -> None:
    assert PLAIN.replace(alignment="bottom_right") == PLAIN
    assert PLAIN.replace(alignment="bottom_right", window=(None, None)) == PLAIN
    assert PLAIN.replace(alignment="bottom_right", key_lengths=True).alignment == "top_left"
    assert PLAIN.replace(alignment="bottom_right", causal=True).bottom_right
    assert PLAIN.replace(alignment="bottom_right", window=(0, None)).bottom_right


def test_mask_axes_of_size_one_broadcast() -> None:
    one = Problem(1, 1, 1, 1, 16, 8, 8, "float32", mask=Mask("bool", "bhqk"))
    assert one.mask == Mask("bool", "k")
    assert one.mask_shape == (1, 1, 1, 16)
    assert PLAIN.replace(mask=Mask("bool", "bhqk")).mask_shape == (2, 4, 8, 16)
    empty = PLAIN.replace(batch=0, mask=Mask("float16", "bk"))
    assert empty.mask_shape == (0, 1, 1, 16)


def test_derived_facts() -> None:
    assert PLAIN.softmax_scale == 1.0 / math.sqrt(32)
    assert PLAIN.replace(scale=0.0).softmax_scale == 0.0
    assert PLAIN.group == 2
    assert PLAIN.mask_shape is None
    assert [PLAIN.replace(batch=0).is_empty, PLAIN.replace(seq_q=0).is_empty, PLAIN.replace(seq_k=0).is_empty] == [
        True,
        True,
        False,
    ]


# -- text --------------------------------------------------------------------------------------------------------------

sizes = st.integers(0, 5) | st.integers(0, 2**31)
positive = sizes.map(lambda size: size + 1)
finite = st.floats(allow_nan=False, allow_infinity=False)
sides = st.none() | sizes
memories = st.builds(Memory, st.sampled_from([1, 2, 4, 8, 16]), st.booleans(), st.booleans(), st.booleans())
subsets = st.sets(st.sampled_from("bhqk")).map(lambda axes: "".join(axis for axis in "bhqk" if axis in axes))
dtypes = st.sampled_from(["float16", "bfloat16", "float32", "float64"])


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    heads_kv = draw(st.integers(1, 8))
    mask = draw(st.none() | st.builds(Mask, st.just("bool") | dtypes, subsets))
    letters = "qkvm" if mask is not None and not mask.is_bool else "qkv"
    return Problem(
        draw(sizes),
        heads_kv * draw(st.integers(1, 8)),
        heads_kv,
        draw(sizes),
        draw(sizes),
        draw(positive),
        draw(positive),
        draw(dtypes),
        causal=draw(st.booleans()),
        alignment=draw(st.sampled_from(["top_left", "bottom_right"])),
        window=draw(st.none() | st.tuples(sides, sides)),
        mask=mask,
        key_lengths=draw(st.booleans()),
        scale=draw(st.none() | finite),
        softcap=abs(draw(finite)),
        dropout=draw(st.floats(0, 1)),
        seeded=draw(st.booleans()),
        lse=draw(st.booleans()),
        grads="".join(letter for letter in letters if draw(st.booleans())),
        deterministic=draw(st.booleans()),
        query=draw(memories),
        key=draw(memories),
        value=draw(memories),
        attn_mask=draw(memories),
        nonfinite=draw(st.booleans()),
    )


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a machine may be busy
@given(problems())
def test_text_and_parse_are_inverse(problem: Problem) -> None:
    text = str(problem)
    again = Problem.parse(text)
    assert again == problem
    assert hash(again) == hash(problem)
    assert str(again) == text


def test_parts_in_any_order_with_dots_or_spaces() -> None:
    wanted = Problem(
        2, 16, 4, 1024, 4096, 192, 128, "bfloat16", causal=True, alignment="bottom_right", scale=0.125, softcap=30.0
    )
    assert Problem.parse("b2.h16/4.s1024x4096.d192/128.bf16.causal-br.scale=0.125.softcap=30.0") == wanted
    assert Problem.parse("  causal-br softcap=30.0 b2 h16/4 bfloat16\ts1024x4096 d192/128 scale=.125 ") == wanted
    assert str(wanted) == "b2.h16/4.s1024x4096.d192/128.bf16.causal-br.scale=0.125.softcap=30.0"


SHAPE = "b1.h4.s8.d16.fp32"


@pytest.mark.parametrize(
    "part",
    [
        *(
            "b",
            "bx",
            "h4/",
            "h/4",
            "s4x",
            "s4x5x6",
            "d64/",
            "x3",
            "foo",
            "causal-tl",
            "Causal",
            "fp8",
            "=",
            "=3",
            "lse=1",
        ),
        *(
            "window=1",
            "window=1,2,3",
            "window=a,b",
            "window=-,*",
            "mask=int8",
            "mask=",
            "q=backwards",
            "q=",
            "m=alignx",
        ),
        *("scale=fast", "scale=", "softcap=x", "dropout=half", "z=expanded"),
    ],
)
def test_an_unknown_part_is_named(part: str) -> None:
    rest = " ".join(other for other in SHAPE.split(".") if other[0] != part[0])
    with pytest.raises(InvalidProblem) as caught:
        Problem.parse(f"{part} {rest}")
    assert f"part {part!r} is not understood" in str(caught.value)


@pytest.mark.parametrize(
    ("part", "field"),
    [
        ("b2", "batch"),
        ("h8/2", "heads_kv, heads_q"),
        ("s8", "seq_k, seq_q"),
        ("d16", "dim_qk, dim_v"),
        ("bf16", "dtype"),
        ("causal causal-br", "causal"),
        ("window=1,2 window=1,2", "window"),
        ("grad grad=q", "grads"),
        ("scale=1.0 scale=1.0", "scale"),
    ],
)
def test_a_part_that_stands_twice_is_named(part: str, field: str) -> None:
    with pytest.raises(InvalidProblem, match=f"part '{part.split()[-1]}' sets .*{field}.* a second time"):
        Problem.parse(f"{SHAPE} {part}")


@pytest.mark.parametrize(("index", "name"), list(enumerate(["b", "h", "s", "d", "a dtype such as bf16"])))
def test_a_missing_part_is_named(index: int, name: str) -> None:
    parts = SHAPE.split(".")
    del parts[index]
    with pytest.raises(InvalidProblem, match=f"missing {name}, as in"):
        Problem.parse(".".join(parts))


def test_everything_missing() -> None:
    with pytest.raises(InvalidProblem, match="missing b, h, s, d, a dtype such as bf16"):
        Problem.parse(" ")


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("scale=nan", "scale=nan"),
        ("scale=1e400", "scale=inf"),
        ("softcap=-1.0", r"softcap=-1\.0"),
        ("dropout=2.0", r"dropout_p=2\.0"),
        ("window=-1,0", r"window=\(-1, 0\)"),
        ("grad=vk", "grads='vk'"),
        ("grad=m", "no float attn_mask"),
        ("mask=bool:kq", "mask axes 'kq'"),
        ("k=align3", "align=3"),
    ],
)
def test_a_part_that_makes_no_sense_says_why(part: str, message: str) -> None:
    with pytest.raises(InvalidProblem, match=message):
        Problem.parse(f"{SHAPE} {part}")


@pytest.mark.parametrize(
    ("text", "reach"),
    [
        ("", (None, None)),
        (".causal", (None, 0)),
        (".window=3,5", (3, 5)),
        (".window=3,*", (3, None)),
        (".causal.window=3,5", (3, 0)),
        (".causal.window=*,5", (None, 0)),
    ],
)
def test_causal_is_the_reach_of_a_window(text: str, reach: tuple[int | None, int | None]) -> None:
    assert Problem.parse(f"b1.h1.s8.d8.fp32{text}").reach == reach


def test_elements_have_the_size_of_their_type() -> None:
    problem = Problem.parse("b1.h1.s8.d8.bf16.mask=fp32")
    assert [problem.element(role) for role in ("query", "key", "value", "attn_mask")] == [2, 2, 2, 4]
    assert Problem.parse("b1.h1.s8.d8.fp64").element("attn_mask") == 0


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("page=0", "page=0: expected 1 or more; leave page out where there are no pages"),
        ("page=00", "page=00: expected 1 or more"),
        ("page=4.splits=0", "splits=0: expected 1 or more; leave splits out to leave the parts open"),
        ("splits=0", "splits=0: expected 1 or more"),
        ("page=-1", "page=-1: expected the rows of a page"),
        ("grad=", "grad= names no operand: expected some of qkvm, as in grad=qk, or grad alone"),
    ],
)
def test_a_part_that_says_none_is_left_out_instead(part: str, message: str) -> None:
    with pytest.raises(InvalidProblem, match=message):
        Problem.parse(f"b1.h1.s8.d8.fp32.causal-br.lengths.{part}")
