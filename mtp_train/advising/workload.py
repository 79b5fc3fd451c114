"""What is to be served: which prompts, how tokens are drawn, how many requests at once, what matters, and in which engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from mtp_train.records import PromptAcceptance

Goal = Literal["latency", "throughput"]
Serve = Literal["vllm", "sglang", "hf"]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """``prompt_set`` of the reports (None: the first that they measured), of it the ``categories`` (None: all) and the prompts of
    ``min_prompt_tokens`` to ``max_prompt_tokens`` (None: any length). ``concurrency`` requests are decoded together at the
    most; ``goal``: the time of each of them, or tokens per second of all."""

    prompt_set: str | None
    categories: tuple[str, ...] | None
    min_prompt_tokens: int
    max_prompt_tokens: int | None
    temperature: float
    concurrency: int
    goal: Goal
    serve: Serve

    def __post_init__(self) -> None:
        for name, kind in (("goal", Goal), ("serve", Serve)):
            if getattr(self, name) not in get_args(kind):
                raise ValueError(f"workload.{name}: expected one of {get_args(kind)}, found {getattr(self, name)!r}")
        if self.temperature < 0:
            raise ValueError(f"workload.temperature: expected 0 (greedy) or more, found {self.temperature}")
        if self.concurrency < 1:
            raise ValueError(f"workload.concurrency: expected at least 1 request at once, found {self.concurrency}")
        if self.categories == ():
            raise ValueError("workload.categories: expected categories such as [coding], or null for all, found an empty list")
        if self.max_prompt_tokens is not None and self.max_prompt_tokens < self.min_prompt_tokens:
            raise ValueError(
                f"workload.max_prompt_tokens: expected at least min_prompt_tokens ({self.min_prompt_tokens}), found "
                f"{self.max_prompt_tokens}"
            )

    def fits(self, prompt: PromptAcceptance) -> bool:
        """Whether a prompt is of the workload's kind."""
        longest = self.max_prompt_tokens
        return (
            (self.categories is None or prompt.category in self.categories)
            and self.min_prompt_tokens <= prompt.num_prompt_tokens
            and (longest is None or prompt.num_prompt_tokens <= longest)
        )

    def among(self, prompts: Sequence[PromptAcceptance]) -> frozenset[tuple[str, int]]:
        """Those of the workload's kind: their ids and lengths."""
        return frozenset((prompt.prompt_id, prompt.num_prompt_tokens) for prompt in prompts if self.fits(prompt))

    def of(self, prompts: Sequence[PromptAcceptance]) -> list[PromptAcceptance]:
        """Those of the workload's kind. ValueError where there is none, or none that was drafted for, with what there is."""
        found = [prompt for prompt in prompts if self.fits(prompt)]
        if not any(prompt.num_drafts for prompt in found):
            lengths = [prompt.num_prompt_tokens for prompt in prompts]
            raise ValueError(
                f"workload: expected measured prompts of {self.kind}, found none among {len(prompts)}: categories "
                f"{', '.join(sorted({prompt.category for prompt in prompts}))}; {min(lengths)} to {max(lengths)} tokens; "
                "widen the workload, or evaluate on prompts like yours (benchmark@prompt_sets.project=file)"
            )
        return found

    @property
    def kind(self) -> str:
        """The prompts in words."""
        categories = "any category" if self.categories is None else f"the categories {', '.join(self.categories)}"
        most = "" if self.max_prompt_tokens is None else f" to {self.max_prompt_tokens}"
        length = f", {self.min_prompt_tokens}{most or ' or more'} tokens" if self.min_prompt_tokens or most else ""
        return f"{categories}{length}"

    @property
    def text(self) -> str:
        """All of it in a line."""
        drawn = "greedy" if self.temperature == 0 else f"temperature {self.temperature:g}"
        most = "request at a time" if self.concurrency == 1 else "requests at once"
        return f"{self.kind}; {drawn}; {self.concurrency} {most}; for {self.goal}; served with {self.serve}"
