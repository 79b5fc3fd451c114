"""A report renders from any data, escapes all of it, needs nothing beside it, and comes back from its JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from mtp_train.acceptance.certificate import Certificate, GreedyCase, SampledCase, distances
from mtp_train.acceptance.identity import Difference, Identity
from mtp_train.acceptance.report import print_summary, read_report, stands, write_report
from mtp_train.acceptance.report_data import MarkedAnswer, Measurement, ReportData, from_json, to_json
from mtp_train.acceptance.report_summary import by_category, by_context, summarise
from mtp_train.acceptance.report_table import section_table
from mtp_train.records import Acceptance, PromptAcceptance


class Elements(HTMLParser):
    """Counts elements and collects text, ids and attributes that load something."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: dict[str, int] = {}
        self.text: list[str] = []
        self.loads: list[str] = []
        self.handlers: list[str] = []
        self.ids: list[str] = []
        self.refs: list[str] = []
        self.marked: list[str] = []
        self._open: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        given = dict(attrs)
        for name, value in attrs:
            if name in ("src", "href", "srcset", "action", "data") and value:
                self.loads.append(value)
            if name == "xlink:href" and value:
                self.refs.append(value)
            if name.startswith("on"):
                self.handlers.append(name)
            if name == "id" and value:
                self.ids.append(value)
        self._open.append((tag, given.get("class") or ""))

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        self.text.append(data)
        if self._open and self._open[-1] == ("span", "a"):
            self.marked.append(data)


@pytest.fixture(scope="module")
def written(report_data: ReportData, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    index = write_report(report_data, tmp_path_factory.mktemp("written") / "report")
    return index.parent, index.read_text(encoding="utf-8")


def parsed(html: str) -> Elements:
    parser = Elements()
    parser.feed(html)
    parser.close()
    return parser


def test_page_stands_alone_and_holds_no_foreign_markup(written: tuple[Path, str], nasty: str) -> None:
    found = parsed(written[1])
    assert "script" not in found.tags
    assert "img" not in found.tags
    assert "link" not in found.tags
    assert "iframe" not in found.tags
    assert found.loads == []
    assert found.handlers == []
    assert all(ref.startswith("#") for ref in found.refs)
    assert "url(http" not in written[1]
    assert "@import" not in written[1]
    assert "<script" not in written[1]
    assert "".join(found.text).count(nasty) >= 10, "hostile text is shown as it stands"


def test_ids_of_all_plots_are_their_own(written: tuple[Path, str]) -> None:
    found = parsed(written[1])
    assert found.tags["svg"] >= 8
    assert len(found.ids) == len(set(found.ids))
    assert {ref[1:] for ref in found.refs} <= set(found.ids)


def test_page_marks_exactly_the_accepted_tokens(written: tuple[Path, str], report_data: ReportData) -> None:
    expected = [text for answer in report_data.answers for text, taken in zip(answer.token_texts, answer.accepted, strict=True) if taken]
    marked = [text for text in parsed(written[1]).marked if text != "Underlined on colour"]
    assert marked == expected
    assert "text-decoration: underline" in written[1], "not by colour alone"


def test_page_says_how_it_was_measured(written: tuple[Path, str]) -> None:
    text = " ".join("".join(parsed(written[1]).text).split())
    for said in (
        "SmolLM2-135M-Instruct · layers 30 · hidden 576 · stored as float16",
        "chain, K = 5, greedy decoding (temperature 0), drafts greedy",
        "sampled at temperature 1",
        "transformers 5.19.0",
        "float32",
        "39 of 40 prompts",
        "abc-dirty",
        "torch 2.13.0",
        "3.00e-05",
    ):
        assert said in text, said


def test_how_it_was_served_stands_there_to_be_pasted(report_data: ReportData, tmp_path: Path, nasty: str) -> None:
    first, *others = report_data.measurements
    notes = {"class": nasty, "plugin": None, "attention": ["FLASHINFER"], "serve": f"vllm serve '{nasty}'"}
    served = dataclasses.replace(first, acceptance=dataclasses.replace(first.acceptance, notes=notes))
    index = write_report(dataclasses.replace(report_data, measurements=(served, *others)), tmp_path / "served")
    found = parsed(index.read_text(encoding="utf-8"))
    text = " ".join("".join(found.text).split())
    assert "script" not in found.tags and "img" not in found.tags
    assert f"(stock, no plugin), attention FLASHINFER: vllm serve '{nasty}'" in text
    written = (index.parent / "report.md").read_text(encoding="utf-8")
    assert f"```bash\nvllm serve '{nasty}'\n```" in written and written.count("Served as") == 1


def test_markdown_escapes(written: tuple[Path, str]) -> None:
    text = (written[0] / "report.md").read_text(encoding="utf-8")
    prose = text[: text.index("## What produced it")]
    assert "<" not in prose
    tables = [[line for line in block.split("\n") if line.startswith("|")] for block in prose.split("\n\n")]
    widths = [{line.replace("\\|", "").count("|") for line in table} for table in tables if table]
    assert len(widths) >= 4 and all(len(found) == 1 for found in widths), "no cell ends early"


def test_same_data_same_bytes(report_data: ReportData, tmp_path: Path) -> None:
    first, second = (write_report(report_data, tmp_path / name) for name in ("one", "two"))
    assert first.read_bytes() == second.read_bytes()


def test_json_round_trip(written: tuple[Path, str], report_data: ReportData, tmp_path: Path) -> None:
    again = read_report(written[0])
    assert again == report_data
    assert write_report(again, tmp_path / "again").read_text(encoding="utf-8") == written[1]
    summary = json.loads((written[0] / "report.json").read_text(encoding="utf-8"))["summary"]
    section = summary["sections"][0]
    measured = next(item for item in section["figures"] if item["head"] == "mtp" and item["measured_by"] == "hf")
    expected = report_data.measurements[0].acceptance
    assert [rate["value"] for rate in measured["rate_per_position"]] == pytest.approx(expected.rate_per_position())
    assert measured["num_drafts"] == expected.num_drafts
    assert section["comparisons"][0]["first"] == "mtp"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 99}, "format_version"),
        ({"unknown": 1}, "expected the fields"),
        ({"title": 3}, "report.title"),
        ({"heads": [{"name": "mtp"}]}, r"report.heads\[0\]"),
        ({"measurements": "none"}, "report.measurements"),
    ],
)
def test_broken_json_is_refused(report_data: ReportData, change: dict[str, object], message: str) -> None:
    document = json.loads(json.dumps(to_json(report_data)))
    with pytest.raises(ValueError, match=message):
        from_json({**document, **change})


