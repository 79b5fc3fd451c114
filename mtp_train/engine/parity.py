"""One head, three measurements of its acceptance: the estimate, the reference decoder, vLLM's counters; and where they part.

They rest on one another's agreement about numbers that can be looked at: the target's hidden states, the head's, its
logits. So a difference that is more than chance is followed down to the first of these that is beyond its tolerance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mtp_train.acceptance.identity import Identity, compare
from mtp_train.acceptance.interval import Interval, paired_difference, rates_and_length
from mtp_train.engine.base import PrefillSettings, SpeculateRequest, SpeculateSettings
from mtp_train.engine.conformance import TOLERANCES, Conformance, Gap, compare_drafts, compare_samples
from mtp_train.engine.estimate_from_cache import estimate
from mtp_train.engine.hf import HfEngine
from mtp_train.engine.vllm import VllmEngine
from mtp_train.head.base import Head
from mtp_train.records import Acceptance, Response

_ESTIMATE_TOKENS = 4096
# Candidates of the teacher that are compared.
_TOP_K = 8


@dataclass(frozen=True, kw_only=True)
class Parity:
    """``text`` compares the reference's answers with vLLM's (greedy only; None where they were drawn); ``target`` the target in
    both engines over the same tokens; ``drafts`` the head's forwards."""

    estimate: Acceptance
    reference: Acceptance
    vllm: Acceptance
    text: Identity | None
    target: Conformance
    drafts: Conformance
    num_traced: int

    @property
    def fault(self) -> Gap | None:
        """The first stage beyond its tolerance: the head's rest on the target's."""
        return self.target.fault or self.drafts.fault

    def differences(self) -> dict[str, Interval]:
        """Rate at the first position, each pair of measurements, over the same prompts drawn together."""
        pairs = {"estimate - vLLM": (self.estimate, self.vllm), "reference - vLLM": (self.reference, self.vllm)}
        count = self.vllm.num_speculative_tokens
        return {name: paired_difference(ours.prompts, theirs.prompts, count)[0][0] for name, (ours, theirs) in pairs.items()}


def measure_parity(
    *,
    hf: HfEngine,
    vllm: VllmEngine,
    head: Head,
    checkpoint: Path,
    served: Path,
    requests: Sequence[SpeculateRequest],
    settings: SpeculateSettings,
    num_traced: int,
) -> Parity:
    """Measure acceptance three ways on all requests, and compare the target's rows and every forward of the head on the first
    ``num_traced``.

    ``head`` is ``checkpoint`` rebuilt, on the device and in the dtype of ``hf``; both engines compute in one dtype.
    """
    if hf.dtype != vllm.dtype:
        raise ValueError(f"parity: expected both engines in one dtype, found hf in {hf.dtype} and vllm in {vllm.dtype}")
    if settings.num_speculative_tokens < 2:
        raise ValueError("parity: expected num_speculative_tokens of at least 2, which the comparison of draft rows needs, found 1")
    ours, theirs = hf.speculate(requests, checkpoint, settings), vllm.speculate(requests, served, settings)
    samples = hf.prefill(_responses(requests, theirs), PrefillSettings(target_layer_ids=head.target_layer_ids, top_k=None))
    estimated = estimate(
        head,
        samples,
        num_speculative_tokens=settings.num_speculative_tokens,
        draft_sampling=settings.draft_sampling,
        sampling=settings.sampling,
        max_batch_tokens=_ESTIMATE_TOKENS,
        device=hf.target.device,
    )
    text = None
    if settings.sampling.temperature == 0:
        answers = ({prompt.prompt_id: prompt.token_ids for prompt in measured.prompts} for measured in (ours, theirs))
        prompts = {request.prompt_id: request.token_ids for request in requests}
        plain, speculated = answers
        text = compare(prompts=prompts, plain=plain, speculated=speculated, logit_gap=hf.logit_gap)
    traced = requests[:num_traced]
    target, drafts = _compare(hf, vllm, head, served, traced, settings)
    return Parity(estimate=estimated, reference=ours, vllm=theirs, text=text, target=target, drafts=drafts, num_traced=len(traced))


def _responses(requests: Sequence[SpeculateRequest], answers: Acceptance) -> list[Response]:
    asked = {request.prompt_id: request.token_ids for request in requests}
    return [
        Response(
            prompt_id=prompt.prompt_id,
            token_ids=asked[prompt.prompt_id] + prompt.token_ids,
            loss_mask=(False,) * len(asked[prompt.prompt_id]) + (True,) * len(prompt.token_ids),
            messages=(),
            finish_reason="given",
            category=prompt.category,
            source="",
        )
        for prompt in answers.prompts
    ]


