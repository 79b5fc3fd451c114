"""Every decoding scheme in the reference engine: the text is the target's own, and both caches are as if nothing had been guessed."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mtp_train.acceptance.draft import Draft, Judged
from mtp_train.acceptance.identity import compare
from mtp_train.decoding.base import Decoding, NewBases
from mtp_train.decoding.chain import Chain
from mtp_train.decoding.dynamic_tree import DynamicTree
from mtp_train.decoding.eagle_tree import EagleTree
from mtp_train.decoding.lookahead import Lookahead
from mtp_train.decoding.medusa_tree import MedusaTree
from mtp_train.decoding.prompt_lookup import PromptLookup
from mtp_train.engine.base import Sampling, SpeculateRequest, SpeculateSettings
from mtp_train.engine.hf import HfEngine
from mtp_train.engine.hf_model import TargetModel
from mtp_train.engine.hf_speculate import Speculation
from mtp_train.head.base import Drafted, Head, ParallelHead
from mtp_train.nn.attention import PackedAttention
from mtp_train.nn.ragged import RaggedAttention, RaggedCache

V = 160
CHAIN = Chain(num_speculative_tokens=4, refresh=True)
STATIC = EagleTree(nodes_per_depth=(3, 4, 2, 1), refresh=True)
DYNAMIC = DynamicTree(max_depth=4, width=3, max_nodes=9, min_confidence=0.0, refresh=True)
MEDUSA = MedusaTree(max_depth=3, top_k=3, max_nodes=8)
SCHEMES: dict[str, Decoding] = {
    "chain": CHAIN,
    "eagle_tree": STATIC,
    "eagle_tree without refresh": dataclasses.replace(STATIC, refresh=False),
    "dynamic_tree": DYNAMIC,
    "dynamic_tree that stops early": dataclasses.replace(DYNAMIC, min_confidence=0.2),
    "medusa_tree": MEDUSA,
    "prompt_lookup": PromptLookup(num_speculative_tokens=4, max_ngram=3, min_ngram=1),
    "lookahead": Lookahead(window=4, ngram=4, max_candidates=3, from_prompt=True),
}


class ItsOwnDraft(Head):
    """A draft model with a KV cache of its own: the target itself, its logits sharpened and bent by ``bend`` times a fixed noise."""

    word = method = "its_own"
    reads_hidden = False

    def __init__(self, target: TargetModel, *, bend: float, sharpness: float = 1.0) -> None:
        super().__init__(shared=target.shared_weights())
        self._target = [target]  # not a submodule
        self.sharpness = sharpness
        self.noise_V = bend * torch.randn(self.shared.lm_head_VD.shape[0], generator=torch.Generator().manual_seed(3))

    def unroll(self, batch: Any) -> Any:
        raise AssertionError("not used here")

    def settings(self) -> dict[str, Any]:
        return {}

    def draft(self, *, token_ids_T: Any, hidden_TD: Any, position_T: Any, context: Any) -> Drafted:
        own_TD = self._target[0].forward(token_ids_T, position_T, context)
        return Drafted(own_TD, own_TD)

    def project(self, hidden_MD: torch.Tensor) -> torch.Tensor:
        return self.sharpness * super().project(hidden_MD) + self.noise_V


class Parallel(ParallelHead):
    """Knows texts: finds the hidden state among theirs, and says of the tokens behind it what stands there, bent by noise."""

    word = method = "parallel"
    num_ahead = 3

    def __init__(self, target: TargetModel, texts: list[tuple[int, ...]]) -> None:
        super().__init__(shared=target.shared_weights())
        hidden, behind = [], []
        for text in texts:
            context = PackedAttention(bounds=(0, len(text)))
            with torch.inference_mode():
                hidden.append(target.forward(torch.tensor(text), torch.arange(len(text)), context)[:-4])
            behind += [text[i + 2 : i + 5] for i in range(len(text) - 4)]
        self.known_TD, self.behind_TK = torch.cat(hidden), torch.tensor(behind)
        vocabulary = self.shared.lm_head_VD.shape[0]
        self.noise_KV = 2 * torch.randn(3, vocabulary, generator=torch.Generator().manual_seed(4))

    def unroll(self, batch: Any) -> Any:
        raise AssertionError("not used here")

    def settings(self) -> dict[str, Any]:
        return {}

    def ahead(self, hidden_BD: torch.Tensor) -> torch.Tensor:
        nearest_B = torch.cdist(hidden_BD, self.known_TD).argmin(-1)
        said_KBV = torch.nn.functional.one_hot(self.behind_TK[nearest_B], self.noise_KV.shape[1]).transpose(0, 1)
        return 4.0 * said_KBV + self.noise_KV[:, None]


def settings_of(decoding: Decoding, **changes: Any) -> SpeculateSettings:
    sampling = Sampling(temperature=changes.pop("temperature", 0.0), top_p=1.0, max_new_tokens=changes.pop("max_new_tokens", 18), seed=0)
    plain = SpeculateSettings(decoding=decoding, draft_sampling="greedy", sampling=sampling, batch_size=4, ignore_eos=False)
    return dataclasses.replace(plain, **changes)


@pytest.fixture(scope="module")
def requests(prompts: list[tuple[int, ...]]) -> list[SpeculateRequest]:
    return [SpeculateRequest(prompt_id=f"r{index}", category="c", token_ids=prompt) for index, prompt in enumerate(prompts[:5])]


@pytest.fixture(scope="module")
def engine(tiny_target: Path, make_engine: Any) -> HfEngine:
    made = make_engine(tiny_target)
    assert isinstance(made, HfEngine)
    return made


@pytest.fixture(scope="module")
def plain_answers(engine: HfEngine, requests: list[SpeculateRequest]) -> dict[str, tuple[int, ...]]:
    return engine.baseline(requests, settings_of(CHAIN)).token_ids


@pytest.fixture(scope="module")
def parallel(engine: HfEngine, requests: list[SpeculateRequest], plain_answers: dict[str, tuple[int, ...]]) -> Parallel:
    return Parallel(engine.target, [request.token_ids + plain_answers[request.prompt_id] for request in requests])


def with_head(engine: HfEngine, head: Head) -> HfEngine:
    engine.load_head = lambda path, shared: head
    return engine


@pytest.fixture
def head_for(engine: HfEngine, parallel: Parallel) -> Callable[[Decoding], Head]:
    return lambda decoding: parallel if isinstance(decoding, MedusaTree) else ItsOwnDraft(engine.target, bend=1.5)


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("name", SCHEMES)
def test_greedy_text_is_that_of_plain_greedy_decoding(
    engine: HfEngine, requests: list[SpeculateRequest], plain_answers: Any, head_for: Any, name: str, batch_size: int
) -> None:
    decoding = SCHEMES[name]
    found = with_head(engine, head_for(decoding)).speculate(requests, Path("unused"), settings_of(decoding, batch_size=batch_size))
    identity = compare(
        prompts={request.prompt_id: request.token_ids for request in requests},
        plain=plain_answers,
        speculated={prompt.prompt_id: prompt.token_ids for prompt in found.prompts},
        logit_gap=engine.logit_gap,
    )
    assert identity.differences == ()
    assert (found.scheme, found.decoding) == (decoding.shape, decoding.word) and found.num_speculative_tokens == decoding.depth
    for prompt in found.prompts:
        assert sum(prompt.accepted) == prompt.num_accepted
        assert list(prompt.num_accepted_per_position) == sorted(prompt.num_accepted_per_position, reverse=True)
    if decoding.needs_head:
        assert found.acceptance_length() > 1.1, "a draft that never hits proves nothing"


log: dict[str, list[tuple[Draft, Judged]]] = {}


class Logged(Speculation):
    """Keeps what was judged: of each prompt the drafts, their accepted nodes and the target's own tokens."""

    def _write(self, piece: Any, judged: Judged, observed: Any) -> NewBases | None:
        log.setdefault(piece.sequence.request.prompt_id, []).append((piece.sequence.drafted, judged))
        return super()._write(piece, judged, observed)


