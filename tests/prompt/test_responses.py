"""Responses on disk: killed at any byte and continued, refused where other settings made them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

from mtp_train import runtime
from mtp_train.prompt.responses import ResponseWriter, read_meta, read_responses
from mtp_train.records import Response

IDENTITY = {"target": "tiny", "target_fingerprint": "f00", "engine": "hf 1", "sampling": {"temperature": 0.0, "seed": 0}}


def response(name: str) -> Response:
    return Response(
        prompt_id=name,
        token_ids=(1, 2, 3, 4),
        loss_mask=(False, False, True, True),
        messages=({"role": "user", "content": f"é\u2028\n{name}"}, {"role": "assistant", "content": "ok"}),
        finish_reason="stop",
        category="chat",
        source="test",
    )


def write(directory, names):
    with ResponseWriter(directory=directory, identity=IDENTITY) as writer:
        for name in names:
            if name not in writer.done_ids:
                writer.write(response(name))
        return writer.finish()


def test_round_trip_by_ascending_id(tmp_path):
    assert write(tmp_path, "bca") == 3
    assert read_responses(tmp_path) == [response(name) for name in "abc"]
    assert read_meta(tmp_path) == IDENTITY


def test_killed_at_any_byte_it_continues_to_the_same(tmp_path):
    write(tmp_path / "whole", "abc")
    raw = (tmp_path / "whole" / "responses.jsonl").read_bytes()
    first = raw.index(b"\n") + 1
    # every byte of the second line, and the edges of the others
    for cut in [0, 1, *range(first - 1, first + raw[first:].index(b"\n") + 3), len(raw) - 1, len(raw)]:
        directory = tmp_path / "cut"
        shutil.copytree(tmp_path / "whole", directory)
        (directory / "finished.json").unlink()
        (directory / "responses.jsonl").write_bytes(raw[:cut])
        with pytest.raises(ValueError, match="run regenerate again"):
            read_responses(directory)
        write(directory, "abc")
        assert (directory / "responses.jsonl").read_bytes() == raw
        shutil.rmtree(directory)


def test_a_killed_process_loses_nothing_that_it_had_written(tmp_path):
    program = (
        "import os, sys; sys.path.insert(0, sys.argv[2])\n"
        "from pathlib import Path\n"
        "from test_responses import IDENTITY, response\n"
        "from mtp_train.prompt.responses import ResponseWriter\n"
        "writer = ResponseWriter(directory=Path(sys.argv[1]), identity=IDENTITY)\n"
        "writer.write(response('a')); writer.write(response('b')); os.kill(os.getpid(), 9)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    here = os.path.dirname(__file__)
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path), here], env=environment, check=False)
    assert done.returncode == -9
    assert read_responses(tmp_path, allow_unfinished=True) == [response("a"), response("b")]
    with ResponseWriter(directory=tmp_path, identity=IDENTITY) as writer:
        assert writer.done_ids == {"a", "b"}


def test_other_settings_are_refused_with_both_values(tmp_path):
    write(tmp_path, "a")
    with pytest.raises(ValueError, match=r"target_fingerprint: this run has 'bad', the folder 'f00'.*another run folder"):
        ResponseWriter(directory=tmp_path, identity={**IDENTITY, "target_fingerprint": "bad"})
    (tmp_path / "meta.json").unlink()
    with pytest.raises(ValueError, match=r"expected meta\.json"):
        ResponseWriter(directory=tmp_path, identity=IDENTITY)


def test_of_two_that_begin_a_folder_at_once_one_is_refused(tmp_path, monkeypatch):
    """Both have seen that nobody was there: the first one's identity stands."""
    plain = runtime.create_json

    def second(path, value):
        monkeypatch.setattr(runtime, "create_json", plain)
        ResponseWriter(directory=tmp_path, identity={**IDENTITY, "dtype": "float32"}).close()
        plain(path, value)

    monkeypatch.setattr(runtime, "create_json", second)
    with pytest.raises(ValueError, match="dtype: this run has 'bfloat16', the folder 'float32'"):
        ResponseWriter(directory=tmp_path, identity={**IDENTITY, "dtype": "bfloat16"})
    assert read_meta(tmp_path)["dtype"] == "float32"


def test_the_finished_mark_goes_when_more_comes(tmp_path):
    write(tmp_path, "a")
    with ResponseWriter(directory=tmp_path, identity=IDENTITY) as writer:
        assert writer.finished
        writer.write(response("b"))
        assert not writer.finished
    assert write(tmp_path, "ab") == 2
    with (tmp_path / "responses.jsonl").open("r+b") as stream:
        stream.truncate(10)
    with pytest.raises(
        ValueError, match=r"responses\.jsonl: expected the file of sha256 .*delete it and finished\.json and run regenerate"
    ):
        read_responses(tmp_path)


def test_a_changed_token_is_told_once_the_folder_is_finished(tmp_path):
    """A digit changed in a line is JSON as before: only the hash that the finished folder states can tell."""
    write(tmp_path, "ab")
    path = tmp_path / "responses.jsonl"
    text = path.read_text()
    token = str(response("a").token_ids[0])
    path.write_text(text.replace(f'"token_ids":[{token}', f'"token_ids":[{int(token) + 1}', 1))
    assert path.read_text() != text
    for allow_unfinished in (False, True):
        with pytest.raises(ValueError, match="it was changed or damaged; restore it"):
            read_responses(tmp_path, allow_unfinished=allow_unfinished)
    path.write_text(text)
    (tmp_path / "responses-1.jsonl").touch()  # a process that had nothing to answer leaves an empty file
    assert len(read_responses(tmp_path)) == 2


@pytest.mark.parametrize(
    ("name", "text"),
    [("meta.json", "[1]"), ("meta.json", '{"format_version": 1}'), ("finished.json", "null"), ("finished.json", '{"num_responses": "2"}')],
)
def test_a_damaged_mark_is_refused_with_the_remedy(tmp_path, name, text):
    write(tmp_path, "ab")
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=rf"{name}: expected .*regenerate"):
        read_responses(tmp_path)


def test_a_prompt_is_answered_once(tmp_path):
    with ResponseWriter(directory=tmp_path, identity=IDENTITY) as writer:
        writer.write(response("a"))
        with pytest.raises(ValueError, match="has an answer already"):
            writer.write(response("a"))


def test_ranks_write_apart_and_are_read_together(tmp_path):
    for rank, name in enumerate("ab"):
        with ResponseWriter(directory=tmp_path, identity=IDENTITY, rank=rank) as writer:
            writer.write(response(name))
    with ResponseWriter(directory=tmp_path, identity=IDENTITY, rank=2) as writer:
        assert writer.done_ids == {"a", "b"}
        assert writer.finish() == 2
    assert read_responses(tmp_path) == [response("a"), response("b")]


def test_a_broken_line_is_named(tmp_path):
    write(tmp_path, "ab")
    path = tmp_path / "responses.jsonl"
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + b"\x00" * 20 + b"\n" + second)
    with pytest.raises(ValueError, match=r"responses\.jsonl, line 2: expected one response"):
        read_responses(tmp_path)
    record = json.loads(first)
    path.write_bytes(json.dumps({**record, "loss_mask": [1]}).encode() + b"\n" + second)
    with pytest.raises(ValueError, match=r"line 1.*one flag per token"):
        read_responses(tmp_path)
