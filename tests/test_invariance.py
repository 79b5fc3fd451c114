"""The equalities that the house stands on (DESIGN.md, section 6, rule 7): which test proves each, and that it is there."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent

# Equality -> the tests that prove it, as file::function.
EQUALITIES: dict[str, tuple[str, ...]] = {
    "packed == unpacked": (
        "head/test_pair.py::test_packed_samples_are_those_alone",
        "head/test_pair.py::test_packed_gradients_are_the_sum_of_those_alone",
        "batch/test_shift.py::test_packed_equals_each_sample_alone",
    ),
    "unroll == incremental drafting with a KV cache": (
        "head/test_pair.py::test_unroll_is_drafting_with_a_cache_from_every_base",
        "head/test_eagle3.py::test_unroll_is_drafting_with_a_cache_from_every_base",
        "head/test_medusa.py::test_unroll_is_what_it_drafts_from_every_base",
        "head/test_draft_model.py::test_unroll_is_drafting_with_a_cache_from_every_base",
    ),
    "the copy task reaches acceptance 1.0": (
        "trainer/test_loop.py::test_the_copy_task_is_learned_to_the_end",
        "head/test_eagle3.py::test_the_copy_task_is_learned_to_the_end",
    ),
    "2 ranks == 1": (
        "trainer/test_parallel.py::test_two_processes_interrupted_midway_give_the_bits_of_one",
        "test_pipeline.py::test_two_processes_write_what_one_writes",
        "test_pipeline.py::test_torchrun_starts_a_stage",
    ),
    "10 steps == 5 + resume + 5, bit for bit": (
        "trainer/test_loop.py::test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit",
        "test_pipeline.py::test_killed_in_every_stage_it_ends_the_same",
    ),
    "accumulate 4 x T == 1 x 4T": ("trainer/test_loop.py::test_how_a_step_is_cut_into_packs_and_chunks_changes_nothing",),
    "chunked gradients == plain ones": (
        "trainer/test_objective.py::test_chunked_gradients_are_the_plain_ones",
        "head/test_eagle3.py::test_chunked_gradients_are_the_plain_ones_the_lm_heads_too",
        "head/test_medusa.py::test_chunked_gradients_are_the_plain_ones_the_lm_heads_too",
        "head/test_draft_model.py::test_chunked_gradients_are_the_plain_ones",
    ),
    "writer -> reader bit-exact": ("cache/test_reader.py::test_bit_exact",),
    "killed writer == writer that was not": ("cache/test_writer.py::test_killed_at_every_step_it_continues_to_the_same_bytes",),
    "greedy speculation == greedy generation": (
        "engine/test_hf_speculate.py::test_greedy_speculation_equals_greedy_decoding",
        "head/test_eagle3.py::test_greedy_speculation_equals_greedy_decoding",
        "head/test_medusa.py::test_greedy_speculation_equals_greedy_decoding",
        "head/test_draft_model.py::test_greedy_speculation_equals_greedy_decoding",
    ),
    "estimate == measured counts": (
        "engine/test_estimate_from_cache.py::test_greedy_counts_are_those_of_real_decoding",
        "engine/test_measure.py::test_the_estimate_of_greedy_answers_is_what_was_measured",
        "test_pipeline.py::test_the_estimate_is_the_measured_count",
        "head/test_medusa.py::test_the_estimate_is_the_measured_count",
        "head/test_draft_model.py::test_the_estimate_is_the_measured_count",
    ),
    "batch of 1 == batch of 8": ("engine/test_hf_prefill.py::test_one_at_a_time_and_eight_together_give_the_same_hidden_states",),
    "export -> load -> same logits": (
        "exporter/test_hf.py::test_export_loads_back_to_the_same_logits",
        "head/test_eagle3.py::test_save_load_export_load_is_the_same_head",
        "head/test_medusa.py::test_save_load_export_load_is_the_same_head",
        "head/test_draft_model.py::test_save_load_export_load_is_the_same_head",
    ),
    "drawn drafts: estimate == measured within its interval": (
        "engine/test_estimate_from_cache.py::test_sampled_rates_agree_within_their_interval",
    ),
    "sampled speculation == the target's distribution": (
        "engine/test_hf_speculate.py::test_sampled_speculation_keeps_the_targets_distribution",
    ),
    "the target's tensors after training == before": (
        "head/test_pair.py::test_gradients_reach_the_head_and_nothing_else",
        "trainer/test_loop.py::test_embedding_and_lm_head_stay_as_they_are",
    ),
    "d2t -> ids -> d2t": ("target/test_draft_vocabulary.py::test_offsets_mask_and_index_stand_for_the_same_tokens",),
    "each exported tensor perturbed -> logits change": ("exporter/test_hf.py::test_each_exported_tensor_perturbed_changes_the_logits",),
}


@pytest.mark.parametrize("equality", EQUALITIES)
def test_each_equality_has_its_proof(equality: str) -> None:
    for name in EQUALITIES[equality]:
        file, _, function = name.partition("::")
        tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
        found = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert function in found, f"{name} is not there"
        asserts = [node for node in ast.walk(found[function]) if isinstance(node, ast.Assert) or _is_assert_call(node)]
        assert asserts, f"{name} asserts nothing"


def _is_assert_call(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id if isinstance(node.func, ast.Name) else ""
    return name.startswith(("assert", "check"))
