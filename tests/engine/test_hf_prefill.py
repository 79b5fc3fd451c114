"""Prefill gives transformers' hidden states, taps and logits, packed or alone, whole or in chunks."""

import pytest
import torch

from mtp_train.engine.base import PrefillSettings
from mtp_train.engine.hf_prefill import top_candidates
from mtp_train.records import Response

PLAIN = PrefillSettings(target_layer_ids=(), top_k=None)


def _responses(prompts):
    return [
        Response(
            prompt_id=f"r{index}",
            token_ids=tokens,
            loss_mask=tuple(position >= len(tokens) // 3 for position in range(len(tokens))),
            messages=({"role": "user", "content": "x"},),
            finish_reason="stop",
            category="c",
            source="s",
        )
        for index, tokens in enumerate(prompts)
    ]


@pytest.mark.parametrize("target", ["tiny_target", "windowed_target"])
@pytest.mark.parametrize("chunk", [16, 4096])
def test_hidden_taps_and_teacher_equal_transformers(target, chunk, request, make_engine, plain_model, prompts):
    path = request.getfixturevalue(target)
    engine, model = make_engine(path, max_prefill_tokens=chunk), plain_model(path)
    taps = {}
    for index in (0, 2):
        model.model.layers[index].register_forward_hook(lambda module, args, out, index=index: taps.__setitem__(index, out))
    samples = list(engine.prefill(_responses(prompts), PrefillSettings(target_layer_ids=(2, 0), top_k=5)))
    assert [sample.sample_id for sample in samples] == [f"r{index}" for index in range(len(prompts))]
    for sample, tokens in zip(samples, prompts, strict=True):
        with torch.inference_mode():
            out = model(torch.tensor([tokens]), output_hidden_states=True)
        torch.testing.assert_close(sample.hidden_TD, out.hidden_states[-1][0], atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(sample.taps_TLD[:, 0], taps[2][0], atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(sample.taps_TLD[:, 1], taps[0][0], atol=2e-4, rtol=1e-4)
        assert sample.teacher.row_M.tolist() == [j for j in range(len(tokens) - 1) if sample.loss_mask_T[j + 1]]
        logits = out.logits[0][sample.teacher.row_M]
        top = logits.log_softmax(-1).topk(5)
        assert torch.equal(sample.teacher.ids_MC, top.indices)
        torch.testing.assert_close(sample.teacher.log_probs_MC, top.values, atol=5e-4, rtol=1e-4)
        torch.testing.assert_close(sample.teacher.log_sum_exp_M, logits.logsumexp(-1), atol=5e-4, rtol=1e-4)


def test_one_at_a_time_and_eight_together_give_the_same_hidden_states(tiny_target, make_engine, prompts):
    alone = [next(iter(make_engine(tiny_target).prefill([response], PLAIN))) for response in _responses(prompts[:8])]
    together = list(make_engine(tiny_target, max_prefill_tokens=4096).prefill(_responses(prompts[:8]), PLAIN))
    for one, other in zip(alone, together, strict=True):
        torch.testing.assert_close(one.hidden_TD, other.hidden_TD, atol=1e-5, rtol=1e-5)


def test_non_finite_values_are_passed_on(tiny_target, make_engine, prompts):
    engine = make_engine(tiny_target)
    with torch.no_grad():
        engine.target.model.get_input_embeddings().weight[99] = float("nan")
    bad, good = (*prompts[0], 99, 12), prompts[3]
    assert 99 not in good
    first, second = engine.prefill(_responses([bad, good]), PrefillSettings(target_layer_ids=(), top_k=3))
    # Rows before the bad token may be lost with it: the kernels multiply masked values by zero, and 0 x NaN is NaN.
    assert not first.hidden_TD[-1].isfinite().any()
    assert not first.teacher.log_sum_exp_M[-1].isfinite()
    assert second.hidden_TD.isfinite().all() and second.teacher.log_probs_MC.isfinite().all()


def test_responses_are_read_as_they_are_needed(tiny_target, make_engine, prompts):
    taken = []

    def stream():
        for response in _responses(prompts * 20):
            taken.append(response.prompt_id)
            yield response

    samples = make_engine(tiny_target).prefill(stream(), PLAIN)
    next(samples)
    assert len(taken) < 4


@pytest.mark.parametrize("shape", [(3, 64 * 40), (5, 100), (2, 64 * 300)])
def test_two_level_top_k_is_torch_topk(shape):
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    expected = logits.topk(16, dim=-1)
    values, ids = top_candidates(logits, 16)
    assert torch.equal(values, expected.values) and torch.equal(ids, expected.indices)


def test_a_layer_that_is_not_there_is_refused(tiny_target, make_engine, prompts):
    with pytest.raises(ValueError, match="0 to 2, found 3"):
        list(make_engine(tiny_target).prefill(_responses(prompts), PrefillSettings(target_layer_ids=(3,), top_k=None)))
