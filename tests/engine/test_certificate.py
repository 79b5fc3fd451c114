"""The certificate in short: every scheme's texts follow the target's joint law, and wrong rules are told from right ones."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from mtp_train.acceptance.certificate import KL_BOUND_NATS, Certificate, GreedyCase, SampledCase, check_num_draws, distances
from mtp_train.acceptance.draft import ROOT, Draft, Judged, chain
from mtp_train.acceptance.identity import Difference, Identity
from mtp_train.acceptance.report import read_certificate, write_certificate
from mtp_train.acceptance.verify import Verified, draw
from mtp_train.engine import certificate as drawing
from mtp_train.engine import hf_verify
from mtp_train.engine.certificate import Case, SmallTarget, Unfinished, cases, draw_case

REPOSITORY = Path(__file__).resolve().parents[2]
# 27 cells: the bias of exact draws is 26 / 4000 = 0.0065 nats.
VOCABULARY, DRAWS = 3, 2000
SHORT = {case.key: case for case in cases([1.0])}
# Left to the tool: greedy drafts of chains (test_hf_speculate.py has them), and what differs from these in nothing that is judged.
KEYS = set(SHORT) - {"chain, greedy, 1", "dynamic_tree, greedy, 1", "medusa_tree, greedy, 1"}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> SmallTarget:
    return SmallTarget(tmp_path_factory.mktemp("small"), vocabulary=VOCABULARY, seed=1)


def certified(case: SampledCase) -> bool:
    return Certificate(sampled=(case,), greedy=(), engine="hf", target="small", provenance={}).holds


@pytest.mark.parametrize("key", sorted(KEYS))
def test_sampled_texts_follow_the_targets_joint_law(target: SmallTarget, key: str) -> None:
    found = draw_case(target, SHORT[key], num_draws=DRAWS, seed=0)
    assert certified(found), found
    assert found.distances.num_cells == VOCABULARY**3 and found.distances.bias_nats == 26 / (2 * DRAWS)
    assert 1.05 < found.acceptance_length < 2.95, "drafts are both taken and refused"


Reject = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]


def wrong_rule(kind: str) -> Callable[..., Judged]:
    """Walks a tree as the right rule does, but for one thing."""

    def judge(*, p_RV: torch.Tensor, draft: Draft, uniform_R: torch.Tensor) -> Judged:
        children, path, node = draft.children(), [], ROOT
        while True:
            p = p_RV[node + 1].double()
            tried = children[node + 1]
            assert draft.q_PV is not None or not tried
            q = draft.q_PV[draft.q_rows[tried[0]]].double() if draft.q_PV is not None and tried else p
            hit = None
            for child in tried:
                token = draft.token_ids[child]
                accepted = q[token] if kind == "accept by q alone" else min(1.0, float(p[token] / q[token]))
                if float(uniform_R[child]) < accepted:
                    hit = child
                    break
                if kind == "subtract the scalar q(x)":
                    p = (p - q[token]).clamp(min=1e-9)
                elif kind != "draw from p":
                    p = (p - q).clamp(min=0.0)
                p = p / p.sum()
                q = q.index_fill(0, torch.tensor([token]), 0.0)
                q = q / q.sum()
            if hit is None:
                return Judged(path, int(draw(p[None], uniform_R[-1:])))
            path.append(hit)
            node = hit

    return judge


def for_chains(judge: Callable[..., Judged]) -> Callable[..., Verified]:
    """A tree's rule as a chain's, whose sequences come together."""

    def verify(*, p_RV: torch.Tensor, q_QV: torch.Tensor | None, drafts: Sequence[Sequence[int]], uniform_R: torch.Tensor) -> Verified:
        result, row, used = Verified([], []), 0, 0
        for tokens in drafts:
            count = len(tokens)
            draft = chain(list(tokens), q_QV[used : used + count] if q_QV is not None and count else None)
            rows = slice(row, row + count + 1)
            path, token = judge(p_RV=p_RV[rows], draft=draft, uniform_R=uniform_R[rows])
            result.num_accepted.append(len(path))
            result.next_token.append(token)
            row, used = row + count + 1, used + count
        return result

    return verify


WRONG = ("accept by q alone", "draw from p", "subtract the scalar q(x)")


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("key", ["chain, probabilistic, 1", "eagle_tree, probabilistic, 1"])
def test_wrong_rules_fail_it(target: SmallTarget, monkeypatch: pytest.MonkeyPatch, key: str, kind: str) -> None:
    judge = wrong_rule(kind)
    monkeypatch.setattr(hf_verify, "verify_tree_sampled", judge)
    monkeypatch.setattr(hf_verify, "verify_sampled", for_chains(judge))
    found = draw_case(target, SHORT[key], num_draws=DRAWS, seed=0)
    assert not certified(found), found
    assert found.distances.p_value < 1e-6


def test_the_walker_of_the_wrong_rules_is_right_without_its_wrong(target: SmallTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_verify, "verify_tree_sampled", wrong_rule("none"))
    assert draw_case(target, SHORT["eagle_tree, probabilistic, 1"], num_draws=DRAWS, seed=0).distances.p_value > 0.001


def test_keeping_drawn_nodes_for_what_they_are_fails_it(target: SmallTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dynamic tree that ranks drawn nodes by their own confidence: no draws from q any more."""
    from mtp_train.decoding.growing_tree import GrowingTree

    def by_confidence(self: GrowingTree, num_nodes: int) -> list[int]:
        order = sorted(range(len(self.token_ids)), key=lambda node: -self.confidence[node])
        return sorted(order[:num_nodes])

    case = SHORT["dynamic_tree, probabilistic, 1"]
    narrow = dataclasses.replace(case, decoding=dataclasses.replace(case.decoding, max_nodes=2, min_confidence=0.0))
    assert certified(draw_case(target, narrow, num_draws=DRAWS, seed=0))
    monkeypatch.setattr(GrowingTree, "best", by_confidence)
    assert draw_case(target, narrow, num_draws=DRAWS, seed=0).distances.p_value < 1e-6


