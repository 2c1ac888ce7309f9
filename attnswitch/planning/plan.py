"""``Plan``: what was chosen for a problem on a device, all the others, and why; called with arrays, the attention.

Words are made when somebody reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Never

from attnswitch.errors import InvalidProblem, Unsupported
from attnswitch.machine import one_by_one, registry
from attnswitch.machine.backend import Standing
from attnswitch.machine.device import Device
from attnswitch.names import meant, printable
from attnswitch.planning import waiting
from attnswitch.planning.candidate import Candidate
from attnswitch.planning.choice import Basis, stands_for
from attnswitch.planning.forecast import forecast
from attnswitch.problem import Problem
from attnswitch.wisdom.record import Time

__all__ = ["Plan"]

_OF_CACHES = ("block_table", "cache_lengths")
#: What some caches have besides.
_BESIDE = ("tree_mask", "key_scale", "value_scale")
_OF_HEADS = ("sinks", "alibi_slopes")


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """The choice for one problem on one device, with all the others and why. ``str(plan)`` explains it.

    Called with arrays of its problem, it is the attention. ``chosen`` is None where nothing fits (``explain`` returns
    such plans, ``plan`` raises instead).
    """

    problem: Problem
    device: Device
    candidates: tuple[Candidate, ...]
    chosen: Candidate | None
    basis: Basis
    #: The backend that was asked for.
    named: str | None = None
    #: What runs it on arrays.
    run: Callable[..., Any] | None = field(default=None, repr=False)

    @property
    def backend(self) -> str | None:
        """Name of the chosen backend."""
        return self.chosen.backend if self.chosen else None

    def taker(self) -> str:
        """Name of the chosen backend, for whoever calls it. Raises ``Unsupported`` where nothing was chosen."""
        if self.chosen is None:
            raise Unsupported(f"the plan chose nothing\n{self}", self)
        return self.chosen.backend

    def check(self, problem: Problem) -> None:
        """Raises ``Unsupported`` where nothing was chosen, ``InvalidProblem`` where the plan is not for ``problem``."""
        self.taker()
        if problem == self.problem:
            return
        if problem == self.problem.replace(nonfinite=True):
            raise InvalidProblem(
                f"query, key or value holds NaN or inf, and the plan chose {self.backend} for operands without:"
                " attention chooses for such a call, or make a plan for it"
            )
        raise InvalidProblem(f"the plan is for {self.problem}, and the call is {problem}: make a plan for it")

    @property
    def open(self) -> bool:
        """Whether measuring could change the choice: it is free, and between backends of which not all were."""
        if not self.device.present or self.chosen is None or self.basis in (Basis.FORCED, Basis.ALONG):
            return False
        rivals = [candidate for candidate in self.candidates if candidate.trusted or candidate.open]
        return len(rivals) > 1 and any(candidate.open for candidate in rivals)

    def __call__(
        self,
        query: Any,
        key: Any,
        value: Any,
        *,
        attn_mask: Any = None,
        key_lengths: Any = None,
        seed: int | None = None,
        layout: str | None = None,
        cu_seqlens_q: Any = None,
        cu_seqlens_k: Any = None,
        block_table: Any = None,
        cache_lengths: Any = None,
        tree_mask: Any = None,
        key_scale: Any = None,
        value_scale: Any = None,
        sinks: Any = None,
        alibi_slopes: Any = None,
        **unknown: Never,
    ) -> Any:
        """``attention`` by the backend chosen here, on arrays of the plan's problem, which says the rest.

        Of a problem with ``varlen`` it is ``attention_varlen``: cu_seqlens_q says where sequences begin. Of one with
        ``page`` it is ``attention_paged``, key and value being the caches. Only a batch has a layout, "BHLD" if it is
        left out.

        Raises:
            InvalidProblem: the arrays are of another problem, or something else was said.
            Unsupported: the plan chose nothing.
        """
        if unknown:
            name = next(iter(unknown))
            own = (
                "attn_mask",
                "key_lengths",
                "seed",
                "layout",
                "cu_seqlens_q",
                "cu_seqlens_k",
                *_OF_CACHES,
                *_BESIDE,
                *_OF_HEADS,
            )
            raise InvalidProblem(
                f"a plan's call has no keyword {name!r}: it has {', '.join(own)}, and its problem says the rest, which"
                f" attnswitch.plan takes{meant(name, own)}"
            )
        cache, of_some = (block_table, cache_lengths), (tree_mask, key_scale, value_scale)
        beside = attn_mask is not None or key_lengths is not None or layout is not None
        varlen, packed = self.problem.varlen, cu_seqlens_q is not None
        if self.problem.page:
            beside = beside or seed is not None or cu_seqlens_k is not None
            if beside or packed != varlen or any(given is None for given in cache):
                taken = (*(("cu_seqlens_q",) if varlen else ()), *_OF_CACHES)
                raise InvalidProblem(
                    f"the plan is for a cache in pages: beside query and the caches its call takes {', '.join(taken)},"
                    f" and where the problem has them {', '.join((*_BESIDE, *_OF_HEADS))}; no layout, nor what else a"
                    " batch has"
                )
        elif any(given is not None for given in (*cache, *of_some)):
            told = ", ".join((*_OF_CACHES, *_BESIDE))
            raise InvalidProblem(f"the plan is not for a cache in pages, of which {told} tell")
        elif varlen and (not packed or beside):
            raise InvalidProblem(
                "the plan is for sequences one after another: its call takes cu_seqlens_q and maybe cu_seqlens_k, and"
                " no attn_mask, key_lengths nor layout"
            )
        elif (packed or cu_seqlens_k is not None) and not varlen:
            raise InvalidProblem("the plan is not for sequences one after another, which cu_seqlens_q tells apart")
        assert self.run is not None
        layout = "BHLD" if layout is None else layout
        cu_seqlens, heads = (cu_seqlens_q, cu_seqlens_k), (sinks, alibi_slopes)
        return self.run(
            self, query, key, value, attn_mask, key_lengths, seed, layout, cu_seqlens, (*cache, *of_some), heads
        )

    @property
    def why(self) -> str:
        """What the choice rests on, in a sentence."""
        match self.basis:
            case Basis.FORCED:
                return f"forced by backend={self.named!r}"
            case Basis.ALONG:
                return f"as for {stands_for(self.problem)}: with gradients or without, the mask is the same"
            case Basis.REFUSED:
                return f"backend={self.named!r} was asked for and does not take it"
            case Basis.UNTAKEN:
                return "no backend takes it"
            case Basis.UNPROVEN:
                return "what takes it runs where it is named, or once it was timed here"
            case Basis.DISTRUSTED:
                return "every backend that takes it was wrong here"
            case Basis.UNMEASURED:
                remedy = "attnswitch tune --problem measures it"
                return f"nothing was measured for it here, and the policy is wisdom-only; {remedy}"
            case Basis.MEASURED:
                return f"measured here on {self._times()}"
            case Basis.NEAREST:
                return self._nearest()
            case Basis.FORECAST:
                return f"{self._unmeasured()}; {self._expected()}"
            case Basis.DECLARED:
                return f"first in the declared order that takes the problem; {self._unmeasured()}"

    @property
    def news(self) -> str:
        """What policy LEARN has to tell of the class of the problem in this process: that it waits; or ""."""
        return "" if self.named is not None else waiting.news(stands_for(self.problem), self.device)

    def why_not(self, candidate: Candidate) -> tuple[str, ...]:
        """The reasons that ``candidate`` was not chosen; empty for the chosen one."""
        chosen = self.chosen
        if candidate is chosen:
            return ()
        # What the problem is comes before what this machine lacks: no driver makes a GPU kernel take CPU arrays.
        if reasons := candidate.reasons or ((candidate.unavailable,) if candidate.unavailable else ()):
            return reasons
        why = f"but stands behind {self.backend} in the declared order"
        if self.basis is Basis.REFUSED:
            why = "but another backend was asked for"
        elif self.basis is Basis.FORCED:
            why = f"but backend={self.backend!r} was asked for"
        elif fault := candidate.fault:
            return (
                f"it was wrong on this machine on {fault.date[:10]}: {fault.why} (case {fault.case}, {fault.problem});"
                " it is left out until another version gets that case right, or until"
                f" `attnswitch wisdom forget --backend {candidate.backend}`",
            )
        elif not candidate.trusted:
            why = self._stands_back(candidate)
        elif candidate.heavy and chosen is not None and not chosen.heavy:
            extra = f"{candidate.heavy / 1e9:.3g} GB beside the operands, which grow with Lq x Lk"
            why = f"but holds {extra}; {chosen.backend} does without"
        elif self.basis is Basis.ALONG:
            why = f"but {stands_for(self.problem)} goes to {self.backend}, and is to draw the same mask"
        elif self.basis is Basis.FORECAST and chosen is not None:
            why = f"but stands behind {chosen.backend}, for want of a forecast"
            if candidate.expected is not None:
                why = f"but is expected to take {candidate.expected:.3g} ms, and {chosen.backend} {chosen.expected:.3g}"
        elif chosen is None or chosen.time is not None or chosen.near is not None:
            why = self._slower(candidate)
            if untimed := candidate.untimed:
                why = f"but was given up when it was tried on {untimed.date[:10]}: {untimed.why}"
        return (f"it takes the problem, {why}",)

    def remarks(self, candidate: Candidate) -> tuple[str, ...]:
        """What ``candidate`` says of how it computes the problem, if it takes it."""
        if not candidate.fits:
            return ()
        try:
            backend = registry.loaded(candidate.backend)
            asked = one_by_one.asked(backend, self.problem)
            alone = ("each sequence by a call of its own",) if asked is not self.problem else ()
            return (*alone, *map(str, backend.remarks(asked, self.device, candidate.config)))
        except Exception as error:  # which is no reason against it
            return (f"it failed while planning: {type(error).__name__}: {error}",)

    def __str__(self) -> str:
        lines = [
            f"problem  {self.problem}",
            f"device   {self.device}",
            f"choice   {self.backend or 'none'} ({self.why})",
            *([f"learn    {news}"] if (news := self.news) else []),
        ]
        width = max(len(candidate.backend) for candidate in self.candidates)
        for candidate in self.candidates:
            name = candidate.backend
            for sentence in (*(self.why_not(candidate) or ("chosen",)), *self.remarks(candidate)):
                lines.append(f"  {name:{width}}  {sentence}")
                name = ""
        return printable("\n".join(lines))  # saved cases and compilers have their say in it

    def _stands_back(self, candidate: Candidate) -> str:
        """Why a candidate that was not wrong is none for a call that does not name it."""
        if candidate.standing is Standing.NAMED:
            return f"but is approximate, and runs only with backend={candidate.backend!r}"
        if untimed := candidate.untimed:
            return f"but was given up when it was tried on {untimed.date[:10]}: {untimed.why}"
        tune = f"attnswitch tune --problem {self.problem}"
        named = f" --backend {candidate.backend}" if candidate.standing is Standing.ASKED else ""
        where = "here yet" if self.device.present else "there yet, as this machine knows"
        return f"but was not verified and timed {where}: `{tune}{named}`, or name it"

    def _slower(self, candidate: Candidate) -> str:
        """What was measured of a candidate against what was of the chosen one, if anything was chosen."""
        chosen, time = self.chosen, candidate.time
        if chosen and chosen.time and time:
            return f"but took {_with_problem(time, chosen.time)} against {chosen.time.ms:.4g}"
        if chosen and chosen.near and candidate.near:
            times = candidate.near.slower / chosen.near.slower
            took = f"took {times:.3g} times as long as {chosen.backend} on the nearest that were measured"
            return f"but {took}" if times >= 1 else f"and {took}: too little to go before it in the order"
        if time:
            return f"and took {time.ms:.4g} ms, but what comes before it in the order was not measured beside it"
        return "but was not measured here"

    def _unmeasured(self) -> str:
        times = any(candidate.time for candidate in self.candidates if candidate.trusted)
        return "others alone were measured with the versions of now" if times else "nothing was measured here"

    def _expected(self) -> str:
        """Every forecast, the least first, and what they rest on."""
        expected = [(c.expected, c.backend) for c in self.candidates if c.trusted and c.expected is not None]
        each = ", ".join(f"{backend} {ms:.3g} ms" for ms, backend in sorted(expected))
        return f"expected by {forecast(self.problem, self.device).source}: {each}"

    def _times(self) -> str:
        """The date, the problem and every time, the fastest first."""
        timed = [(c.time, c.backend) for c in self.candidates if c.trusted and c.time]
        timed.sort(key=lambda entry: entry[0].pace)
        first = timed[0][0]
        each = ", ".join(f"{backend} {_with_problem(time, first)}" for time, backend in timed)
        return f"{first.date[:10]}, on {first.problem}: {each}"

    def _nearest(self) -> str:
        ranked = [(c.near, c.backend) for c in self.candidates if c.near]
        ranked.sort(key=lambda entry: entry[0].slower)
        problems = ", ".join(dict.fromkeys(str(problem) for near, _ in ranked for problem in near.problems))
        each = ", ".join(f"{backend} {near.slower:.3g}" for near, backend in ranked)
        tie = f"; as fast, as far as that tells, {self.backend} comes first in the order"
        return (
            f"nothing like it was measured; on the nearest here, {problems}, each took as many times as long as the"
            f" fastest: {each}{'' if self.backend == ranked[0][1] else tie}"
        )


def _with_problem(time: Time, other: Time) -> str:
    """A time, with its problem where that is not the one of the time that it stands beside."""
    return f"{time.ms:.4g} ms" + ("" if time.problem == other.problem else f" on {time.problem}")