@pytest.mark.parametrize(("max_new_tokens", "stops"), [(1, False), (3, False), (18, True)])
@pytest.mark.parametrize("name", SCHEMES)
def test_counts_are_those_of_the_drafts_one_by_one(
    engine: HfEngine,
    requests: list[SpeculateRequest],
    plain_answers: Any,
    head_for: Any,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    max_new_tokens: int,
    stops: bool,
) -> None:
    """Where the room ends within a draft, and where a stop token stands in one or behind it, too."""
    decoding = SCHEMES[name]
    stop_ids = {answer[place] for answer in plain_answers.values() for place in (4, 9) if stops and place < len(answer)}
    monkeypatch.setattr(engine.target, "stop_ids", frozenset(stop_ids))
    log.clear()
    settings = settings_of(decoding, max_new_tokens=max_new_tokens)
    run = Logged(target=engine.target, head=head_for(decoding), settings=settings, max_prefill_tokens=64, num_slots=3)
    for prompt in run.run(requests, lambda read, written, spared: None).prompts:
        answer, flags, drafts = list[int](), list[bool](), 0
        drafted, accepted = [0] * decoding.depth, [0] * decoding.depth
        for draft, judged in log[prompt.prompt_id]:
            drafts += draft.num_candidates > 0
            for position in range(min(draft.depth, max_new_tokens - len(answer))):
                drafted[position] += 1
            for position, token in enumerate([*(draft.token_ids[node] for node in judged.path), judged.next_token]):
                if len(answer) == max_new_tokens or stop_ids.intersection(answer):
                    break
                answer.append(token)
                flags.append(position < len(judged.path))
                if flags[-1]:
                    accepted[position] += 1
        assert prompt.token_ids == tuple(answer) == _cut(plain_answers[prompt.prompt_id], max_new_tokens, stop_ids)
        assert (prompt.num_drafts, prompt.accepted) == (drafts, tuple(flags))
        assert prompt.num_drafted_per_position == tuple(drafted) and prompt.num_accepted_per_position == tuple(accepted)