def test_the_joint_law_is_that_of_the_plain_model(target: SmallTarget, plain_model: Any) -> None:
    model, joint = plain_model(target.folder), target.joint(0.7)
    assert float(joint.sum()) == pytest.approx(1.0)

    def law(text: tuple[int, ...]) -> torch.Tensor:
        with torch.inference_mode():
            return (model(torch.tensor([text])).logits[0, -1].double() / 0.7).softmax(-1)

    for cell in (0, 5, 26):
        a, b, c = list(itertools.product(range(VOCABULARY), repeat=3))[cell]
        expected = 0.0
        for first in range(VOCABULARY):
            text = (*target.prompt, first)
            expected += float(law(target.prompt)[first] * law(text)[a] * law((*text, a))[b] * law((*text, a, b))[c])
        assert float(joint[cell]) == pytest.approx(expected, rel=1e-4)


def test_distances_of_known_counts() -> None:
    found = distances([60, 40], [0.5, 0.5])
    assert (found.num_draws, found.num_cells, found.num_pooled) == (100, 2, 2)
    assert found.total_variation == pytest.approx(0.1) and found.bias_nats == 1 / 200
    assert found.kl_nats == pytest.approx(0.6 * torch.tensor(1.2).log().item() + 0.4 * torch.tensor(0.8).log().item(), rel=1e-4)
    # G = 2 * 100 * KL = 4.027: chi-square of one degree, from a table of its tail.
    assert found.p_value == pytest.approx(0.0448, abs=2e-4)
    rare = distances([50, 47, 1, 1, 1, 0], [0.5, 0.47, 0.01, 0.01, 0.005, 0.005])
    assert rare.num_pooled == 2 and rare.num_cells == 6 and rare.p_value > 0.5, (
        "too few draws for a cell of their own, and for one together"
    )
    assert distances([5, 0], [1.0, 0.0]).p_value == 1.0
    with pytest.raises(ValueError, match="probability 0, found 3"):
        distances([5, 3], [1.0, 0.0])


def test_the_p_value_of_exact_draws_is_uniform() -> None:
    law = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    p_values = []
    for _ in range(400):
        drawn = draw(law.expand(500, -1), torch.rand(500, generator=generator, dtype=torch.float64))
        p_values.append(distances(torch.bincount(drawn, minlength=4).tolist(), law.tolist()).p_value)
    for level in (0.1, 0.5, 0.9):
        share = sum(p < level for p in p_values) / len(p_values)
        assert abs(share - level) < 4 * (level * (1 - level) / len(p_values)) ** 0.5


def _certificate(kl_nats: float = 0.001, p_value: float = 0.5, gap: float = 1e-6) -> Certificate:
    found = dataclasses.replace(distances([60, 40], [0.5, 0.5]), kl_nats=kl_nats, p_value=p_value)
    sampled = SampledCase(
        decoding="chain",
        drafted="chain, K = 2",
        draft_sampling="greedy",
        temperature=1.0,
        num_tokens=3,
        acceptance_length=1.5,
        distances=found,
    )
    difference = Difference(prompt_id="p", index=3, plain_token=1, speculated_token=2, logit_gap=gap)
    identity = Identity(num_prompts=4, num_identical=3, num_tokens=90, differences=(difference,))
    greedy = GreedyCase(head="mtp", decoding="chain", drafted="chain, K = 2", prompt_set="project", identity=identity)
    return Certificate(sampled=(sampled, sampled), greedy=(greedy,), engine="hf", target="small", provenance={"git_commit": None})


