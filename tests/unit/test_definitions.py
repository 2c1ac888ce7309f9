"""Problem definitions of others as requirements: what is read, what is refused, and that nothing is run."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attnswitch import InvalidProblem
from attnswitch.verify import Space
from attnswitch.verify.demands import definitions, steering

FOLDER = Path(__file__).parents[2] / "fixtures" / "definitions"
PAGED = FOLDER / "gqa_paged_prefill_causal_h8_kv2_d64_ps16.json"
LATENT = FOLDER / "mla_paged_decode_h4_ckv128_kpe32_ps1.json"
MODEL = FOLDER / "causal_attention.py"
FILES = {
    PAGED: "H=8,Hkv=2,D=64,gqa,page=16,varlen,causal-br!,lse,scale,dtype=bf16",
    LATENT: "H=4,Hkv=1,D=160,Dv=128,gqa,page=1,Lq=1,lse,scale,dtype=bf16",
    MODEL: "B<=4,H<=6,Lq=96,Lk=96,D=32,dtype=fp16,causal!",
}


@pytest.fixture
def reads(tmp_path: Path) -> Callable[[str, str], str]:
    """``reads(text, suffix)``: the requirement of a file that holds ``text``."""

    def read(text: str, suffix: str) -> str:
        path = tmp_path / f"given{suffix}"
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
        return str(definitions.read(path))

    return read


def edited(**changes: Any) -> str:
    return json.dumps({**json.loads(PAGED.read_text()), **changes})


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_an_example_is_a_requirement_that_can_be_met(path: Path) -> None:
    requirement = definitions.read(path)
    assert str(requirement) == FILES[path]
    assert {path.name for path in FOLDER.iterdir() if path.suffix in (".json", ".py")} == {p.name for p in FILES}
    found = list(steering.cases(requirement, Space(), 0, each=1))
    assert all(requirement.admits(case) for case in found)


def test_a_definition_without_pages_or_causal(reads: Callable[[str, str], str]) -> None:
    definition = edited(op_type="gqa_ragged", name="gqa_ragged_h8", outputs={})
    assert reads(definition, ".json") == "H=8,Hkv=2,D=64,gqa,varlen,scale,dtype=bf16"


def test_a_cache_of_8_bits(reads: Callable[[str, str], str]) -> None:
    inputs = json.loads(PAGED.read_text())["inputs"]
    inputs["k_cache"] = {"shape": [], "dtype": "float8_e4m3fn"}
    assert reads(edited(inputs=inputs), ".json").endswith("dtype=bf16,cache=fp8e4m3!")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "it is not JSON"),
        ("[]", "it is []: expected an object"),
        ("{}", "it has no field 'name'"),
        (edited(op_type="gemm"), "op_type is 'gemm': expected one of gqa_paged, gqa_ragged, mla_paged"),
        (edited(op_type="mla_paged"), "axes has no field 'head_dim_ckv'"),
        (edited(axes={"num_qo_heads": {"type": "var"}}), "axes.num_qo_heads is 'var': expected a const"),
        (edited(axes={"num_qo_heads": {"type": "const", "value": "8"}}), "value is '8': expected an integer"),
        (edited(axes={"num_qo_heads": 8}), "axes.num_qo_heads is 8: expected an object"),
        (edited(inputs={}), "inputs has no field 'q'"),
        (edited(inputs={"q": {"dtype": "int4"}}), "inputs of dtype 'int4': expected one of float16"),
        (edited(inputs={"q": {"dtype": "float16"}, "k": {"dtype": "int4"}}), "keys of dtype 'int4': expected float16"),
    ],
    ids=lambda text: text[-24:],
)
def test_what_is_no_definition_of_attention_is_refused(text: str, says: str, reads: Callable[[str, str], str]) -> None:
    with pytest.raises(InvalidProblem) as refused:
        reads(text, ".json")
    assert "given.json: " in str(refused.value)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("is_causal=True", "attn_mask=mask", "is given attn_mask='mask': expected is_causal, scale or enable_gqa"),
        ("is_causal=True", "dropout_p=0.1", "is given dropout_p=0.1"),
        ("(q, k, v,", "(self.w(q), k, v,", "is given 'self.w(q), k, v': expected three arguments of forward (q, k, v)"),
        ("scaled_dot_product_attention", "softmax", "calls scaled_dot_product_attention 0 times: expected once"),
        ("def forward", "def backward", "it has 0 functions named forward: expected one"),
        ("rows = 96", "rows = int('96')", "a size is 'rows': expected an integer"),
        ("4, 6, rows", "rows", "query is of shape (96, 32) in fp16: expected batch, heads, length"),
        ("torch.float16", "torch.int8", "dtype 'int8': expected one of float16"),
        ("return [q, k, v]", "return make()", "get_inputs returns no list"),
        ("return [q, k, v]", "return [q, k]", "expected three arguments of forward"),
        ("return [q, k, v]", "return [q, k, open('x')]", "get_inputs returns"),
        ("class", "klass", "it is not Python that can be read"),
        ("rows = 96", "rows = 0", "'Lq=0': expected a number from 1"),
        ("rows = 96", f"rows = {'(' * 5000}", "it is not Python that can be read"),
        ("rows = 96", f"rows = {'1+' * 50000}1", ""),
        ("rows = 96", "rows = '\udcff'", "it is not text in UTF-8"),
    ],
    ids=lambda text: ascii(text)[:24],
)
def test_a_model_that_is_not_attention_alone_is_refused(
    old: str, new: str, says: str, reads: Callable[[str, str], str]
) -> None:
    with pytest.raises(InvalidProblem) as refused:
        reads(MODEL.read_text().replace(old, new), ".py")
    assert "given.py: " in str(refused.value)
    assert says in str(refused.value)


def test_scale_and_shared_heads_of_a_model(reads: Callable[[str, str], str]) -> None:
    text = MODEL.read_text().replace("is_causal=True", "scale=0.1, enable_gqa=True, is_causal=False")
    text = text.replace("k = torch.rand(4, 6", "k = torch.rand(4, 2").replace(
        "v = torch.rand(4, 6", "v = torch.rand(4, 2"
    )
    assert reads(text, ".py") == "B<=4,H<=6,Lq=96,Lk=96,D=32,dtype=fp16,gqa,scale"


def test_nothing_of_a_file_is_run(reads: Callable[[str, str], str], tmp_path: Path) -> None:
    trace = tmp_path / "ran"
    text = f"open({str(trace)!r}, 'w')\n{MODEL.read_text()}"
    assert reads(text, ".py") == FILES[MODEL]
    assert not trace.exists()


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidProblem, match="it cannot be read: No such file"):
        definitions.read(tmp_path / "none.json")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_damaged_file_is_refused_with_a_sentence(path: Path, tmp_path: Path) -> None:
    rng, whole, said = random.Random(7), path.read_bytes(), []
    damaged = tmp_path / path.name
    for _ in range(300):
        content = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            place = rng.randrange(len(content))
            content[place : place + rng.randrange(9)] = rng.randbytes(rng.randrange(6))
        damaged.write_bytes(content)
        try:
            definitions.read(damaged)
        except InvalidProblem as error:
            said.append(str(error))
    assert len(said) > 50
    assert all(sentence.startswith(f"{damaged}: ") for sentence in said)


def test_the_command_takes_a_definition(command: Callable[..., Any]) -> None:
    quick = ("--quick", "--no-isolate", "--no-corpus", "--examples", "1")
    here = (*quick, "--device", "cpu", "--backend", "saboteurs:Evades")
    ran = command("verify")(*here, "--require", str(LATENT))
    assert "no backward" not in ran.out
    assert (ran.code, "page=1" in ran.out) == (0, True)
    assert command("verify")(*here, "--require", "none.py").code == 2