def test_a_changed_report_is_refused_and_a_whole_one_stands(report_data: ReportData, tmp_path: Path) -> None:
    write_report(report_data, tmp_path)
    assert stands(report_data, tmp_path) and read_report(tmp_path) == report_data
    assert not stands(dataclasses.replace(report_data, title="another"), tmp_path)
    path = tmp_path / "report.json"
    whole = path.read_text(encoding="utf-8")
    for damaged in (whole.replace('"num_drafts": ', '"num_drafts": 1', 1), whole[:-9], "[]", '{"data": {}}'):
        path.write_text(damaged, encoding="utf-8")
        with pytest.raises(ValueError, match=r"report\.json: .*run evaluate again"):
            read_report(tmp_path)
        assert not stands(report_data, tmp_path)


def test_aims_are_judged_by_what_was_measured(report_data: ReportData) -> None:
    reached, missed = summarise(report_data).verdicts
    assert reached.reached
    assert reached.established and reached.text.endswith("reached.")
    few = reached._replace(num_prompts=9)
    assert few.reached and not few.established and few.text.endswith("reached, over 9 prompts, of 10 at least, which establish nothing.")
    assert not missed.reached
    assert "aim 0.30" in missed.text
    assert missed.text.endswith("missed.")
    without = dataclasses.replace(report_data, measurements=tuple(m for m in report_data.measurements if m.is_estimate))
    assert all(verdict.text.endswith("not measured: missed.") for verdict in summarise(without).verdicts), "an estimate is no measurement"


def test_headline_pairs_heads_and_estimates(report_data: ReportData) -> None:
    section = summarise(report_data).sections[0]
    assert [figures.head for figures in section.measured] == ["mtp", "eagle"]
    assert section.way.temperature == 0
    (comparison,) = section.comparisons
    difference = section.measured[0].rates[0].value - section.measured[1].rates[0].value
    assert comparison.rates[0].value == pytest.approx(difference)
    assert comparison.rates[0].established
    rows = {row.label: row.cells for row in section_table(section).rows}
    estimate = section.estimate_of("mtp")
    assert estimate is not None
    assert rows["estimate, length"][0].startswith(f"{estimate.length.value:.2f} ")
    measurement = report_data.measurements[0]
    tokens = sum(len(prompt.token_ids) for prompt in measurement.acceptance.prompts)
    assert rows["tokens/s with drafts"][0] == f"{tokens / 12.5:.1f}"
    assert rows["with / without"][0] == f"{(tokens / 12.5) / (1000 / 11):.2f}×"


def test_groups_hold_every_prompt_once(report_data: ReportData) -> None:
    acceptance = report_data.measurements[0].acceptance
    for groups in (by_category(acceptance), by_context(acceptance)):
        assert sum(group.num_prompts for group in groups) == len(acceptance.prompts)
    assert [group.label for group in by_context(acceptance)] == ["0–127", "128–511", "512–1023", "1024–2047", "2048–4095", "4096+"]
    lengths = [prompt.num_prompt_tokens for prompt in acceptance.prompts]
    assert by_context(acceptance)[0].num_prompts == sum(length < 128 for length in lengths)