def _cut(answer: tuple[int, ...], max_new_tokens: int, stop_ids: set[int]) -> tuple[int, ...]:
    """A plain answer where it ends with fewer tokens or more stop tokens."""
    first = next((place for place, token in enumerate(answer) if token in stop_ids), len(answer))
    return answer[: min(first + 1, max_new_tokens)]


class Checked(Speculation):
    """Compares the target's cache after each verification with that of one plain forward over the same text."""

    num_checked = num_deep = 0

    def _write(self, piece: Any, judged: Judged, observed: Any) -> NewBases | None:
        bases = super()._write(piece, judged, observed)
        if bases is not None:
            text = [*piece.sequence.request.token_ids, *piece.sequence.new_tokens[:-1]]
            fresh = RaggedCache(num_slots=1)
            context = RaggedAttention(cache=fresh, slots=[0], counts=[len(text)])
            hidden_TD = self.target.forward(torch.tensor(text), torch.arange(len(text)), context)
            assert self.cache.lengths[piece.slot] == len(text)
            for index, pair in fresh._layers.items():
                for ours, theirs in zip(self.cache._layers[index], pair, strict=True):
                    torch.testing.assert_close(ours[piece.slot, :, : len(text)], theirs[0, :, : len(text)], rtol=1e-4, atol=1e-4)
            held = bases.hidden_BD.shape[0]
            torch.testing.assert_close(bases.hidden_BD, hidden_TD[-held:] if held else hidden_TD[:0], rtol=1e-4, atol=1e-4)
            self.num_checked += 1
            self.num_deep += len(judged.path) > 1
        return bases


