"""What a machine does to a cache beside killing its writer: takes away the right to write, sets its clock back."""

from __future__ import annotations

import os
import stat
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

from mtp_train.cache.reader import CacheReader

NOBODY = 65534


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that any user may enter: pytest's own is its user's alone."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_a_folder_that_may_not_be_written_is_told_and_what_is_whole_stays(open_folder, source, contents):
    """Root may write everywhere, so that the test's writer, where it is root, becomes nobody."""
    cache = open_folder / "cache"
    writer = source.writer(cache)
    by_id = {sample.sample_id: sample for sample in source.samples}
    (first, first_ids), (second, second_ids) = list(writer.missing_shards())[:2]
    writer.write_shard(first, [by_id[sample_id] for sample_id in first_ids])
    before = contents(cache)
    for path in (cache, *cache.iterdir()):
        path.chmod(path.stat().st_mode & ~0o222 | stat.S_IROTH | (stat.S_IXOTH if path.is_dir() else 0))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if os.geteuid() == 0:
                os.seteuid(NOBODY)
            with pytest.raises(
                ValueError, match=r"shard-00001.*Permission denied.*1 finished shards are kept; make room or choose another"
            ):
                writer.write_shard(second, [by_id[sample_id] for sample_id in second_ids])
            code = 0
        except Exception:
            traceback.print_exc()
            raise
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert contents(cache) == before
    cache.chmod(0o755)
    assert source.write(cache) == [1, 2, 3]


@pytest.mark.parametrize("year_s", [0, 2**32])
def test_a_clock_that_was_set_changes_nothing(tmp_path, source, contents, year_s):
    """What is whole is told by its content, and by no time: files from 1970 or 2106 are as good as others, and none is older."""
    source.write(tmp_path)
    expected = contents(tmp_path)
    (tmp_path / "shard-00002.safetensors").write_bytes(expected["shard-00002.safetensors"][:-1])
    for number, path in enumerate(sorted(tmp_path.iterdir())):
        os.utime(path, (year_s - number, year_s - number))
    assert source.write(tmp_path) == [2]
    assert contents(tmp_path) == expected
    assert len(CacheReader(tmp_path, verify="first_read")) == len(source.samples)