def test_one_head_by_several_engines(report_data: ReportData, tmp_path: Path) -> None:
    mine = [m for m in report_data.measurements if m.head == "mtp"]
    other = dataclasses.replace(
        mine[0], acceptance=dataclasses.replace(mine[0].acceptance, measured_by="vllm", engine_version="vllm 0.32.0")
    )
    data = dataclasses.replace(report_data, measurements=(*mine, other))
    columns = section_table(summarise(data).sections[0]).columns
    assert len(set(columns)) == len(columns) == 2
    assert "vllm 0.32.0" in columns[1]
    assert "vllm 0.32.0" in write_report(data, tmp_path).read_text(encoding="utf-8")


def test_a_difference_without_a_tie_is_named(report_data: ReportData, tmp_path: Path) -> None:
    apart = Difference(prompt_id="p", index=3, plain_token=1, speculated_token=2, logit_gap=0.4)
    identity = Identity(num_prompts=40, num_identical=39, num_tokens=1000, differences=(apart,))
    first = dataclasses.replace(report_data.measurements[0], identity=identity)
    html = write_report(dataclasses.replace(report_data, measurements=(first,)), tmp_path).read_text(encoding="utf-8")
    assert "Not the same text." in html
    assert "4.00e-01" in html


def test_little_data_still_renders(report_data: ReportData, tmp_path: Path) -> None:
    bare = dataclasses.replace(report_data, answers=(), aims=(), notes=(), provenance={}, measurements=())
    assert "Training" in write_report(bare, tmp_path / "bare").read_text(encoding="utf-8")
    measurement = report_data.measurements[0]
    one = dataclasses.replace(measurement.acceptance, prompts=measurement.acceptance.prompts[:1], wall_s=None)
    single = dataclasses.replace(bare, measurements=(dataclasses.replace(measurement, acceptance=one, plain=None, identity=None),))
    index = write_report(single, tmp_path / "single")
    assert parsed(index.read_text(encoding="utf-8")).tags["svg"] >= 4


def test_names_that_do_not_match_are_refused(report_data: ReportData) -> None:
    with pytest.raises(ValueError, match="expected one of the heads"):
        dataclasses.replace(report_data, measurements=(dataclasses.replace(report_data.measurements[0], head="medusa"),))
    with pytest.raises(ValueError, match="name of its own"):
        dataclasses.replace(report_data, heads=(report_data.heads[0], report_data.heads[0]))
    with pytest.raises(ValueError, match="one flag per token"):
        MarkedAnswer(head="mtp", prompt_set="heldout", prompt_id="p", category="", question="", token_texts=("a",), accepted=())


