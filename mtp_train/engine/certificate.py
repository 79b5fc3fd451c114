"""Draws texts with each decoding scheme from a target so small that its joint distribution can be enumerated.

Everything is the engine's own path: prefill, drafting, one forward per verification, the exact rule, the caches. The
vocabulary has a few tokens, so that the joint of the K + 1 tokens that a verification can emit has few cells. (The first
token of an answer comes from the prefill and is summed out.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from mtp_train.acceptance.certificate import GreedyCase, SampledCase, distances
from mtp_train.acceptance.report_data import part_from_json
from mtp_train.acceptance.report_way import way_of
from mtp_train.decoding.base import Decoding
from mtp_train.decoding.chain import Chain
from mtp_train.decoding.dynamic_tree import DynamicTree
from mtp_train.decoding.eagle_tree import EagleTree
from mtp_train.decoding.lookahead import Lookahead
from mtp_train.decoding.medusa_tree import MedusaTree
from mtp_train.decoding.prompt_lookup import PromptLookup
from mtp_train.engine.base import (
    LEAST_TEMPERATURE,
    MOST_TEMPERATURE,
    Baseline,
    DraftSampling,
    Sampling,
    SpeculateRequest,
    SpeculateSettings,
)
from mtp_train.engine.hf import HfEngine
from mtp_train.engine.measure import prove_identity
from mtp_train.head.base import Head, ParallelHead
from mtp_train.head.mtp import Mtp
from mtp_train.nn.attention import PackedAttention
from mtp_train.runtime import atomic_write_json, log, read_object
from mtp_train.target.model_folder import WEIGHTS
from mtp_train.target.weights import SharedWeights

Finished = TypeVar("Finished", SampledCase, GreedyCase)

DEPTH = 2
_PROMPT_TOKENS = (1, 2, 3, 0, 1, 2, 1, 3, 1, 2)
# Sequences decoded together; their caches are small.
_BATCH = 1000
_NORMS = ("embed", "hidden", "input", "output", "feedback")


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is drawn with: a scheme, how its drafts come about, a temperature."""

    decoding: Decoding
    draft_sampling: DraftSampling
    temperature: float

    def __post_init__(self) -> None:
        if not LEAST_TEMPERATURE <= self.temperature <= MOST_TEMPERATURE:
            raise ValueError(
                f"temperatures: expected {LEAST_TEMPERATURE:g} to {MOST_TEMPERATURE:g} for sampled cases, found {self.temperature:g}"
            )

    @property
    def key(self) -> str:
        return f"{self.decoding.word}, {self.draft_sampling}, {self.temperature:g}"


def schemes() -> list[Decoding]:
    """Every scheme in a shape that emits up to ``DEPTH`` + 1 tokens, with siblings and pruning wherever it has them."""
    return [
        Chain(num_speculative_tokens=DEPTH, refresh=True),
        EagleTree(nodes_per_depth=(3, 4), refresh=True),
        DynamicTree(max_depth=DEPTH, width=2, max_nodes=4, min_confidence=0.1, refresh=True),
        MedusaTree(max_depth=DEPTH, top_k=3, max_nodes=6),
        PromptLookup(num_speculative_tokens=DEPTH, max_ngram=3, min_ngram=1),
        Lookahead(window=3, ngram=DEPTH + 1, max_candidates=3, from_prompt=True),
    ]


def cases(temperatures: Sequence[float]) -> list[Case]:
    """Every scheme with every kind of drafts that it has, at each temperature. ValueError for one temperature twice."""
    if len({f"{heat:g}" for heat in temperatures}) < len(temperatures):
        raise ValueError(f"temperatures: expected each once (six digits tell them apart), found {list(temperatures)}")
    found = []
    for decoding in schemes():
        kinds: tuple[DraftSampling, ...] = ("greedy", "probabilistic") if decoding.draws else ("greedy",)
        found += [Case(decoding=decoding, draft_sampling=kind, temperature=heat) for kind in kinds for heat in temperatures]
    return found


