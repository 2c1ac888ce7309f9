"""Tokens per second of transformers' ``generate()`` through attnswitch, beside ``sdpa``.

A Llama of random weights answers prompts of a length that it has not met; both implementations take turns on each
prompt, the first of them changes from round to round. What they generate is compared, token by token.
"""

from __future__ import annotations

import datetime
import itertools
import operator
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from attnswitch.bench.measure import current, wait
from attnswitch.errors import BackendUnavailable

__all__ = ["SIZES", "Cache", "Difference", "Load", "Rate", "Size", "loads", "measured", "model_of", "to_json"]

SCHEMA = 1
Cache = Literal["dynamic", "static"]
Size = Literal["tiny", "small", "1b"]
#: hidden, intermediate, layers, query heads, key heads, head dimension, vocabulary. 1b: the layers of a Llama of one
#: billion parameters, fewer of them.
SIZES: dict[Size, tuple[int, int, int, int, int, int, int]] = {
    "tiny": (128, 256, 4, 4, 2, 32, 1000),
    "small": (512, 1408, 8, 8, 4, 64, 8000),
    "1b": (2048, 8192, 4, 32, 8, 64, 32000),
}
#: Implementations by the name that transformers knows them by: ours, and what it is set against.
OURS, THEIRS = "attnswitch", "sdpa"
_SEED = 20261123
#: Rounds before the clock starts.
_WARM = 1
#: Logits of 16 bits differ by some units in the last place once another kernel has summed them: so many are no fault.
_ULPS = 16.0


@dataclass(frozen=True, slots=True)
class Load:
    """What is generated: ``new_tokens`` for each of ``batch`` prompts, with a cache, from ``prompt`` tokens on.

    ``padded``: the prompts but the last begin with padding. ``step`` tokens are added to the prompt from round to
    round, so that no length comes twice; 0 for the same lengths again and again.
    """

    cache: Cache
    padded: bool
    batch: int = 2
    prompt: int = 32
    new_tokens: int = 32
    step: int | None = None

    def length(self, turn: int) -> int:
        """Tokens of the prompt of round ``turn``."""
        return self.prompt + turn * (self.new_tokens + 1 if self.step is None else self.step)


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token that differs: its round, its prompt, its place among the new ones.

    ``gap`` is how far apart the logits of the two tokens are, as ``sdpa`` computes them, in units in the last place of
    the largest logit; ``fault`` is whether that is more than rounding explains.
    """

    turn: int
    prompt: int
    token: int
    gap: float
    fault: bool


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens per second of both, the medians of all rounds; ``ratio`` is ours over theirs in the same round.

    ``ratio`` is the median, ``ratio_low`` and ``ratio_high`` are the 20th and the 80th percentile.
    """

    load: Load
    ours: float
    theirs: float
    ratio: float
    ratio_low: float
    ratio_high: float
    rounds: int
    difference: Difference | None


def model_of(size: Size, device: str, dtype: torch.dtype, layers: int | None = None) -> Any:
    """A Llama of random weights. Raises ``BackendUnavailable`` where transformers is not installed."""
    transformers = _transformers()
    hidden, intermediate, some, heads, key_heads, dim, vocabulary = SIZES[size]
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers or some,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=dim,
        max_position_embeddings=131072,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,  # as many tokens as are asked for
    )
    torch.manual_seed(_SEED)
    with torch.device(device):
        return transformers.LlamaForCausalLM(config).to(dtype).eval()


def measured(model: Any, load: Load, rounds: int, *, backend: str | None = None, compiled: bool = False) -> Rate:
    """Generate in turn through both implementations; ``backend`` is that of attnswitch.

    ``compiled`` leaves it to transformers whether the model is compiled, which it does for a static cache on a GPU.
    """
    from attnswitch.integrations.transformers import register

    register(OURS, backend)
    device = str(model.device)
    times: dict[str, list[float]] = {OURS: [], THEIRS: []}
    difference = None
    with current(device), torch.no_grad():
        for turn in range(_WARM + rounds):
            ids, mask = _prompts(load, turn, model)
            made: dict[str, torch.Tensor] = {}
            for name in (OURS, THEIRS) if turn % 2 else (THEIRS, OURS):
                model.set_attn_implementation(name)
                made[name], seconds = _generated(model, load, ids, mask, compiled=compiled)
                if turn >= _WARM:
                    times[name].append(load.batch * load.new_tokens / seconds)
            if difference is None and not torch.equal(made[OURS], made[THEIRS]):
                difference = _difference(model, turn, ids.shape[1], mask, made)
    ratios = list(map(operator.truediv, times[OURS], times[THEIRS]))
    cut = statistics.quantiles(ratios, n=5, method="inclusive")
    ours, theirs = (statistics.median(times[name]) for name in (OURS, THEIRS))
    return Rate(load, ours, theirs, statistics.median(ratios), cut[0], cut[-1], rounds, difference)