def test_terminal_table(report_data: ReportData, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_summary(report_data, tmp_path)
    out = capsys.readouterr().out
    assert "acceptance length" in out
    assert "missed" in out
    assert out.rstrip().endswith(f"report: {tmp_path / 'index.html'}")
    length = report_data.measurements[0].acceptance.acceptance_length()
    assert f"{length:.2f} [" in out


def test_a_run_made_to_compare_texts_is_no_column(report_data: ReportData, tmp_path: Path) -> None:
    """As evaluate does: the measurement in bfloat16, and a shorter run in float32 that proves the identity."""
    proof = report_data.measurements[0]
    short = dataclasses.replace(proof.acceptance, prompts=proof.acceptance.prompts[:8])
    main = dataclasses.replace(proof, identity=None, acceptance=dataclasses.replace(proof.acceptance, dtype="bfloat16"))
    data = dataclasses.replace(report_data, measurements=(main, dataclasses.replace(proof, acceptance=short)), aims=())
    section = summarise(data).sections[0]
    assert section_table(section).columns == ["mtp"]
    assert section.measured[0].measurement == main
    assert section.num_prompts == 40
    html = write_report(data, tmp_path).read_text(encoding="utf-8")
    assert (
        "token for token the same as plain greedy decoding on 39 of 40 prompts (1000 tokens compared, hf (transformers 5.19.0, float32))"
        in html
    )
    assert "token for token" in (tmp_path / "report.md").read_text(encoding="utf-8")


def test_the_same_twice_stands_in_two_columns(report_data: ReportData, tmp_path: Path) -> None:
    first = report_data.measurements[0]
    data = dataclasses.replace(report_data, measurements=(first, first), aims=())
    columns = section_table(summarise(data).sections[0]).columns
    assert columns[1] == f"{columns[0]} (2)"
    assert columns[1] in write_report(data, tmp_path).read_text(encoding="utf-8")


def tree_of(measurement: Measurement, *, rate: float, acceptance_of: Callable[..., Acceptance]) -> Measurement:
    """The same prompts decoded with a tree of three depths."""
    counted = acceptance_of(rate=rate, num_prompts=40, temperature=0.0, measured_by="hf", seed=0, depths=3)
    acceptance = dataclasses.replace(counted, scheme="tree", decoding="dynamic_tree", num_nodes=9)
    return dataclasses.replace(measurement, acceptance=acceptance, identity=None)


def test_a_tree_stands_beside_the_chain_and_is_held_against_it(
    report_data: ReportData, acceptance_of: Callable[..., Acceptance], tmp_path: Path
) -> None:
    chain = dataclasses.replace(report_data.measurements[0], identity=None)
    tree = tree_of(chain, rate=0.6, acceptance_of=acceptance_of)
    data = dataclasses.replace(report_data, measurements=(tree, chain), aims=())
    first, second = summarise(data).sections
    assert (first.way.decoding, second.way.decoding) == ("chain", "dynamic_tree"), "chains first"
    assert second.way.text == (
        "tree (dynamic_tree), depth 3, 9 nodes, greedy decoding (temperature 0), drafts greedy (the draft's most probable tokens)"
    )
    assert [row.label for row in section_table(second).rows][:4] == ["depth 1", "depth 2", "depth 3", "acceptance length"]
    assert first.comparisons == []
    (comparison,) = second.comparisons
    assert (comparison.first, comparison.second) == ("mtp, tree (dynamic_tree), depth 3, 9 nodes", "mtp, chain, K = 5")
    lengths = tree.acceptance.acceptance_length(), chain.acceptance.acceptance_length()
    assert comparison.length.value == pytest.approx(lengths[0] - lengths[1]) and comparison.length.established
    assert [rate.value for rate in comparison.rates[3:]] == pytest.approx([-rate for rate in chain.acceptance.rate_per_position()[3:]])
    html = write_report(data, tmp_path).read_text(encoding="utf-8")
    assert "tree (dynamic_tree), depth 3, 9 nodes less mtp, chain, K = 5" in html
    assert read_report(tmp_path) == data
    figures = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["summary"]["sections"][1]
    assert figures["way"] | {"temperature": 0.0} == second.way._asdict()


def test_passes_without_drafts_are_counted_in(report_data: ReportData) -> None:
    """Two answers: one whose last verification the answer's end cuts behind an accepted token, one with three plain passes."""
    cut = PromptAcceptance(
        prompt_id="a",
        category="c",
        num_prompt_tokens=3,
        token_ids=(1, 2, 3, 4, 5),
        accepted=(False, True, False, True, True),
        num_drafts=2,
        num_drafted_per_position=(2, 2),
        num_accepted_per_position=(2, 1),
    )
    plain = dataclasses.replace(cut, prompt_id="b", accepted=(False, False, False, True, False), num_drafts=1)
    measurement = report_data.measurements[0]
    for prompts, without, per_pass in (((cut,), 0, 4 / 2), ((plain,), 2, 4 / 3), ((cut, plain), 2, 8 / 5)):
        acceptance = dataclasses.replace(measurement.acceptance, prompts=prompts, num_speculative_tokens=2)
        changed = dataclasses.replace(measurement, acceptance=acceptance, identity=None)
        (section,) = summarise(dataclasses.replace(report_data, measurements=(changed,), aims=())).sections
        assert section.measured[0].num_passes_without_drafts == without
        assert section.measured[0].tokens_per_pass == pytest.approx(per_pass)
        labels = [row.label for row in section_table(section).rows]
        assert ("tokens per pass, with those without drafts" in labels) == (without > 0)


def test_a_certificate_is_shown(report_data: ReportData, tmp_path: Path, nasty: str) -> None:
    identity = report_data.measurements[0].identity
    assert identity is not None
    sampled = SampledCase(
        decoding="chain",
        drafted="chain, K = 2",
        draft_sampling="probabilistic",
        temperature=0.7,
        num_tokens=3,
        acceptance_length=1.5,
        distances=distances([510, 490], [0.5, 0.5]),
    )
    greedy = GreedyCase(head=nasty, decoding="chain", drafted="chain, K = 2", prompt_set="heldout", identity=identity)
    certificate = Certificate(sampled=(sampled,), greedy=(greedy,), engine="hf", target=nasty, provenance={})
    data = dataclasses.replace(report_data, certificate=certificate)
    html = write_report(data, tmp_path).read_text(encoding="utf-8")
    text = " ".join("".join(parsed(html).text).split())
    assert "Losslessness" in text and certificate.text in text and "0.00050" in text
    assert "<script" not in html
    assert "39 of 40" in (tmp_path / "report.md").read_text(encoding="utf-8")
    assert read_report(tmp_path) == data