def _compare(
    hf: HfEngine, vllm: VllmEngine, head: Head, served: Path, requests: Sequence[SpeculateRequest], settings: SpeculateSettings
) -> tuple[Conformance, Conformance]:
    """The target's rows over prompts and answers, and the head's over the decoding that wrote these."""
    measured, rows = vllm.trace(requests, served, settings)
    responses = _responses(requests, measured)
    kept, tolerance = PrefillSettings(target_layer_ids=head.target_layer_ids, top_k=_TOP_K), TOLERANCES[hf.dtype]
    samples = list(hf.prefill(responses, kept))
    lm_head_VD = hf.target.shared_weights().lm_head_VD.detach().cpu()
    target = compare_samples(samples, vllm.prefill(responses, kept), lm_head_VD=lm_head_VD, tolerance=tolerance)
    read = {sample.sample_id: head.read_target(sample.hidden_TD, sample.taps_TLD).detach() for sample in samples}
    answers = {response.prompt_id: response.token_ids for response in responses}
    return target, compare_drafts(rows, head=head, target_hidden=read, answers=answers, tolerance=tolerance)


def parity_report(parity: Parity) -> str:
    """The comparison as Markdown: measurements with intervals, differences, text, stages, and the stage at fault."""
    measured = {"estimate": parity.estimate, "reference decoder": parity.reference, "vLLM's counters": parity.vllm}
    count, vllm = parity.vllm.num_speculative_tokens, parity.vllm
    lines = [
        f"# Acceptance three ways: {vllm.notes['class']}, {vllm.dtype}",
        "",
        f"Temperature {vllm.temperature:g}, drafts {vllm.draft_sampling}, K = {count}, a chain.",
        "",
        f"{len(vllm.prompts)} prompts; {parity.reference.engine_version}; {vllm.engine_version} ({', '.join(vllm.notes['attention'])}). "
        "[low, high]: 95% bootstrap interval over prompts.",
        "",
        "| measured by | drafts | " + " | ".join(f"position {i + 1}" for i in range(count)) + " | acceptance length |",
        "|---|---|" + "---|" * (count + 1),
    ]
    for name, acceptance in measured.items():
        rates, length = rates_and_length(acceptance.prompts, count)
        lines.append(f"| {name} | {acceptance.num_drafts} | " + " | ".join(_interval(value) for value in (*rates, length)) + " |")
    lines += [
        "",
        "First position, paired: " + "; ".join(f"{name} {_interval(value)}" for name, value in parity.differences().items()) + ".",
    ]
    if parity.text is not None:
        lines += ["", *_text(parity.text)]
    where = f"row by row ({parity.num_traced} prompts and their answers)"
    lines += ["", f"## The target {where}", "", *_stages(parity.target)]
    lines += ["", f"## The draft head {where}", "", *_stages(parity.drafts), "", _verdict(parity)]
    lines += ["", "Served with:", "", "```", vllm.notes["serve"], "```", ""]
    return "\n".join(lines)


def _interval(value: Interval) -> str:
    return f"{value.value:.4f}" if value.low is None or value.high is None else f"{value.value:.4f} [{value.low:.4f}, {value.high:.4f}]"


def _text(identity: Identity) -> list[str]:
    lines = [f"Text: {identity.num_identical} of {identity.num_prompts} answers are the same, token for token, in both engines."]
    for difference in identity.differences:
        lines.append(
            f"* {difference.prompt_id}: token {difference.index} is {difference.plain_token} here, "
            f"{difference.speculated_token} in vLLM; the target's two best logits are {difference.logit_gap:.3g} apart there"
        )
    return lines


def _stages(conformance: Conformance) -> list[str]:
    lines = ["| stage | rows | rms error | largest | where | top token the same | mean KL (nats) |", "|---|---|---|---|---|---|---|"]
    for gap in conformance.gaps.values():
        top = f"{gap.argmax_agreement:.4f}" if gap.stage.endswith(("logits", "log_probs")) else ""
        kl = f"{gap.mean_kl_nats:.1e}" if gap.stage.endswith("logits") else ""
        lines.append(f"| {gap.stage} | {gap.num_rows} | {gap.rms_error:.1e} | {gap.max_error:.1e} | {gap.worst} | {top} | {kl} |")
    return lines


def _verdict(parity: Parity) -> str:
    fault, tolerance = parity.fault, parity.drafts.tolerance
    apart = [name for name, value in parity.differences().items() if value.established]
    said = f"The measurements part by more than chance: {', '.join(apart)}." if apart else "The measurements agree within their intervals."
    if fault is not None:
        return (
            f"{said} At fault: **{fault.stage}**, the first stage beyond its tolerance (rms {fault.rms_error:.1e} of {tolerance.rms:g}, "
            f"largest {fault.max_error:.1e} of {tolerance.max:g}, at {fault.worst})."
        )
    return f"{said} Every stage of target and head is within its tolerance (rms {tolerance.rms:g}, largest {tolerance.max:g})."
