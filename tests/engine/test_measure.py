"""Pieces are measured once and again only when something changed; requests count what they leave out; the proofs can fail."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from mtp_train.acceptance.report_data import Measurement
from mtp_train.decoding.chain import Chain
from mtp_train.decoding.prompt_lookup import PromptLookup
from mtp_train.engine.base import Baseline, SpeculateRequest, SpeculateSettings
from mtp_train.engine.certificate import GreedyTexts
from mtp_train.engine.hf import HfEngine
from mtp_train.engine.measure import Pieces, decode, estimate_from_answers, prove_identity, requests_of, speculate_settings
from mtp_train.records import Acceptance, Prompt

CHAIN = Chain(num_speculative_tokens=3, refresh=True)
GREEDY = {"temperature": 0.0, "top_p": 1.0, "draft_sampling": "greedy"}
WHERE = {"head": "h", "prompt_set": "p"}


def greedy_settings(**changes: Any) -> SpeculateSettings:
    return speculate_settings(
        decoding=dataclasses.replace(CHAIN, **changes), way=GREEDY, max_new_tokens=30, seed=0, batch_size=4, draws=True
    )


@pytest.fixture(scope="module")
def requests() -> list[SpeculateRequest]:
    draw = torch.Generator().manual_seed(3)
    lengths = torch.randint(2, 25, (12,), generator=draw).tolist()
    return [
        SpeculateRequest(
            prompt_id=f"r{n}", category="ab"[n % 2], token_ids=tuple(torch.randint(8, 150, (length,), generator=draw).tolist())
        )
        for n, length in enumerate(lengths)
    ]


@pytest.fixture(scope="module", params=["mtp", "eagle"])
def engine(request: pytest.FixtureRequest, easy_target: Path, make_engine: Any, leaning_head: Any) -> HfEngine:
    made = make_engine(easy_target, load_head=leaning_head(easy_target, request.param))
    assert isinstance(made, HfEngine)
    return made


@pytest.fixture(scope="module")
def measurement(engine: HfEngine, requests: list[SpeculateRequest]) -> Measurement:
    return decode(**WHERE, engine=engine, requests=requests, draft=Path("unused"), settings=greedy_settings(), plain=True)


class Counting:
    """Hands out a measurement and counts how often it was asked to measure."""

    def __init__(self, measurement: Measurement) -> None:
        self.measurement, self.times = measurement, 0

    def __call__(self) -> Measurement:
        self.times += 1
        return self.measurement


def test_a_piece_is_measured_once_and_comes_back_as_it_was(tmp_path: Path, measurement: Measurement) -> None:
    pieces, measure = Pieces(folder=tmp_path / "pieces", identity={"head": "a", "version": "1"}), Counting(measurement)
    assert pieces.get("p.greedy", ["settings", [(1, 2)]], measure) == measurement
    path = tmp_path / "pieces" / "p.greedy.json"
    before = (path.read_bytes(), path.stat().st_mtime_ns)
    again = Pieces(folder=tmp_path / "pieces", identity={"version": "1", "head": "a"})
    found = again.get("p.greedy", ["settings", [[1, 2]]], measure)
    assert found == measurement and found.plain == measurement.plain, "records are equal field for field, tuples and all"
    assert measure.times == 1 and (path.read_bytes(), path.stat().st_mtime_ns) == before


@pytest.mark.parametrize(
    ("identity", "settings"),
    [
        ({"head": "b"}, ["s", [1, 2]]),
        ({"head": "a", "more": 1}, ["s", [1, 2]]),
        ({"head": "a"}, ["t", [1, 2]]),
        ({"head": "a"}, ["s", [2]]),
    ],
)
def test_a_piece_is_measured_again_when_anything_changed(
    tmp_path: Path, measurement: Measurement, capsys: pytest.CaptureFixture[str], identity: dict[str, Any], settings: Any
) -> None:
    other = dataclasses.replace(measurement, prompt_set="other")
    Pieces(folder=tmp_path, identity={"head": "a"}).get("k", ["s", [1, 2]], Counting(measurement))
    capsys.readouterr()
    measure = Counting(other)
    changed = Pieces(folder=tmp_path, identity=identity)
    assert changed.get("k", settings, measure) == other and measure.times == 1
    assert (
        "k was measured with other settings or another head (12 prompts, max_new_tokens 30), and is measured again"
        in capsys.readouterr().err
    )
    assert changed.get("k", settings, Counting(measurement)) == other, "what was measured last is what is kept"
    assert changed.get("another key", settings, Counting(measurement)) == measurement


@pytest.mark.parametrize("damage", ["digit", "half", "empty", "list", "type"])
def test_a_damaged_piece_is_measured_again(
    tmp_path: Path, measurement: Measurement, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    """A digit that changed in a count leaves JSON that reads as before: the seal tells."""
    pieces, measure = Pieces(folder=tmp_path, identity={}), Counting(measurement)
    pieces.get("k", [], measure)
    path = tmp_path / "k.json"
    whole = path.read_text(encoding="utf-8")
    document = json.loads(whole)
    document["measurement"]["head"] = 3
    changed = {
        "digit": whole.replace('"num_drafts": ', '"num_drafts": 1', 1),
        "half": whole[: len(whole) // 2],
        "empty": "",
        "list": "[1]",
        "type": json.dumps(document),
    }
    path.write_text(changed[damage], encoding="utf-8")
    assert pieces.get("k", [], measure) == measurement and measure.times == 2
    assert "it is measured again" in capsys.readouterr().err
    assert path.read_text(encoding="utf-8") == whole


def test_a_piece_that_was_interrupted_is_not_there(tmp_path: Path, measurement: Measurement) -> None:
    pieces = Pieces(folder=tmp_path, identity={})

    def interrupted() -> Measurement:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pieces.get("k", [], interrupted)
    assert not list(tmp_path.iterdir())
    assert pieces.get("k", [], Counting(measurement)) == measurement
    assert [path.name for path in tmp_path.iterdir()] == ["k.json"]


def test_requests_are_the_first_turns_and_count_what_they_leave_out(tiny_llama: Path) -> None:
    from mtp_train.prompt.template import ChatTemplate
    from mtp_train.prompt.tokenizer import load_tokenizer

    template = ChatTemplate(tokenizer=load_tokenizer(tiny_llama))

    def prompt(name: str, *contents: str) -> Prompt:
        roles = ("user", "assistant", "user")
        messages = tuple({"role": role, "content": content} for role, content in zip(roles, contents, strict=False))
        return Prompt(prompt_id=name, messages=messages, category=f"of {name}", source="s")

    length = len(template.encode_prompt([{"role": "user", "content": "q" * 50}]))
    prompts = [
        prompt("short", "q"),
        prompt("long", "q" * 60),
        prompt("broken", "half of a pair: \ud800"),
        prompt("talk", "q1", "given", "q2"),
        prompt("just", "q" * 49),
        prompt("not quite", "q" * 50),
    ]
    found, counts = requests_of(prompts, template, max_length_tokens=length + 2, max_new_tokens=3)
    assert [(request.prompt_id, request.category) for request in found] == [(name, f"of {name}") for name in ("short", "talk", "just")]
    assert found[1].token_ids == template.encode_prompt([{"role": "user", "content": "q1"}])
    assert len(found[2].token_ids) == length - 1, "room for the whole answer, and not a token less"
    assert (counts.num_rows, counts.num_kept, counts.num_skipped) == (6, 3, 3)
    assert {reason: tally.count for reason, tally in counts.skipped.items()} == {"prompt_too_long": 2, "lone_surrogate": 1}
    with pytest.raises(ValueError, match="expected prompts to decode, found none: 0 of 1 rows kept; skipped 1 prompt_too_long"):
        requests_of(prompts[1:2], template, max_length_tokens=20, max_new_tokens=1)


def test_the_estimate_of_greedy_answers_is_what_was_measured(
    engine: HfEngine, requests: list[SpeculateRequest], measurement: Measurement
) -> None:
    """float32: drafts, hits per position, and which tokens were drafted, prompt by prompt and count for count."""

    def load(path: Path) -> Any:
        assert path == Path("the checkpoint") and engine.load_head is not None
        return engine.load_head(path, engine.target.shared_weights())

    found = estimate_from_answers(
        **WHERE,
        engine=engine,
        draft=Path("the checkpoint"),
        requests=requests,
        answers=measurement.acceptance,
        load=load,
        settings=greedy_settings(),
    )
    assert found.is_estimate and not measurement.is_estimate
    assert found.acceptance.prompts == measurement.acceptance.prompts
    assert sum(prompt.num_accepted for prompt in measurement.acceptance.prompts) > 20, "a head that never hits proves nothing"
    assert found.acceptance.acceptance_length() == measurement.acceptance.acceptance_length()


def test_plain_decoding_is_measured_where_asked(engine: HfEngine, requests: list[SpeculateRequest], measurement: Measurement) -> None:
    plain = engine.baseline(requests, greedy_settings()).token_ids
    assert measurement.plain is not None and measurement.plain.num_tokens == sum(len(ids) for ids in plain.values())
    assert measurement.plain.wall_s > 0 and measurement.identity is None
    assert {prompt.prompt_id: prompt.token_ids for prompt in measurement.acceptance.prompts} == plain
    without = decode(**WHERE, engine=engine, requests=requests[:2], draft=Path("unused"), settings=greedy_settings(), plain=False)
    assert without.plain is None and len(without.acceptance.prompts) == 2


class Changed(HfEngine):
    """A real engine whose speculation is tampered with afterwards: what a fault in verification would look like."""

    def __init__(self, engine: HfEngine, change: Callable[[tuple[int, ...]], tuple[int, ...]]) -> None:
        self.__dict__.update(engine.__dict__)
        self.change = change

    def speculate(self, requests: Any, draft: Path, settings: SpeculateSettings) -> Acceptance:
        found = super().speculate(requests, draft, settings)
        first = dataclasses.replace(found.prompts[0], token_ids=self.change(found.prompts[0].token_ids))
        return dataclasses.replace(found, prompts=(first, *found.prompts[1:]))


def test_identity_holds_for_the_engine_and_fails_for_a_faulty_one(engine: HfEngine, requests: list[SpeculateRequest]) -> None:
    asked: dict[str, Any] = {**WHERE, "requests": requests, "draft": Path("unused"), "settings": greedy_settings()}
    true = prove_identity(engine=engine, **asked).identity
    assert true is not None and true.holds and true.num_prompts == 12
    assert true.num_identical == 12 - len(true.differences) and true.num_tokens > 100
    baseline: Baseline = engine.baseline(requests, greedy_settings())
    plain = baseline.token_ids["r0"]

    def another_token(ids: tuple[int, ...]) -> tuple[int, ...]:
        return (*ids[:4], (ids[4] + 1) % 160, *ids[5:])

    for change, index, tokens in (
        (another_token, 4, (plain[4], (plain[4] + 1) % 160)),
        (lambda ids: ids[:-1], len(plain) - 1, (plain[-1], None)),
    ):
        false = prove_identity(engine=Changed(engine, change), **asked).identity
        assert false is not None and not false.holds and false.num_identical == true.num_identical - 1
        (difference,) = (item for item in false.differences if item.prompt_id == "r0")
        assert (difference.index, difference.plain_token, difference.speculated_token) == (index, *tokens)
        assert difference.logit_gap == pytest.approx(engine.logit_gap(requests[0].token_ids + plain[:index])) and not difference.is_tie


def test_texts_of_several_schemes_are_held_against_one_plain_decoding(
    engine: HfEngine, requests: list[SpeculateRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[int] = []
    plainly = engine.baseline

    def counted(requests: Sequence[SpeculateRequest], settings: SpeculateSettings) -> Baseline:
        decoded.append(len(requests))
        return plainly(requests, settings)

    monkeypatch.setattr(engine, "baseline", counted)
    texts = GreedyTexts(engine=engine, prompt_set="project", requests=requests[:2], max_new_tokens=8)
    schemes = CHAIN, PromptLookup(num_speculative_tokens=2, max_ngram=3, min_ngram=1)
    one, other = (texts.compare(scheme, head="head", draft=Path("unused"), weights_sha256=None) for scheme in schemes)
    assert decoded == [2]
    assert (one.decoding, other.decoding) == ("chain", "prompt_lookup")
    assert one.identity.holds and other.identity.holds and one.identity.num_tokens == other.identity.num_tokens > 0


def test_drafts_that_are_not_drawn_are_not_asked_to_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert greedy_settings(num_speculative_tokens=7, refresh=False).num_speculative_tokens == 7
    drawn = {"temperature": 1.0, "top_p": 1.0, "draft_sampling": "probabilistic"}
    lookup = PromptLookup(num_speculative_tokens=4, max_ngram=3, min_ngram=1)
    found = speculate_settings(decoding=lookup, way=drawn, max_new_tokens=1, seed=0, batch_size=1, draws=lookup.draws)
    assert found.draft_sampling == "greedy" and "draft_sampling is greedy" in capsys.readouterr().err
    with pytest.raises(ValueError, match="expected greedy with decoding=prompt_lookup"):
        dataclasses.replace(found, draft_sampling="probabilistic")
    assert (
        speculate_settings(decoding=CHAIN, way=drawn, max_new_tokens=1, seed=0, batch_size=1, draws=True).draft_sampling == "probabilistic"
    )
    with pytest.raises(ValueError, match=r"sampling\.top_p"):
        speculate_settings(decoding=CHAIN, way=GREEDY | {"top_p": 0.0}, max_new_tokens=1, seed=0, batch_size=1, draws=True)


def test_pieces_are_plain_json(tmp_path: Path, measurement: Measurement) -> None:
    Pieces(folder=tmp_path, identity={"path": Path("x")}).get("k", [], lambda: measurement)
    document = json.loads((tmp_path / "k.json").read_text(encoding="utf-8"))
    assert set(document) == {"depends_on", "measurement", "seal"} and len(document["depends_on"]) == 64