@pytest.mark.parametrize("name", SCHEMES)
def test_the_targets_cache_holds_the_accepted_path_alone(
    engine: HfEngine, requests: list[SpeculateRequest], head_for: Any, name: str
) -> None:
    decoding = SCHEMES[name]
    checked = Checked(target=engine.target, head=head_for(decoding), settings=settings_of(decoding), max_prefill_tokens=64, num_slots=3)
    checked.run(requests[:4], lambda read, written, spared: None)
    assert checked.num_checked > 10
    if decoding.needs_head:
        assert checked.num_deep > 1, "paths of one token move nothing"


@pytest.mark.parametrize("name", ["chain", "eagle_tree", "dynamic_tree"])
@torch.inference_mode()
def test_a_draft_models_cache_holds_the_accepted_path_alone(engine: HfEngine, requests: list[SpeculateRequest], name: str) -> None:
    """It reads no hidden states, so what it made of accepted tokens stays: the same as one pass over the text."""
    decoding = SCHEMES[name]
    head = ItsOwnDraft(engine.target, bend=1.0)
    run = Speculation(target=engine.target, head=head, settings=settings_of(decoding), max_prefill_tokens=64, num_slots=2)
    settle, num_checked = run.drafter.settle, 0

    def settle_and_check(slot: int, path: Any, observed: Any) -> int:
        nonlocal num_checked
        held = settle(slot, path, observed)
        cache = run.drafter.cache  # type: ignore[attr-defined]
        sequence = run.running[slot]
        text = [*sequence.request.token_ids, *sequence.new_tokens][: cache.lengths[slot]]
        fresh = RaggedCache(num_slots=1)
        engine.target.forward(torch.tensor(text), torch.arange(len(text)), RaggedAttention(cache=fresh, slots=[0], counts=[len(text)]))
        for index, pair in fresh._layers.items():
            for ours, theirs in zip(cache._layers[index], pair, strict=True):
                torch.testing.assert_close(ours[slot, :, : len(text)], theirs[0, :, : len(text)], rtol=1e-4, atol=1e-4)
        num_checked += held
        return held

    run.drafter.settle = settle_and_check  # type: ignore[method-assign]
    run.run(requests[:3], lambda read, written, spared: None)
    assert num_checked > 5


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize(("temperature", "draft_sampling"), [(0.0, "greedy"), (0.9, "greedy"), (0.9, "probabilistic")])
@pytest.mark.parametrize(
    "tree",
    [EagleTree(nodes_per_depth=(1,) * 4, refresh=True), DynamicTree(max_depth=4, width=1, max_nodes=4, min_confidence=0.0, refresh=True)],
    ids=lambda tree: tree.word,
)
def test_a_tree_with_one_child_per_node_is_the_chain(
    easy_target: Path,
    make_engine: Any,
    leaning_head: Any,
    prompts: Any,
    tree: Decoding,
    temperature: float,
    draft_sampling: Any,
    batch_size: int,
) -> None:
    """Token for token, draw for draw, count for count."""
    engine = make_engine(easy_target, load_head=leaning_head(easy_target, "mtp"))
    asked = [SpeculateRequest(prompt_id=f"r{index}", category="c", token_ids=prompt) for index, prompt in enumerate(prompts[:5])]
    changes = {"temperature": temperature, "draft_sampling": draft_sampling, "batch_size": batch_size, "ignore_eos": True}
    chain, found = (engine.speculate(asked, Path("unused"), settings_of(decoding, **changes)) for decoding in (CHAIN, tree))
    assert found.prompts == chain.prompts
    assert chain.acceptance_length() > 1.2


