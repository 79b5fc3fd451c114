"""``engine=vllm``: answers, hidden states and acceptance from the kernels that will serve."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from mtp_train.acceptance.verify import request_generator
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
from mtp_train.engine.stop import stop_token_ids
from mtp_train.engine.vllm_costs import time_steps
from mtp_train.engine.vllm_prefill import prefill_groups, with_a_token_behind
from mtp_train.engine.vllm_process import VllmPool
from mtp_train.engine.vllm_settings import VllmSettings, check_kernels, choose_dtype
from mtp_train.engine.vllm_speculate import acceptance, served_for
from mtp_train.engine.vllm_trace import DraftRows, read_trace
from mtp_train.exporter.served import serve_command
from mtp_train.records import Acceptance, Response, Sample
from mtp_train.runtime import progress

# Forwards that a process reads as one batch in ``prefill``: only the last is not full.
_FORWARDS_PER_BATCH = 4


class VllmEngine(Engine):
    """vLLM over one target, each operation in processes of its own. Settings: ``conf/engine/vllm.yaml``.

    ``load_head`` is what the verbs hand to every engine; vLLM builds heads from a served folder and needs none.
    """

    word = "vllm"

    def __init__(
        self,
        *,
        target_path: Path,
        trust_remote_code: bool,
        load_head: Callable[..., object] | None,
        dtype: str,
        tensor_parallel_size: int,
        data_parallel_size: int,
        batch_size: int,
        max_prefill_tokens: int,
        max_length_tokens: int | None,
        enforce_eager: bool,
        attention_backend: str | None,
        gpu_memory_utilization: float,
        cpu_kv_cache_gib: int,
        cpu_threads: int | None,
        scratch: Path | None,
    ) -> None:
        self.settings = VllmSettings(
            target_path=Path(target_path),
            trust_remote_code=trust_remote_code,
            dtype=choose_dtype(dtype, Path(target_path)),
            tensor_parallel_size=tensor_parallel_size,
            data_parallel_size=data_parallel_size,
            batch_size=batch_size,
            max_prefill_tokens=max_prefill_tokens,
            max_length_tokens=max_length_tokens,
            enforce_eager=enforce_eager,
            attention_backend=attention_backend,
            gpu_memory_utilization=gpu_memory_utilization,
            cpu_kv_cache_gib=cpu_kv_cache_gib,
            cpu_threads=cpu_threads,
            scratch=None if scratch is None else Path(scratch),
        )
        check_kernels(self.settings.target_path)
        self._stop_ids = stop_token_ids(self.settings.target_path, trust_remote_code=trust_remote_code)
        self._described: dict[str, Any] = {}

    @property
    def version(self) -> str:
        return f"vllm {self.settings.vllm_version()}"

    @property
    def dtype(self) -> str:
        return self.settings.dtype

    def _pool(
        self,
        llm: Mapping[str, Any],
        *,
        copies: int,
        target_layer_ids: tuple[int, ...] | None = None,
        tap_draft: bool = False,
        time_steps: bool = False,
    ) -> VllmPool:
        probe = target_layer_ids is not None or tap_draft or time_steps
        return VllmPool(
            llm=llm,
            environments=[self.settings.environment(index, probe=probe) for index in range(copies)],
            target_layer_ids=target_layer_ids,
            tap_draft=tap_draft,
            time_steps=time_steps,
            scratch=self.settings.scratch,
        )

    def _message(
        self, request_id: str, token_ids: Sequence[int], sampling: Sampling, *, max_new_tokens: int, ignore_eos: bool, by_step: bool
    ) -> dict[str, Any]:
        """One request as the worker takes it; the seed is the request's own, so that its draws repeat in any batch."""
        longest = self.settings.longest_tokens
        if not 1 <= len(token_ids) < longest:
            raise ValueError(
                f"request {request_id}: expected 1 to {longest - 1} tokens (the target's longest sequence less one to answer), "
                f"found {len(token_ids)}"
            )
        seed = request_generator(seed=sampling.seed, request_id=request_id).initial_seed()
        return {
            "request_id": request_id,
            "token_ids": list(token_ids),
            "sampling": {
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "max_tokens": max_new_tokens,
                "ignore_eos": ignore_eos,
                "stop_token_ids": [] if ignore_eos else list(self._stop_ids),
                "seed": None if sampling.temperature == 0 else seed % 2**63,
            },
            "take": None,
            "by_step": by_step,
        }

    def generate(self, requests: Sequence[GenerateRequest], sampling: Sampling) -> Iterator[Generated]:
        messages = [
            self._message(
                request.request_id,
                request.token_ids,
                sampling,
                max_new_tokens=min(request.max_new_tokens, sampling.max_new_tokens),
                ignore_eos=False,
                by_step=False,
            )
            for request in requests
        ]
        with self._pool(self.settings.llm(drawn=sampling.temperature > 0), copies=self.settings.data_parallel_size) as pool:
            self._described = pool.description
            for answer in pool.run(messages, max_in_flight=2 * self.settings.batch_size):
                yield Generated(
                    request_id=answer["request_id"], token_ids=tuple(answer["token_ids"]), finish_reason=_reason(answer["finish_reason"])
                )

    def prefill(self, responses: Iterable[Response], settings: PrefillSettings) -> Iterator[Sample]:
        with closing(self.prefill_groups([list(responses)], settings)) as groups:
            for samples in groups:
                yield from samples

    def prefill_groups(self, groups: Iterable[Sequence[Response] | None], settings: PrefillSettings) -> Generator[Iterator[Sample]]:
        checked = self._checked(groups)
        first = next((group for group in checked if group is not None), None)  # before anything is started
        if first is None:
            return
        with self.prefill_pool(settings) as pool:
            yield from prefill_groups(pool, chain([first], checked), settings, batch_tokens=self.batch_tokens)

    def _checked(self, groups: Iterable[Sequence[Response] | None]) -> Iterator[Sequence[Response] | None]:
        longest = self.settings.longest_tokens
        for group in groups:
            for response in group or ():
                if not 1 <= len(response.token_ids) <= longest:
                    raise ValueError(
                        f"response {response.prompt_id}: expected 1 to {longest} tokens (the longest that the target, or "
                        f"engine.max_length_tokens, allows), found {len(response.token_ids)}"
                    )
            yield group

    @property
    def batch_tokens(self) -> int:
        """Tokens that a process reads as one batch in ``prefill``."""
        return _FORWARDS_PER_BATCH * self.settings.max_prefill_tokens

    @contextmanager
    def prefill_pool(self, settings: PrefillSettings) -> Iterator[VllmPool]:
        """The processes of one ``prefill``, for whoever prefills several times."""
        llm = self.settings.prefill_llm(taps=bool(settings.target_layer_ids))
        with self._pool(llm, copies=self.settings.data_parallel_size, target_layer_ids=settings.target_layer_ids) as pool:
            self._described = pool.description
            yield pool

    def _decode(
        self, requests: Sequence[SpeculateRequest], settings: SpeculateSettings, llm: Mapping[str, Any], *, tap_draft: bool = False
    ) -> _Decoded:
        """All answers, the process's own counters, the wall time from the first request to the last answer, the draft's rows."""
        messages = [
            self._message(
                request.prompt_id,
                request.token_ids,
                settings.sampling,
                max_new_tokens=settings.sampling.max_new_tokens,
                ignore_eos=settings.ignore_eos,
                by_step=True,
            )
            for request in requests
        ]
        with self._pool(llm, copies=1, tap_draft=tap_draft) as pool:
            self._described = pool.description
            started = time.perf_counter()
            what = f"decode with{'' if 'speculative_config' in llm else 'out'} drafts, {self.dtype}"
            running = pool.run(messages, max_in_flight=2 * settings.batch_size)
            with progress(running, desc=what, unit="prompt", total=len(messages)) as bar:
                answers = list(bar)
            wall_s = time.perf_counter() - started
            rows: list[DraftRows] = []
            if tap_draft:
                path = pool.folder / "drafts.safetensors"
                pool.ask({"kind": "take_draft", "path": str(path)})
                rows = list(read_trace(path))
            return _Decoded(answers, pool.ask({"kind": "counters"})[0], wall_s, rows)

    def draws_drafts_of(self, method: str) -> bool:
        return method != "medusa"  # MedusaProposer takes the argmax of each head

    def speculate(self, requests: Sequence[SpeculateRequest], draft: Path | None, settings: SpeculateSettings) -> Acceptance:
        return self._speculate(requests, draft, settings, tap_draft=False)[0]

    def trace(self, requests: Sequence[SpeculateRequest], draft: Path, settings: SpeculateSettings) -> tuple[Acceptance, list[DraftRows]]:
        """``speculate``, and every forward of the head for ``conformance.compare_drafts``.

        All rows are held in memory: for a few dozen short prompts, to find out where two engines part.
        """
        return self._speculate(requests, draft, settings, tap_draft=True)

    def _speculate(
        self, requests: Sequence[SpeculateRequest], draft: Path | None, settings: SpeculateSettings, *, tap_draft: bool
    ) -> tuple[Acceptance, list[DraftRows]]:
        served = served_for(settings.decoding, draft, target_path=self.settings.target_path)
        method = served.speculative_config["method"]
        if settings.draft_sampling == "probabilistic" and not self.draws_drafts_of(method):
            raise ValueError(
                f"draft_sampling: expected greedy with vLLM's method {method}, found probabilistic; engine=hf draws its drafts"
            )
        if tap_draft and method not in ("mtp", "eagle", "eagle3"):
            raise ValueError(f"trace: expected a head that reads its own states (mtp, eagle or eagle3), found one of method {method}")
        llm = self.settings.speculate_llm(served, settings)
        decoded = self._decode(requests, settings, llm, tap_draft=tap_draft)
        serve = serve_command(
            target=str(self.settings.target_path),
            speculative_config=llm["speculative_config"],
            hf_overrides=served.hf_overrides,
            flags=self.settings.serve_flags(),
        )
        measured = acceptance(
            requests,
            decoded.answers,
            decoded.counters,
            settings,
            engine_version=self.version,
            dtype=self.dtype,
            wall_s=decoded.wall_s,
            notes={**self.describe(), "class": served.class_name, "serve": serve, "plugin": served.plugin, "flags": llm},
        )
        return measured, decoded.rows

    def time_steps(self, draft: Path | None, asked: CostsAsked) -> StepTimes:
        def message(request_id: str, token_ids: list[int], sampling: Sampling) -> dict[str, Any]:
            limit = sampling.max_new_tokens
            return self._message(request_id, token_ids, sampling, max_new_tokens=limit, ignore_eos=True, by_step=False)

        return time_steps(self.settings, draft, asked, open_pool=lambda llm: self._pool(llm, copies=1, time_steps=True), message=message)

    def baseline(self, requests: Sequence[SpeculateRequest], settings: SpeculateSettings) -> Baseline:
        decoded = self._decode(requests, settings, self.settings.baseline_llm(settings))
        found = {answer["request_id"]: tuple(answer["token_ids"]) for answer in decoded.answers}
        return Baseline(token_ids={request.prompt_id: found[request.prompt_id] for request in requests}, wall_s=decoded.wall_s)

    def logit_gap(self, token_ids: Sequence[int]) -> float:
        return self.logit_gaps([token_ids])[0]

    def logit_gaps(self, prefixes: Sequence[Sequence[int]]) -> list[float]:
        """In one process for all."""
        asked = [with_a_token_behind(str(number), token_ids) for number, token_ids in enumerate(prefixes)]
        gaps = []
        for sample in self.prefill(asked, PrefillSettings(target_layer_ids=(), top_k=2)) if asked else ():
            assert sample.teacher is not None
            best, second = sample.teacher.log_probs_MC[-1].tolist()
            gaps.append(best - second)
        return gaps

    def describe(self) -> dict[str, Any]:
        """What a report must say; device and attention kernels are known once something has run."""
        return {
            "engine": self.word,
            "version": self.version,
            "dtype": self.dtype,
            "stop_ids": list(self._stop_ids),
            "flags": self.settings.llm(drawn=False),
            "environment": self.settings.environment(0, probe=False),
            **self._described,
        }


class _Decoded(NamedTuple):
    answers: list[dict[str, Any]]
    counters: dict[str, Any]
    wall_s: float
    rows: list[DraftRows]


def _reason(word: str) -> Any:
    if word not in ("stop", "length"):
        raise ValueError(f"engine=vllm: expected an answer to end by stop or length, found {word!r}")
    return word