def _prompts(load: Load, turn: int, model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and their mask, each (B, length), padded at the left."""
    length = load.length(turn)
    generator = torch.Generator().manual_seed(_SEED + turn)
    ids = torch.randint(2, model.config.vocab_size, (load.batch, length), generator=generator)
    mask = torch.ones_like(ids)
    if load.padded:
        for row in range(max(load.batch - 1, 1)):
            mask[row, : 1 + length * (row + 1) // (2 * load.batch)] = 0
        ids[mask == 0] = model.config.pad_token_id
    return ids.to(model.device), mask.to(model.device)


def _generated(
    model: Any, load: Load, ids: torch.Tensor, mask: torch.Tensor, *, compiled: bool
) -> tuple[torch.Tensor, float]:
    """Prompt and new tokens (B, length + new_tokens), and the seconds that they took."""
    transformers = _transformers()
    most = ids.shape[1] + load.new_tokens
    cache = (
        transformers.StaticCache(config=model.config, max_cache_len=most)
        if load.cache == "static"
        else transformers.DynamicCache(config=model.config)
    )
    device = str(model.device)
    wait(device)
    start = time.perf_counter()
    made: torch.Tensor = model.generate(
        ids,
        attention_mask=mask,
        past_key_values=cache,
        max_new_tokens=load.new_tokens,
        min_new_tokens=load.new_tokens,
        do_sample=False,
        disable_compile=not compiled,
    )
    wait(device)
    return made, time.perf_counter() - start


def _difference(model: Any, turn: int, prompt: int, mask: torch.Tensor, made: Mapping[str, torch.Tensor]) -> Difference:
    """The first token that differs, and how near to each other the two tokens were."""
    ours, theirs = made[OURS], made[THEIRS]
    column = int((ours != theirs).any(0).nonzero()[0])
    row = int((ours != theirs)[:, column].nonzero()[0])
    model.set_attn_implementation(THEIRS)
    seen = torch.nn.functional.pad(mask, (0, column - prompt), value=1)
    positions = (seen.cumsum(1) - 1).clamp(min=0)
    logits = model(theirs[:, :column], attention_mask=seen, position_ids=positions, use_cache=False).logits[row, -1]
    ulp = torch.finfo(logits.dtype).eps * float(logits.abs().max())
    gap = float(logits[theirs[row, column]] - logits[ours[row, column]]) / ulp
    return Difference(turn, row, column - prompt, gap, abs(gap) > _ULPS)


def loads(
    caches: Sequence[Cache], paddings: Sequence[bool], batch: int, prompt: int, new_tokens: int, step: int | None
) -> Iterator[Load]:
    """Every cache with every padding, each from a prompt on that is one token longer: static ones have masks alike."""
    for more, (cache, padded) in enumerate(itertools.product(caches, paddings)):
        yield Load(cache, padded, batch, prompt + more, new_tokens, step)


def to_json(
    rates: Sequence[Rate],
    model: Any,
    *,
    device: str,
    backend: str | None,
    environment: Mapping[str, str],
    command: str,
    seconds: float,
) -> dict[str, Any]:
    """The document: what it ran on, the model, and each rate to four digits."""
    config = model.config
    return {
        "schema": SCHEMA,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": command,
        "device": device,
        "seconds": round(seconds, 3),
        "environment": {**environment, "transformers": _transformers().__version__},
        "model": {
            "hidden": config.hidden_size,
            "intermediate": config.intermediate_size,
            "layers": config.num_hidden_layers,
            "heads": config.num_attention_heads,
            "key_heads": config.num_key_value_heads,
            "head_dim": config.head_dim,
            "vocabulary": config.vocab_size,
            "dtype": str(model.dtype).removeprefix("torch."),
        },
        "protocol": {"warm": _WARM, "order": "in turn", "backend": backend, "beside": THEIRS},
        "rates": [_rounded(asdict(rate)) for rate in rates],
    }


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise BackendUnavailable(
            f"generate() is timed with transformers, which cannot be imported here ({error}):"
            " pip install 'attnswitch[transformers]'"
        ) from None
    return transformers