class _RandomHeads(ParallelHead):
    """Parallel heads that are random maps of the hidden state: any draft must leave the distribution as it is."""

    word = method = "random_heads"
    num_ahead = DEPTH

    def __init__(self, *, shared: SharedWeights, seed: int) -> None:
        super().__init__(shared=shared)
        generator = torch.Generator().manual_seed(seed)
        self.map_KVD = torch.randn(self.num_ahead, *shared.lm_head_VD.shape, generator=generator)

    def unroll(self, batch: Any, *, wanted: Any = None) -> Iterator[Any]:
        raise AssertionError("never trained")

    def settings(self) -> dict[str, Any]:
        return {}

    def ahead(self, hidden_BD: torch.Tensor) -> torch.Tensor:
        return 0.5 * torch.einsum("kvd,bd->kbv", self.map_KVD.to(hidden_BD), hidden_BD)


class SmallTarget:
    """A random target with a vocabulary of few tokens on disk, an engine over it, and its exact distribution."""

    def __init__(self, folder: Path, *, vocabulary: int, seed: int) -> None:
        from safetensors.torch import save_file
        from transformers import LlamaConfig, LlamaForCausalLM

        if vocabulary < 2:
            raise ValueError(f"vocabulary: expected at least 2 tokens, between which something is drawn, found {vocabulary}")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            config = LlamaConfig(
                vocab_size=vocabulary,
                hidden_size=16,
                intermediate_size=32,
                num_hidden_layers=2,
                num_attention_heads=2,
                max_position_embeddings=64,
                initializer_range=0.3,
                bos_token_id=0,
                eos_token_id=0,
            )
            model = LlamaForCausalLM(config)
        # Not by the model's own save_pretrained, which imports deepspeed where it is installed: that takes seconds and warns of CPUs.
        config.save_pretrained(folder)
        save_file(model.state_dict(), folder / WEIGHTS, metadata={"format": "pt"})
        self.folder, self.vocabulary, self.seed = folder, vocabulary, seed
        self.prompt = tuple(token % vocabulary for token in _PROMPT_TOKENS)
        self.engine = HfEngine(
            target_path=folder,
            trust_remote_code=False,
            load_head=None,
            dtype="float32",
            device="cpu",
            batch_size=_BATCH,
            max_prefill_tokens=_BATCH * len(_PROMPT_TOKENS),
            max_cache_tokens=2**20,
        )

    @property
    def description(self) -> str:
        return (
            f"random Llama of 2 layers over {self.vocabulary} tokens (seed {self.seed}); the joint of {DEPTH + 1} tokens behind a "
            f"prompt of {len(self.prompt)} tokens and the answer's first"
        )

    def head(self, decoding: Decoding) -> Head:
        """A random head that the scheme can draft with."""
        shared = self.engine.target.shared_weights()
        if isinstance(decoding, MedusaTree):
            return _RandomHeads(shared=shared, seed=self.seed)
        return Mtp(
            target_path=self.folder,
            shared=shared,
            norms=dict.fromkeys(_NORMS, True),
            column_order="hidden_embed",
            zero_first_embedding=True,
            init="random",
            seed=self.seed + 1,
            trust_remote_code=False,
        )

    def joint(self, temperature: float) -> torch.Tensor:
        """Exact probabilities of the second to last of ``DEPTH`` + 2 tokens behind the prompt, (vocabulary^(DEPTH + 1)), the first
        token summed out; the last token's index moves fastest."""
        law = torch.ones(1, dtype=torch.float64)
        prefixes = torch.tensor([self.prompt])
        for _ in range(DEPTH + 2):
            law = (law[:, None] * self._next(prefixes, temperature)).flatten()
            each = torch.arange(self.vocabulary).repeat(len(prefixes))
            prefixes = torch.cat([prefixes.repeat_interleave(self.vocabulary, 0), each[:, None]], 1)
        return law.reshape(self.vocabulary, -1).sum(0)

    @torch.inference_mode()
    def _next(self, prefixes: torch.Tensor, temperature: float) -> torch.Tensor:
        num, length = prefixes.shape
        context = PackedAttention(bounds=tuple(range(0, num * length + 1, length)))
        hidden_TD = self.engine.target.forward(prefixes.flatten(), torch.arange(length).repeat(num), context)
        logits_MV = self.engine.target.logits(hidden_TD[length - 1 :: length])
        return (logits_MV.double() / temperature).softmax(-1)


