"""Files as users have them: marks, line ends, cuts, encodings; and the exact place of what is wrong."""

from __future__ import annotations

import json

import pytest

from mtp_train.prompt.files import read_file

ROWS = [{"text": "a"}, {"text": "b\u2028c"}, {"text": "é"}]


def write(tmp_path, name: str, raw: bytes):
    path = tmp_path / name
    path.write_bytes(raw)
    return path


def lines(*, end: str = "\n") -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + end for row in ROWS).encode()


def values(path):
    return [row.value for row in read_file(path)]


def faults(path):
    return [(row.number, row.fault.reason, row.fault.why) for row in read_file(path) if row.fault is not None]


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("plain.jsonl", lines()),
        ("no_last_end.jsonl", lines().rstrip(b"\n")),
        ("crlf.jsonl", lines(end="\r\n")),
        ("mark.jsonl", b"\xef\xbb\xbf" + lines()),
        ("blank_lines.ndjson", b"\n  \r\n" + lines(end="\n\n")),
        ("lines.json", lines()),
        ("array.json", json.dumps(ROWS, indent=1).encode()),
        ("array_mark.json", b"\xef\xbb\xbf" + json.dumps(ROWS, ensure_ascii=False).encode()),
        ("array.jsonl", json.dumps(ROWS).encode()),
    ],
)
def test_every_spelling_of_the_same_rows(tmp_path, name, raw):
    assert values(write(tmp_path, name, raw)) == ROWS


def test_rows_are_numbered_as_an_editor_numbers_lines(tmp_path):
    assert [row.number for row in read_file(write(tmp_path, "x.jsonl", b'\n{"a": 1}\n\n{"a": 2}\n'))] == [2, 4]


def test_one_indented_object_is_one_row(tmp_path):
    assert values(write(tmp_path, "x.json", json.dumps(ROWS[0], indent=2).encode())) == [ROWS[0]]


def test_text_file_is_one_document(tmp_path):
    assert values(write(tmp_path, "x.txt", "\ufeffdocument\n".encode())) == [{"text": "document\n"}]


def test_parquet(tmp_path):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "x.parquet")
    assert values(tmp_path / "x.parquet") == ROWS
    with pytest.raises(ValueError, match="expected a Parquet file"):
        list(read_file(write(tmp_path, "broken.parquet", b"PAR1 not really")))


@pytest.mark.parametrize("cut", range(1, 14))
def test_a_last_line_cut_anywhere_is_named_and_the_rest_is_read(tmp_path, cut):
    whole = lines().rstrip(b"\n")
    path = write(tmp_path, "x.jsonl", whole[:-cut])
    if cut == len('{"text": "é"}'.encode()):
        assert values(path) == ROWS[:2]
        return
    assert values(path)[:2] == ROWS[:2]
    assert [(number, reason) for number, reason, _ in faults(path)] == [(3, "truncated_line")]


def test_a_broken_line_in_the_middle(tmp_path):
    path = write(tmp_path, "x.jsonl", lines() + b'{"text": \n' + lines())
    assert [row.value for row in read_file(path) if row.fault is None] == ROWS * 2
    assert [(number, reason) for number, reason, _ in faults(path)] == [(4, "broken_json")]


@pytest.mark.parametrize(
    "odd", ["[" * 100_000, '{"text": ' * 100_000, '{"text": ' + "9" * 5000 + "}"], ids=["brackets", "braces", "digits"]
)
def test_what_the_decoder_gives_up_on_is_a_broken_row(tmp_path, odd):
    """Nested too deep, or a number too long: neither is JSONDecodeError, and neither ends the run."""
    path = write(tmp_path, "x.jsonl", lines() + odd.encode() + b"\n" + lines())
    assert [row.value for row in read_file(path) if row.fault is None] == ROWS * 2
    assert [(number, reason) for number, reason, _ in faults(path)] == [(4, "broken_json")]
    array = write(tmp_path, "x.json", b"[1, " + odd.encode() + b"]")
    assert [(number, reason) for number, reason, _ in faults(array)] == [(2, "broken_json")]


@pytest.mark.parametrize("cut", [1, 3, 8])
def test_an_array_cut_short_gives_what_stands_before(tmp_path, cut):
    path = write(tmp_path, "x.json", json.dumps(ROWS).encode()[:-cut])
    assert [row.value for row in read_file(path) if row.fault is None][:2] == ROWS[:2]
    assert [reason for _, reason, _ in faults(path)] == ["broken_json"]


@pytest.mark.parametrize(
    ("name", "raw", "position"),
    [
        ("x.jsonl", lines() + '{"text": "caf\xe9"}\n'.encode("latin1"), len(lines()) + 13),
        ("mark.jsonl", b"\xef\xbb\xbf" + lines() + '{"text": "caf\xe9"}\n'.encode("latin1"), 3 + len(lines()) + 13),
        ("first.jsonl", b"\xef\xbb\xbf" + '{"text": "caf\xe9"}\n'.encode("latin1"), 3 + 13),
        ("x.json", b"\xef\xbb\xbf" + '[{"text": "caf\xe9"}]'.encode("latin1"), 3 + 14),
        ("x.txt", "caf\xe9 au lait".encode("latin1"), 3),
        ("utf16.jsonl", '{"text": "a"}'.encode("utf-16"), 0),
    ],
)
def test_other_encodings_are_refused_at_their_byte(tmp_path, name, raw, position):
    encoding = "UTF-16" if name.startswith("utf16") else "LATIN1"
    with pytest.raises(ValueError, match=f"expected UTF-8, found byte 0x.. at byte position {position} .*iconv -f {encoding} "):
        list(read_file(write(tmp_path, name, raw)))


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.txt", "x.parquet"])
def test_empty_missing_and_unknown_files_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match="empty file"):
        list(read_file(write(tmp_path, name, b"")))
    with pytest.raises(ValueError, match="nothing there"):
        list(read_file(tmp_path / "missing.jsonl"))
    with pytest.raises(ValueError, match=r"suffix '\.csv'"):
        list(read_file(write(tmp_path, "x.csv", b"a,b")))
