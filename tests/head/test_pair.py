"""The heads over pairs: training's unroll is inference's drafting, packing changes nothing, switches do what they say."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from mtp_train.batch.packing import pack
from mtp_train.head.pair import NORMS, PairHead
from mtp_train.nn.ragged import RaggedAttention, RaggedCache
from mtp_train.records import Batch, Sample
from mtp_train.target.weights import read_layer

DEPTHS = 3
MakeHead = Callable[..., PairHead]

MIXTURES = {
    "all": dict.fromkeys(NORMS, True),
    "none": dict.fromkeys(NORMS, False),
    "inputs only": {"embed": True, "hidden": True, "input": False, "output": False, "feedback": False},
    "output, not fed back": {"embed": False, "hidden": False, "input": True, "output": True, "feedback": False},
    "feedback, bare inputs": {"embed": False, "hidden": True, "input": False, "output": True, "feedback": True},
}


def draft_from_every_base(head: PairHead, sample: Sample) -> list[torch.Tensor]:
    """As an engine drafts: per base, the row with the target's hidden state enters the KV cache, then the head's own rows
    with their rotary positions running on; those are taken back before the next base. One (n, D) tensor per depth."""
    cache = RaggedCache(num_slots=1)
    num_tokens = sample.num_tokens
    drafted = [torch.full((num_tokens, sample.hidden_TD.shape[1]), float("nan")) for _ in range(DEPTHS)]
    for base in range(num_tokens - 1):
        hidden = sample.hidden_TD[base : base + 1]
        for depth in range(min(DEPTHS, num_tokens - 1 - base)):
            context = RaggedAttention(cache=cache, slots=[0], counts=[1])
            out = head.draft(
                token_ids_T=sample.token_ids_T[base + 1 + depth][None],
                hidden_TD=hidden,
                position_T=torch.tensor([base + depth]),
                context=context,
            )
            context.commit()
            drafted[depth][base] = out.hidden_TD[0]
            hidden = out.feedback_TD
        cache.truncate(0, base + 1)
    return drafted


@pytest.mark.parametrize("norms", MIXTURES.values(), ids=MIXTURES.keys())
@pytest.mark.parametrize("zero_first_embedding", [True, False])
@pytest.mark.parametrize("column_order", ["hidden_embed", "embed_hidden"])
def test_unroll_is_drafting_with_a_cache_from_every_base(
    make_head: MakeHead, batch: Batch, samples: list[Sample], norms: dict[str, bool], zero_first_embedding: bool, column_order: str
) -> None:
    head = make_head(norms=norms, zero_first_embedding=zero_first_embedding, column_order=column_order)
    with torch.no_grad():
        steps = list(itertools.islice(head.unroll(batch), DEPTHS))
        assert [step.ahead for step in steps] == [2, 3, 4]
        for number, sample in enumerate(samples):
            for depth, drafted in enumerate(draft_from_every_base(head, sample)):
                inside = max(0, sample.num_tokens - 1 - depth)  # rows that read a token of the sample
                rows = slice(batch.bounds[number], batch.bounds[number] + inside)
                torch.testing.assert_close(steps[depth].hidden_TD[rows], drafted[:inside], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["mtp", "eagle"])
def test_packed_samples_are_those_alone(
    make_head: MakeHead, kinds: dict[str, type[PairHead]], batch: Batch, samples: list[Sample], kind: str
) -> None:
    head = make_head(kind=kinds[kind])

    def depths_of(one: Batch) -> list[torch.Tensor]:
        return [step.hidden_TD for step in itertools.islice(head.unroll(one), DEPTHS)]

    with torch.no_grad():
        together = depths_of(batch)
        for number, sample in enumerate(samples):
            for depth, alone in enumerate(depths_of(pack([sample]))):
                inside = max(0, sample.num_tokens - 1 - depth)
                rows = slice(batch.bounds[number], batch.bounds[number] + inside)
                torch.testing.assert_close(together[depth][rows], alone[:inside], rtol=1e-4, atol=1e-5)


def test_packed_gradients_are_the_sum_of_those_alone(make_head: MakeHead, batch: Batch, samples: list[Sample]) -> None:
    head = make_head()

    def loss(one: Batch, lengths: list[int]) -> torch.Tensor:
        total = torch.zeros(())
        for depth, step in enumerate(itertools.islice(head.unroll(one), DEPTHS)):
            for first, length in zip(one.bounds, lengths, strict=False):
                total = total + step.hidden_TD[first : first + max(0, length - 1 - depth)].sin().sum()
        return total

    parameters = list(head.parameters())
    together = torch.autograd.grad(loss(batch, [s.num_tokens for s in samples]), parameters)
    alone = torch.autograd.grad(sum(loss(pack([s]), [s.num_tokens]) for s in samples), parameters)
    for (name, _), packed, summed in zip(head.named_parameters(), together, alone, strict=True):
        torch.testing.assert_close(packed, summed, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("kind", ["mtp", "eagle"])
def test_gradients_reach_the_head_and_nothing_else(make_head: MakeHead, kinds: dict[str, type[PairHead]], batch: Batch, kind: str) -> None:
    head = make_head(kind=kinds[kind])
    steps = list(itertools.islice(head.unroll(batch), DEPTHS))
    sum(step.project(step.hidden_TD).sin().sum() for step in steps).backward()
    assert all(parameter.grad is not None and bool(parameter.grad.abs().sum() > 0) for parameter in head.parameters())
    for tensor in (head.shared.embedding_VD, head.shared.lm_head_VD, head.shared.final_norm_weight_D, batch.hidden_TD):
        assert not tensor.requires_grad and tensor.grad is None
    vocabulary = head.shared.lm_head_VD.shape[0]
    assert not any(vocabulary in tensor.shape for tensor in head.state_dict().values())  # nor is anything of the target's saved


@pytest.mark.parametrize("name", NORMS)
def test_each_switch_changes_the_outcome(make_head: MakeHead, batch: Batch, name: str) -> None:
    def second_depth(norms: dict[str, bool]) -> torch.Tensor:
        head = make_head(norms=norms)
        with torch.no_grad():
            return list(itertools.islice(head.unroll(batch), 2))[1].hidden_TD[:5]

    on = dict.fromkeys(NORMS, True)
    off = {**on, name: False} if name != "output" else {**on, "output": False, "feedback": False}
    assert not torch.allclose(second_depth(on), second_depth(off), atol=1e-3)


def test_zeroing_the_first_embedding_makes_the_token_read_there_irrelevant(make_head: MakeHead, batch: Batch) -> None:
    head = make_head(zero_first_embedding=True)
    changed = batch.token_ids_T.clone()
    changed[1] = (changed[1] + 1) % 320
    with torch.no_grad():
        first = next(iter(head.unroll(batch))).hidden_TD
        other = next(iter(head.unroll(replace(batch, token_ids_T=changed)))).hidden_TD
        kept = next(iter(make_head(zero_first_embedding=False).unroll(replace(batch, token_ids_T=changed)))).hidden_TD
    assert torch.equal(first[0], other[0])
    assert not torch.allclose(first[0], kept[0], atol=1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norms": {"embed": True}}, "expected exactly the switches"),
        ({"norms": {**dict.fromkeys(NORMS, True), "extra": True}}, "expected exactly the switches"),
        ({"norms": {**dict.fromkeys(NORMS, True), "output": False}}, "set feedback=false"),
        ({"column_order": "hidden"}, "hidden_embed or embed_hidden"),
        ({"init": "zeros"}, "random.*target_last_layer.*least_squares"),
    ],
)
def test_impossible_switches_are_refused(make_head: MakeHead, change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_head(**change)


@pytest.mark.parametrize("norms", [MIXTURES["all"], MIXTURES["none"]], ids=["all", "none"])
def test_a_head_can_start_from_the_targets_last_layer(make_head: MakeHead, tiny_llama: Path, norms: dict[str, bool]) -> None:
    head = make_head(norms=norms, init="target_last_layer")
    layer = read_layer(tiny_llama, 1)
    found = head.decoder.layer.state_dict()
    assert found.keys() == {name for name in layer if norms["input"] or not name.startswith("input_layernorm")}
    for name, tensor in found.items():
        if tensor.ndim >= 2:  # the fixture sets norms to other values
            assert torch.equal(tensor, layer[name].float())


@pytest.mark.parametrize("norms", [MIXTURES["all"], MIXTURES["none"]], ids=["all", "none"])
def test_least_squares_finds_a_linear_target_before_any_step(make_head: MakeHead, norms: dict[str, bool]) -> None:
    """Hidden states that are a linear map of the pair before them, up to the output norm: fitted on some samples, the head
    speaks those of others. Its layer's branches are silent and not dead: their gradients are not zero."""
    head = make_head(norms=norms, init="least_squares")
    size = head.projection.out_features
    draw = torch.Generator().manual_seed(5)
    truth = torch.randn(size, 2 * size, generator=draw) / size**0.5

    def sample(number: int) -> Sample:
        ids = torch.randint(0, 320, (40,), generator=draw)
        hidden = [torch.randn(size, generator=draw)]
        for position in range(39):
            pair = head._pair(ids[position + 1][None], hidden[-1][None], torch.tensor([position]), number=0)
            hidden.append(head.output_norm(functional.rms_norm(truth @ pair[0], (size,))))
        return Sample(
            sample_id=f"linear{number}", token_ids_T=ids, loss_mask_T=torch.ones(40, dtype=torch.bool), hidden_TD=torch.stack(hidden)
        )

    with torch.no_grad():
        head.start([pack([sample(number)]) for number in range(60)])
        unseen = pack([sample(99)])
    (step,) = itertools.islice(head.unroll(unseen), 1)
    found, wanted = step.hidden_TD[:38], unseen.hidden_TD[1:39]
    assert functional.cosine_similarity(found, wanted).min() > 0.98
    found.square().sum().backward()
    silent = head.decoder.layer.get_submodule("mlp").get_submodule("down_proj").get_parameter("weight")
    assert silent.abs().max() == 0 and silent.grad is not None and silent.grad.abs().max() > 0


def test_the_same_seed_gives_the_same_head_whatever_was_drawn_before(make_head: MakeHead) -> None:
    one = make_head(seed=3).state_dict()
    torch.rand(7)
    same, other = make_head(seed=3).state_dict(), make_head(seed=4).state_dict()
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["projection.weight"], other["projection.weight"])


@pytest.mark.parametrize("kind", ["mtp", "eagle"])
def test_what_head_json_says_rebuilds_the_head(make_head: MakeHead, kinds: dict[str, type[PairHead]], batch: Batch, kind: str) -> None:
    head = make_head(kind=kinds[kind], seed=1)
    config = head.draft_config()
    assert (config["head"], config["method"], config["hidden_state"]) == (kind, kind, "post_norm")
    again = make_head(kind=kinds[kind], **config["settings"])
    again.load_state_dict(head.state_dict())
    with torch.no_grad():
        assert torch.equal(next(iter(head.unroll(batch))).hidden_TD, next(iter(again.unroll(batch))).hidden_TD)


def test_projection_under_autocast_is_the_lm_head_in_bfloat16(make_head: MakeHead) -> None:
    head = make_head()
    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    assert head.project(hidden).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert head.project(hidden).dtype == torch.bfloat16