def test_what_the_certificate_asks_for() -> None:
    assert _certificate().holds and _certificate().text.startswith("Lossless: 2 sampled cases over up to 2 cells")
    assert _certificate(p_value=0.00051).holds and not _certificate(p_value=0.00049).holds, "one in a thousand over both cases"
    assert not _certificate(kl_nats=KL_BOUND_NATS).holds and not _certificate(gap=0.3).holds
    assert _certificate(gap=0.3).text.startswith("NOT lossless")


def test_it_is_written_and_comes_back(tmp_path: Path) -> None:
    assert read_certificate(tmp_path) is None
    certificate = _certificate()
    path = write_certificate(certificate, tmp_path)
    assert read_certificate(tmp_path) == certificate
    document = json.loads(path.read_text())
    assert document["certificate"]["sampled"][0]["distances"]["bias_nats"] == 1 / 200
    text = path.with_suffix(".md").read_text()
    assert "bias, nats" in text and "3 of 4" in text and "gap of the target" in text
    document["certificate"]["sampled"][0]["distances"]["kl_nats"] = 1e-9
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=r"certificate\.json: .*changed or damaged.*certify"):
        read_certificate(tmp_path)


def test_an_interrupted_run_goes_on_and_other_code_starts_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (case, _), path = _certificate().sampled, tmp_path / "unfinished.json"
    asked = []

    def make() -> SampledCase:
        asked.append(1)
        return case

    for _ in range(2):
        assert Unfinished(path=path, identity={"code": "a"}).get("k", SampledCase, make) == case
    assert len(asked) == 1 and "k is done already" in capsys.readouterr().err
    Unfinished(path=path, identity={"code": "b"}).get("k", SampledCase, make)
    assert len(asked) == 2
    assert "certificate: 1 cases of other code are made again" in capsys.readouterr().err
    path.write_text("{}")
    Unfinished(path=path, identity={"code": "b"}).get("k", SampledCase, make)
    assert len(asked) == 3 and "its cases are made again" in capsys.readouterr().err


def test_the_smallest_vocabulary_has_two_tokens(tmp_path: Path) -> None:
    """Fewer than the tree has places for."""
    found = draw_case(SmallTarget(tmp_path, vocabulary=2, seed=1), SHORT["eagle_tree, probabilistic, 1"], num_draws=1400, seed=0)
    assert certified(found) and found.distances.num_cells == 8


def test_what_would_certify_nothing_is_refused(tmp_path: Path) -> None:
    """Too few draws lie far from the law though each is exact; a temperature of 0 draws nothing."""
    check_num_draws(40_000, num_cells=64)
    with pytest.raises(ValueError, match=r"num_draws: expected at least 12600 for 64 cells, .*found 2000"):
        check_num_draws(2000, num_cells=64)
    with pytest.raises(ValueError, match=r"temperatures: expected 0.01 to 1e\+06 for sampled cases, found 0"):
        cases([0.0])
    with pytest.raises(ValueError, match=r"temperatures: expected each once \(six digits tell them apart\), found \[1.0, 1.00000001\]"):
        cases([1.0, 1.00000001])
    with pytest.raises(ValueError, match="vocabulary: expected at least 2 tokens"):
        SmallTarget(tmp_path, vocabulary=1, seed=0)
    assert "no greedy texts compared" in dataclasses.replace(_certificate(), greedy=()).text
    assert _certificate().text.count(";") and "no sampled case" in dataclasses.replace(_certificate(), sampled=()).text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--schemes", "chian"], "schemes: expected some of ['chain', "),
        (["--temperatures"], "temperatures: expected some, or --checkpoint"),
        (["--num-draws", "100"], "num_draws: expected at least 12600 for 64 cells"),
    ],
)
def test_the_tool_refuses_before_it_draws(tmp_path: Path, words: list[str], said: str) -> None:
    command = [sys.executable, str(REPOSITORY / "tools" / "certify.py"), "--out", str(tmp_path), *words]
    here = {key: value for key, value in os.environ.items() if key != "DS_ACCELERATOR"} | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, check=False, env=here, capture_output=True, text=True)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert "real_accelerator" not in done.stderr, "deepspeed, where it is installed, was imported for nothing"
    assert not list(tmp_path.iterdir())


def test_every_scheme_is_certified_with_every_kind_of_drafts() -> None:
    conf = Path(drawing.__file__).parents[2] / "conf" / "decoding"
    assert {case.decoding.word for case in cases([0.5])} == {path.stem for path in conf.glob("*.yaml")}
    assert len(cases([0.5, 1.0])) == 2 * (4 * 2 + 2)
    assert all(isinstance(case, Case) and case.decoding.depth == drawing.DEPTH for case in cases([1.0]))