def draw_case(target: SmallTarget, case: Case, *, num_draws: int, seed: int) -> SampledCase:
    """Draw ``num_draws`` texts and compare them with the target's exact joint distribution."""
    target.engine.load_head = lambda path, shared: target.head(case.decoding)
    settings = SpeculateSettings(
        decoding=case.decoding,
        draft_sampling=case.draft_sampling,
        sampling=Sampling(temperature=case.temperature, top_p=1.0, max_new_tokens=DEPTH + 2, seed=seed),
        batch_size=_BATCH,
        ignore_eos=True,
    )
    requests = [SpeculateRequest(prompt_id=str(index), category="certificate", token_ids=target.prompt) for index in range(num_draws)]
    found = target.engine.speculate(requests, target.folder if case.decoding.needs_head else None, settings)
    texts = torch.tensor([prompt.token_ids[1:] for prompt in found.prompts])
    place = target.vocabulary ** torch.arange(DEPTH, -1, -1)
    counts = torch.bincount((texts * place).sum(-1), minlength=target.vocabulary ** (DEPTH + 1))
    return SampledCase(
        decoding=case.decoding.word,
        drafted=way_of(found).drafted,
        draft_sampling=case.draft_sampling,
        temperature=case.temperature,
        num_tokens=DEPTH + 1,
        acceptance_length=found.acceptance_length(),
        distances=distances(counts.tolist(), target.joint(case.temperature).tolist()),
    )


@dataclass(kw_only=True)
class GreedyTexts:
    """The same requests decoded greedily with every scheme, held against plain decoding, which is done once."""

    engine: HfEngine
    prompt_set: str
    requests: Sequence[SpeculateRequest]
    max_new_tokens: int
    _plain: Baseline | None = None

    def compare(self, decoding: Decoding, *, head: str, draft: Path | None, weights_sha256: str | None) -> GreedyCase:
        """Whether the texts with drafts are the plain ones, token for token. ``weights_sha256`` is that of the head in ``draft``."""
        settings = SpeculateSettings(
            decoding=decoding,
            draft_sampling="greedy",
            sampling=Sampling(temperature=0.0, top_p=1.0, max_new_tokens=self.max_new_tokens, seed=0),
            batch_size=self.engine.batch_size,
            ignore_eos=False,
        )
        if self._plain is None:
            self._plain = self.engine.baseline(self.requests, settings)
        found = prove_identity(
            head=head,
            prompt_set=self.prompt_set,
            engine=self.engine,
            requests=self.requests,
            draft=draft,
            settings=settings,
            baseline=self._plain,
        )
        assert found.identity is not None
        drafted = way_of(found.acceptance).drafted
        return GreedyCase(
            head=head,
            decoding=decoding.word,
            drafted=drafted,
            prompt_set=self.prompt_set,
            identity=found.identity,
            weights_sha256=weights_sha256,
        )


@dataclass(kw_only=True)
class Unfinished:
    """What is certified so far, on disk beside the certificate until that is whole: a run that was interrupted goes on.

    Cases of other settings, of other code, or of other heads or their target (``identity``), are not taken over, and that is said.
    """

    path: Path
    identity: dict[str, Any]
    done: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.path.is_file():
            return
        try:
            found = read_object(self.path, {"identity": dict, "done": dict[str, dict]}, remedy="its cases are made again")
        except ValueError as fault:
            log(str(fault))
            return
        if found["identity"] == self.identity:
            self.done = found["done"]
        elif found["done"]:
            odd = [key for key in (*self.identity, *found["identity"]) if self.identity.get(key) != found["identity"].get(key)]
            log(f"certificate: {len(found['done'])} cases of other {', '.join(dict.fromkeys(odd))} are made again")

    def get(self, key: str, kind: type[Finished], make: Callable[[], Finished]) -> Finished:
        """The case ``key`` from disk, else made now and kept."""
        if key in self.done:
            log(f"certificate: {key} is done already")
            return part_from_json(kind, self.done[key])
        log(f"certificate: {key}")
        made = make()
        self.done[key] = asdict(made)
        atomic_write_json(self.path, {"identity": self.identity, "done": self.done})
        return made