@pytest.mark.parametrize("draft_sampling", ["greedy", "probabilistic"])
@pytest.mark.parametrize("decoding", [STATIC, DYNAMIC, MEDUSA, SCHEMES["prompt_lookup"], SCHEMES["lookahead"]], ids=lambda d: d.word)
def test_sampled_text_repeats_and_does_not_hang_on_the_batch(
    engine: HfEngine, requests: list[SpeculateRequest], head_for: Any, decoding: Decoding, draft_sampling: Any
) -> None:
    if draft_sampling == "probabilistic" and not decoding.draws:
        with pytest.raises(ValueError, match="whose drafts are not drawn"):
            settings_of(decoding, draft_sampling=draft_sampling)
        return
    runs = [
        with_head(engine, head_for(decoding)).speculate(
            asked, Path("unused"), settings_of(decoding, temperature=0.9, draft_sampling=draft_sampling, batch_size=batch_size)
        )
        for batch_size, asked in ((1, requests[:3]), (4, requests[2::-1]))
    ]
    assert sorted(runs[0].prompts, key=lambda p: p.prompt_id) == sorted(runs[1].prompts, key=lambda p: p.prompt_id)


@pytest.mark.parametrize("decoding", [CHAIN, STATIC, dataclasses.replace(DYNAMIC, max_nodes=40)], ids=lambda d: d.word)
def test_an_exact_draft_is_taken_whole(engine: HfEngine, requests: list[SpeculateRequest], decoding: Decoding) -> None:
    """A draft model that is the target itself: every verification takes the longest path."""
    asked = settings_of(decoding, ignore_eos=True, max_new_tokens=21)
    exact = ItsOwnDraft(engine.target, bend=0.0, sharpness=8.0)  # the same argmax, and sure of it
    found = with_head(engine, exact).speculate(requests, Path("unused"), asked)
    assert found.rate_per_position() == [1.0] * decoding.depth and found.acceptance_length() == 1 + decoding.depth
    assert all(prompt.num_drafts == 20 // (decoding.depth + 1) for prompt in found.prompts)


def test_a_tree_takes_more_than_the_chain(engine: HfEngine, requests: list[SpeculateRequest], head_for: Any) -> None:
    lengths = {}
    for name in ("chain", "eagle_tree", "dynamic_tree"):
        found = with_head(engine, head_for(SCHEMES[name])).speculate(requests, Path("unused"), settings_of(SCHEMES[name]))
        lengths[name] = found.acceptance_length()
    assert lengths["eagle_tree"] > lengths["chain"] + 0.1 and lengths["dynamic_tree"] > lengths["chain"] + 0.1


@pytest.mark.parametrize("name", ["prompt_lookup", "lookahead"])
def test_text_that_repeats_itself_needs_no_head(easy_target: Path, make_engine: Any, name: str) -> None:
    """Here the next token hangs nearly on the last one alone, so that greedy text soon runs in circles."""
    decoding, engine = SCHEMES[name], make_engine(easy_target)
    request = [SpeculateRequest(prompt_id="r", category="c", token_ids=(20, 21, 22))]
    asked = settings_of(decoding, max_new_tokens=60, ignore_eos=True)
    found = engine.speculate(request, None, asked)
    assert {"r": found.prompts[0].token_ids} == engine.baseline(request, asked).token_ids
    assert found.prompts[0].num_drafts < found.notes["num_target_forwards"] - 1, "nothing to draft at first"
    assert found.acceptance_length() > 2 and found.notes["num_target_forwards"] < 50


@pytest.mark.parametrize("decoding", [STATIC, DYNAMIC], ids=lambda d: d.word)
def test_trees_within_a_sliding_window(
    windowed_target: Path, make_engine: Any, requests: list[SpeculateRequest], decoding: Decoding
) -> None:
    """Mistral, whose window of 16 ends within the texts: positions along the tree decide what is seen."""
    engine = make_engine(windowed_target)
    found = with_head(engine, ItsOwnDraft(engine.target, bend=1.0)).speculate(requests, Path("unused"), settings_of(decoding))
    plain = engine.baseline(requests, settings_of(decoding)).token_ids
    assert {prompt.prompt_id: prompt.token_ids for prompt in found.prompts} == plain
    assert found.acceptance_length() > 1.5


@pytest.mark.parametrize(("temperature", "draft_sampling"), [(0.0, "greedy"), (0.9, "probabilistic")])
@pytest.mark.parametrize("said", [float("nan"), float("inf")])
@pytest.mark.parametrize("decoding", [CHAIN, STATIC, MEDUSA, dataclasses.replace(CHAIN, num_speculative_tokens=2)])
def test_a_head_that_says_nothing_finite_is_refused(
    engine: HfEngine,
    requests: list[SpeculateRequest],
    parallel: Parallel,
    decoding: Decoding,
    said: float,
    temperature: float,
    draft_sampling: Any,
) -> None:
    """Its drafts are refused or never made, so that it would be measured as a poor head, or break where it is drawn from."""
    head: Head = ItsOwnDraft(engine.target, bend=1.0)
    head.noise_V[5] = said
    if decoding.depth < 4:
        head = copy.copy(parallel)
        head.noise_KV = parallel.noise_KV.index_fill(1, torch.tensor([5]), said)
    asked = settings_of(decoding, temperature=temperature, draft_sampling=draft_sampling)
    with pytest.raises(ValueError, match=f"head {head.word}: expected finite logits, found NaN or infinite ones in"):
        with_head(engine, head).speculate(requests, Path("unused"), asked)


def test_a_head_may_leave_tokens_out(engine: HfEngine, requests: list[SpeculateRequest], plain_answers: Any) -> None:
    """A logit of -inf is a token that is never drafted, not a fault."""
    head = ItsOwnDraft(engine.target, bend=1.0)
    head.noise_V[::2] = float("-inf")
    found = with_head(engine, head).speculate(requests, Path("unused"), settings_of(STATIC))
    assert {prompt.prompt_id: prompt.token_ids for prompt in found.prompts} == plain_answers
    taken = [token for prompt in found.prompts for token, own in zip(prompt.token_ids, prompt.accepted, strict=True) if own]
    assert taken and all(token % 2 for token in taken)


def test_a_target_of_broken_weights_is_refused(tiny_target: Path, make_engine: Any, requests: list[SpeculateRequest]) -> None:
    engine = make_engine(tiny_target)
    with torch.no_grad():
        engine.target.lm_head.weight[5, 0] = float("nan")
    for temperature in (0.0, 1.0):
        with pytest.raises(ValueError, match="target: expected finite logits"):
            engine.speculate(requests, None, settings_of(SCHEMES["prompt_lookup"], temperature=temperature))


@pytest.mark.parametrize("token_ids", [(8, V, 9), (-1,), ()])
def test_a_prompt_that_is_none_of_the_targets_is_refused(engine: HfEngine, token_ids: tuple[int, ...]) -> None:
    asked = [SpeculateRequest(prompt_id="odd", category="c", token_ids=token_ids)]
    with pytest.raises(ValueError, match="prompt odd: expected"):
        engine.speculate(asked, None, settings_of(SCHEMES["prompt_lookup"]))


def test_what_a_scheme_needs_is_said(engine: HfEngine, requests: list[SpeculateRequest], parallel: Parallel) -> None:
    with_head(engine, ItsOwnDraft(engine.target, bend=0.0))
    with pytest.raises(ValueError, match="expected a head that speaks about several tokens at once"):
        engine.speculate(requests, Path("unused"), settings_of(MEDUSA))
    with pytest.raises(ValueError, match="expected the checkpoint of a head, found none"):
        engine.speculate(requests, None, settings_of(CHAIN))
    deep = dataclasses.replace(MEDUSA, max_depth=4)
    with pytest.raises(ValueError, match="expected at most 3, which this head speaks about at once, found 4"):
        with_head(engine, parallel).speculate(requests, Path("unused"), settings_of(deep))
