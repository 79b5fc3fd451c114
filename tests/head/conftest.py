"""Packed random samples and heads over the tiny target; a target that can be drafted for, with the reference engine over it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from mtp_train.batch.packing import pack
from mtp_train.decoding.base import Decoding
from mtp_train.engine.base import GenerateRequest, PrefillSettings, Sampling, SpeculateRequest, SpeculateSettings
from mtp_train.engine.estimate_from_cache import estimate
from mtp_train.engine.hf import HfEngine
from mtp_train.head.base import Head
from mtp_train.head.eagle import Eagle
from mtp_train.head.mtp import Mtp
from mtp_train.head.pair import PairHead
from mtp_train.records import Acceptance, Batch, Response, Sample
from mtp_train.target.weights import read_shared

SIZE, VOCABULARY = 64, 320


def _sample(number: int, length: int) -> Sample:
    draw = torch.Generator().manual_seed(100 + number)
    return Sample(
        sample_id=f"s{number}",
        token_ids_T=torch.randint(0, VOCABULARY, (length,), generator=draw),
        loss_mask_T=torch.arange(length) >= length // 3,
        hidden_TD=torch.randn(length, SIZE, generator=draw),
    )


@pytest.fixture
def samples() -> list[Sample]:
    return [_sample(number, length) for number, length in enumerate((7, 1, 12, 3, 2))]


@pytest.fixture
def batch(samples: list[Sample]) -> Batch:
    return pack(samples)


@pytest.fixture
def make_head(tiny_llama: Path) -> Callable[..., PairHead]:
    def make(*, kind: type[PairHead] = Mtp, norms: Mapping[str, bool] | None = None, **changes: Any) -> PairHead:
        on = kind is Mtp
        settings: dict[str, Any] = {
            "norms": norms or dict.fromkeys(("embed", "hidden", "input", "output", "feedback"), on),
            "column_order": "hidden_embed" if on else "embed_hidden",
            "zero_first_embedding": on,
            "init": "random",
            "seed": 0,
            **changes,
        }
        head = kind(target_path=tiny_llama, shared=read_shared(tiny_llama), trust_remote_code=False, **settings)
        with torch.no_grad():
            for parameter in head.parameters():
                if parameter.ndim == 1:  # norms start at 1, which would hide one that is skipped
                    parameter.copy_(torch.linspace(0.5, 1.5, parameter.numel()))
                elif settings["init"] == "random":  # without norms, the tiny target's large weights blow rounding up
                    parameter.mul_(0.5)
        return head

    return make


@pytest.fixture
def kinds() -> dict[str, type[PairHead]]:
    return {"mtp": Mtp, "eagle": Eagle}


class Bench:
    """A random Llama whose next token mostly follows from the last one, so that a head can be right, and the reference engine over it.

    Row t of its lm_head is the embedding of the token before t in a random cycle; what its layers add disturbs that.
    """

    vocab_size, size = 96, 48
    answer_tokens = 24

    def __init__(self, folder: Path, *, model_type: str = "llama") -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.for_model(
            model_type,
            vocab_size=self.vocab_size,
            hidden_size=self.size,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=256,
            initializer_range=0.15,
            bos_token_id=1,
            eos_token_id=None,
            tie_word_embeddings=False,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config).eval()
            embedding = torch.randn(self.vocab_size, self.size)
            cycle = torch.randperm(self.vocab_size)
        model.model.embed_tokens.weight.data.copy_(embedding)
        model.lm_head.weight.data[cycle] = 0.3 * embedding[cycle.roll(1)]
        model.save_pretrained(folder)
        self.path = folder

    def engine(self, head: Head | None = None) -> HfEngine:
        return HfEngine(
            target_path=self.path,
            trust_remote_code=False,
            load_head=None if head is None else lambda path, shared: head,
            dtype="float32",
            device="cpu",
            batch_size=8,
            max_prefill_tokens=64,
            max_cache_tokens=8192,
        )

    def prompts(self, count: int, *, seed: int) -> list[tuple[int, ...]]:
        draw = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, 9, (count,), generator=draw).tolist()
        return [tuple(torch.randint(2, self.vocab_size, (length,), generator=draw).tolist()) for length in lengths]

    def samples(self, count: int, *, seed: int) -> list[Sample]:
        """The target's own greedy answers to random prompts, as a cache would hold them."""
        engine = self.engine()
        asked = [
            GenerateRequest(request_id=f"s{number}", token_ids=prompt, max_new_tokens=self.answer_tokens)
            for number, prompt in enumerate(self.prompts(count, seed=seed))
        ]
        found = {answer.request_id: answer.token_ids for answer in engine.generate(asked, self._greedy())}
        answered = [self._response(one.request_id, one.token_ids, found[one.request_id]) for one in asked]
        return list(engine.prefill(answered, PrefillSettings(target_layer_ids=(), top_k=8)))

    def measure(self, head: Head, decoding: Decoding, **changes: Any) -> tuple[Acceptance, dict[str, tuple[int, ...]]]:
        """Speculation on prompts of its own, and plain decoding of the same."""
        settings = SpeculateSettings(
            decoding=decoding, batch_size=4, ignore_eos=True, **{"draft_sampling": "greedy", "sampling": self._greedy(), **changes}
        )
        asked = [
            SpeculateRequest(prompt_id=f"r{number}", category="c", token_ids=prompt)
            for number, prompt in enumerate([*self.prompts(6, seed=50), (7,) * 70])  # the last is read in pieces
        ]
        engine = self.engine(head)
        measured = engine.speculate(asked, Path("unused"), settings)
        return measured, engine.baseline(asked, settings).token_ids

    def estimate(self, head: Head, measured: Acceptance) -> Acceptance:
        """The estimate on the answers that were measured."""
        asked = [*self.prompts(6, seed=50), (7,) * 70]
        answered = [self._response(p.prompt_id, prompt, p.token_ids) for p, prompt in zip(measured.prompts, asked, strict=True)]
        return estimate(
            head,
            self.engine().prefill(answered, PrefillSettings(target_layer_ids=(), top_k=None)),
            num_speculative_tokens=measured.num_speculative_tokens,
            draft_sampling="greedy",
            sampling=self._greedy(),
            max_batch_tokens=100,
            device=torch.device("cpu"),
        )

    def _greedy(self) -> Sampling:
        return Sampling(temperature=0.0, top_p=1.0, max_new_tokens=self.answer_tokens, seed=0)

    def _response(self, name: str, prompt: tuple[int, ...], answer: tuple[int, ...]) -> Response:
        return Response(
            prompt_id=name,
            token_ids=prompt + answer,
            loss_mask=(False,) * len(prompt) + (True,) * len(answer),
            messages=(),
            finish_reason="given",
            category="c",
            source="s",
        )


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench") / "target")


@pytest.fixture(scope="session")
def bench_samples(bench: Bench) -> list[Sample]:
    """What heads over the bench's target are trained on."""
    return bench.samples(40, seed=0)
