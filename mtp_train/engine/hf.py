"""``engine=hf``: transformers on any device, slow and obviously right; the engine that the others are compared with."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from mtp_train.engine.base import (
    Baseline,
    CostsAsked,
    Engine,
    Generated,
    GenerateRequest,
    PrefillSettings,
    Sampling,
    SpeculateRequest,
    SpeculateSettings,
    StepTimes,
)
from mtp_train.engine.hf_costs import time_steps
from mtp_train.engine.hf_generate import generate, watched
from mtp_train.engine.hf_model import TargetModel, choose_device, choose_dtype
from mtp_train.engine.hf_prefill import prefill
from mtp_train.engine.hf_speculate import Measured, Speculation, merge
from mtp_train.engine.room import by_room
from mtp_train.engine.stop import stop_token_ids
from mtp_train.head.base import Head
from mtp_train.nn.attention import ATTENTION, PackedAttention
from mtp_train.records import Acceptance, Response, Sample
from mtp_train.target.weights import SharedWeights

LoadHead = Callable[[Path, SharedWeights], Head]


class HfEngine(Engine):
    """transformers' own model of the target, attending over flat token axes (``nn/attention.py``).

    ``load_head`` rebuilds a head from a checkpoint over the weights it shares with the target; the verb hands it over,
    since finding the class that a checkpoint's word names is not the engine's business (None: ``speculate`` refuses).
    ``batch_size`` sequences are decoded together by ``generate``; ``max_prefill_tokens`` bounds a forward's new tokens,
    ``max_cache_tokens`` the KV cache: requests that need more room are decoded fewer at a time (``engine/room.py``).
    """

    word = "hf"

    def __init__(
        self,
        *,
        target_path: Path,
        trust_remote_code: bool,
        load_head: LoadHead | None,
        dtype: str,
        device: str,
        batch_size: int,
        max_prefill_tokens: int,
        max_cache_tokens: int,
    ) -> None:
        for name, value in (("batch_size", batch_size), ("max_prefill_tokens", max_prefill_tokens), ("max_cache_tokens", max_cache_tokens)):
            if value < 1:
                raise ValueError(f"engine.{name}: expected at least 1, found {value}")
        self.target_path, self._trust_remote_code = Path(target_path), trust_remote_code
        self._device = choose_device(device)
        self._dtype = choose_dtype(dtype, self._device)
        self.load_head, self.batch_size = load_head, batch_size
        self.max_prefill_tokens, self.max_cache_tokens = max_prefill_tokens, max_cache_tokens

    @functools.cached_property
    def target(self) -> TargetModel:
        """The model, loaded when it is first needed: where all is done already, it never is."""
        return TargetModel(path=self.target_path, dtype=self._dtype, device=self._device, trust_remote_code=self._trust_remote_code)

    @property
    def version(self) -> str:
        import transformers

        return f"transformers {transformers.__version__}"

    @property
    def dtype(self) -> str:
        return self._dtype

    @property
    def device(self) -> str:
        return str(self._device)

    def generate(self, requests: Sequence[GenerateRequest], sampling: Sampling) -> Iterator[Generated]:
        return self._generate(requests, sampling, batch_size=self.batch_size, ignore_eos=False, desc=f"write, {self.dtype}")

    def _generate(
        self, requests: Sequence[GenerateRequest], sampling: Sampling, *, batch_size: int, ignore_eos: bool, desc: str
    ) -> Iterator[Generated]:
        limits = [min(request.max_new_tokens, sampling.max_new_tokens) for request in requests]
        needs = [len(request.token_ids) + limit for request, limit in zip(requests, limits, strict=True)]
        if not needs:
            return  # the target need not be loaded
        self.target.check_length(max(needs))
        with watched(num_prompt_tokens=sum(needs) - sum(limits), most_new_tokens=sum(limits), desc=desc) as watch:
            for group in by_room(requests, needs, batch_size=batch_size, max_cache_tokens=self.max_cache_tokens):
                yield from generate(
                    self.target,
                    group.requests,
                    sampling,
                    batch_size=group.num_slots,
                    max_prefill_tokens=self.max_prefill_tokens,
                    ignore_eos=ignore_eos,
                    watch=watch,
                )

    def prefill(self, responses: Iterable[Response], settings: PrefillSettings) -> Iterator[Sample]:
        return prefill(self.target, responses, settings, max_prefill_tokens=self.max_prefill_tokens)

    def speculate(self, requests: Sequence[SpeculateRequest], draft: Path | None, settings: SpeculateSettings) -> Acceptance:
        head = self._head(draft) if settings.decoding.needs_head else None
        _check_ids([request.prompt_id for request in requests])
        margin = settings.sampling.max_new_tokens + settings.decoding.num_rows + 1
        needs = [len(request.token_ids) + margin for request in requests]
        if needs:  # else nothing is decoded, and the target need not be loaded
            self.target.check_length(max(needs))
        parts: list[Measured] = []
        with watched(
            num_prompt_tokens=sum(len(request.token_ids) for request in requests),
            most_new_tokens=settings.sampling.max_new_tokens * len(requests),
            desc=f"decode with drafts, {self.dtype}",
        ) as watch:
            for group in by_room(requests, needs, batch_size=settings.batch_size, max_cache_tokens=self.max_cache_tokens):
                run = Speculation(
                    target=self.target, head=head, settings=settings, max_prefill_tokens=self.max_prefill_tokens, num_slots=group.num_slots
                )
                parts.append(run.run(group.requests, watch))
        measured = merge(parts, order=[request.prompt_id for request in requests])
        return Acceptance(
            prompts=tuple(measured.prompts),
            scheme=settings.decoding.shape,
            decoding=settings.decoding.word,
            num_speculative_tokens=settings.num_speculative_tokens,
            num_nodes=settings.decoding.num_nodes,
            temperature=settings.sampling.temperature,
            draft_sampling=settings.draft_sampling,
            measured_by=self.word,
            engine_version=self.version,
            dtype=self.dtype,
            wall_s=measured.wall_s,
            notes={
                "decoding": settings.decoding.stated(),
                "batch_size": settings.batch_size,
                "top_p": settings.sampling.top_p,
                "seed": settings.sampling.seed,
                "max_new_tokens": settings.sampling.max_new_tokens,
                "ignore_eos": settings.ignore_eos,
                "num_target_forwards": measured.num_forwards,
                "num_nodes_judged": measured.num_nodes,
                "num_drafted_per_position_beyond_end": measured.drafted_beyond_end,
                "num_accepted_per_position_beyond_end": measured.accepted_beyond_end,
            },
        )

    def _head(self, draft: Path | None) -> Head:
        if self.load_head is None:
            raise ValueError("engine=hf: expected load_head, which rebuilds a head from its checkpoint, found none; speculate needs it")
        if draft is None:
            raise ValueError("engine=hf: expected the checkpoint of a head, found none; decoding=prompt_lookup and lookahead need none")
        head = self.load_head(draft, self.target.shared_weights())
        return head.to(device=self.target.device, dtype=self.target.model.dtype).eval()

    def baseline(self, requests: Sequence[SpeculateRequest], settings: SpeculateSettings) -> Baseline:
        _check_ids([request.prompt_id for request in requests])
        started = time.perf_counter()
        limit = settings.sampling.max_new_tokens
        asked = [GenerateRequest(request_id=r.prompt_id, token_ids=r.token_ids, max_new_tokens=limit) for r in requests]
        answers = self._generate(
            asked,
            settings.sampling,
            batch_size=settings.batch_size,
            ignore_eos=settings.ignore_eos,
            desc=f"decode without drafts, {self.dtype}",
        )
        token_ids = {answer.request_id: answer.token_ids for answer in answers}
        wall_s = time.perf_counter() - started
        return Baseline(token_ids={request.prompt_id: token_ids[request.prompt_id] for request in requests}, wall_s=wall_s)

    def time_steps(self, draft: Path | None, asked: CostsAsked) -> StepTimes:
        return time_steps(self.target, None if draft is None else self._head(draft), asked, max_prefill_tokens=self.max_prefill_tokens)

    @torch.inference_mode()
    def logit_gap(self, token_ids: Sequence[int]) -> float:
        device, count = self.target.device, len(token_ids)
        context = PackedAttention(bounds=(0, count))
        hidden_TD = self.target.forward(torch.tensor(token_ids, device=device), torch.arange(count, device=device), context)
        best, second = self.target.logits(hidden_TD[-1:]).float().topk(2).values[0].tolist()
        return best - second

    def describe(self) -> dict[str, Any]:
        return {
            "engine": self.word,
            "version": self.version,
            "torch": torch.__version__,
            "device": self.device,
            "threads": torch.get_num_threads(),
            "dtype": self.dtype,
            "attention": f"{ATTENTION} (flash kernels over packed rows, scaled_dot_product_attention over the ragged KV cache)",
            "batch_size": self.batch_size,
            "max_prefill_tokens": self.max_prefill_tokens,
            "max_cache_tokens": self.max_cache_tokens,
            "stop_ids": list(stop_token_ids(self.target_path, trust_remote_code=self._trust_remote_code)),
        }


def _check_ids(ids: Sequence[str]) -> None:
    if len(set(ids)) != len(ids):
        twice = sorted({name for name in ids if ids.count(name) > 1})
        raise ValueError(f"prompts: expected each prompt_id once, found {twice[:5]} more than once")
