"""A cache behind a URL gives what the folder gives, within its bytes, whatever becomes of single files."""

from __future__ import annotations

import errno
import http.server
import importlib.util
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from mtp_train.cache import fetched as folder_module
from mtp_train.cache import remote as module
from mtp_train.cache.reader import CacheReader
from mtp_train.cache.remote import RemoteCache

LENGTHS = tuple(3 + (7 * number) % 10 for number in range(40))


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PAUSE_S", 0.0)


@pytest.fixture
def local(tmp_path: Path, identity: Any, make_source: Callable[..., Any]) -> CacheReader:
    make_source(identity, LENGTHS).write(tmp_path / "cache")
    return CacheReader(tmp_path / "cache", verify="first_read")


@pytest.fixture
def url(tmp_path: Path, local: CacheReader) -> Iterator[str]:
    """The same cache in fsspec's memory."""
    import fsspec

    files, name = fsspec.filesystem("memory"), f"/{tmp_path.name}"
    files.put(str(local.path) + "/", name + "/", recursive=True)
    yield f"memory:/{name}"
    files.rm(name, recursive=True)


def largest(cache: CacheReader) -> int:
    return max(cache.shard_bytes())


def held_bytes(folder: Path) -> int:
    held = 0
    for path in folder.glob("*/*shard-*"):
        with suppress(FileNotFoundError):  # where others make room at the moment
            held += path.stat().st_size
    return held


def at(local: CacheReader, shard: int) -> int:
    """The number of the first sample of a shard."""
    return local.shards.index(shard)


class Gate:
    """Stops fetches that run ahead where they begin: ``wait_for`` so many, then ``open`` it. ``begun``: what was fetched, by anybody."""

    def __init__(self, cache: RemoteCache, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self._arrived, self._opened = list[str](), threading.Semaphore(0), threading.Event()
        plain = type(cache._files).get_file

        def slow(files: Any, source: str, to: str) -> None:
            self.begun.append(Path(source).stem)
            if threading.current_thread().name.startswith("fetch"):
                self._arrived.release()
                assert self._opened.wait(60)
            plain(files, source, to)

        monkeypatch.setattr(type(cache._files), "get_file", slow)

    def wait_for(self, number: int) -> None:
        for _ in range(number):
            assert self._arrived.acquire(timeout=60)

    def open(self, *, after_s: float = 0.0) -> None:
        threading.Timer(after_s, self._opened.set).start()


def in_processes(number: int, work: Callable[[int], bool]) -> list[int]:
    """Fork processes that each do their work; their ids. The exit code says whether it went well."""
    children = []
    for child in range(number):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = 0 if work(child) else 3
            finally:
                os._exit(code)
        children.append(pid)
    return children


def most_held(children: list[int], folder: Path) -> int:
    """Wait until all have ended well; the most bytes that lay in the folder at any time."""
    most, left = 0, list(children)
    while left:
        most = max(most, held_bytes(folder))
        for pid, status in [os.waitpid(pid, os.WNOHANG) for pid in left]:
            if pid:
                assert os.waitstatus_to_exitcode(status) == 0
                left.remove(pid)
        time.sleep(0.002)
    return most


def marks(folder: Path) -> list[Path]:
    return sorted(folder.glob(".*.arriving"))


def same(mine: Any, theirs: Any) -> bool:
    return mine.sample_id == theirs.sample_id and all(
        torch.equal(getattr(mine, name), getattr(theirs, name)) for name in ("token_ids_T", "loss_mask_T", "hidden_TD", "taps_TLD")
    )


def test_every_sample_is_that_of_the_folder_and_the_limit_holds(tmp_path: Path, local: CacheReader, url: str) -> None:
    limit = 3 * largest(local)
    cache = RemoteCache(url, folder=tmp_path / "fetched", max_bytes=limit)
    assert (cache.sample_ids, cache.lengths, cache.shards) == (local.sample_ids, local.lengths, local.shards)
    assert cache.checksums() == local.checksums() and not cache.is_whole and not cache.is_local
    for number in [(17 * step) % len(local) for step in range(2 * len(local))]:
        assert same(cache[number], local[number])
        assert 0 < held_bytes(tmp_path / "fetched") <= limit
    cache.done()


def test_the_least_recently_used_shard_makes_room(tmp_path: Path, local: CacheReader, url: str) -> None:
    cache = RemoteCache(url, folder=tmp_path / "fetched", max_bytes=2 * largest(local) + 100)
    first = [local.shards.index(shard) for shard in range(4)]
    for number, name in ((first[0], 0), (first[1], 1), (first[0], 0)):
        assert same(cache[number], local[number])
        os.utime(cache._path(name), ns=(10 * (1 + name), 10 * (1 + name)))
    assert same(cache[first[0]], local[first[0]])  # used last
    assert same(cache[first[2]], local[first[2]])
    assert [cache._path(index).exists() for index in range(4)] == [True, False, True, False]
    cache.done()


def test_expected_shards_are_fetched_ahead_and_kept(tmp_path: Path, local: CacheReader, url: str) -> None:
    cache = RemoteCache(url, folder=tmp_path / "fetched", max_bytes=3 * largest(local))
    cache.expect([5, 2, 7, 1, 0])
    cache._pool.shutdown(wait=True)
    there = [index for index in range(len(cache.shard_bytes())) if cache._path(index).exists()]
    assert set(there) <= {5, 2, 7, 1} and {5, 2, 7} <= set(there)  # a fourth may fit, five do not
    for index in (5, 2, 7):
        number = local.shards.index(index)
        assert same(cache[number], local[number])


def test_shards_that_are_fetched_at_once_keep_within_the_limit_together(
    tmp_path: Path, local: CacheReader, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 3 * largest(local)
    cache = RemoteCache(url, folder=tmp_path / "fetched", max_bytes=limit)
    for shard in (0, 1, 2):
        assert same(cache[local.shards.index(shard)], local[local.shards.index(shard)])
    together, plain = threading.Barrier(3), type(cache._files).get_file

    def slow(self: Any, source: str, to: str) -> None:
        together.wait(60)  # all three have made room
        plain(self, source, to)

    monkeypatch.setattr(type(cache._files), "get_file", slow)
    cache.expect([5, 6, 7])
    cache._pool.shutdown(wait=True)
    assert all(cache._path(index).exists() for index in (5, 6, 7))
    assert held_bytes(tmp_path / "fetched") <= limit


def test_two_caches_of_one_process_count_what_arrives_for_either(
    tmp_path: Path, local: CacheReader, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one fetches ahead holds room that the other may not take ahead too; what is needed now is had all the same."""
    folder, limit = tmp_path / "fetched", 3 * largest(local)
    one, two = (RemoteCache(address, folder=folder, max_bytes=limit) for address in (url, url.replace("memory:/", "memory://")))
    assert one._local != two._local
    arriving, go_on, plain = threading.Semaphore(0), threading.Event(), type(one._files).get_file

    def slow(self: Any, source: str, to: str) -> None:
        arriving.release()
        assert go_on.wait(60)
        plain(self, source, to)

    with monkeypatch.context() as patched:
        patched.setattr(type(one._files), "get_file", slow)
        one.expect([5, 6, 7])
        for _ in range(3):
            assert arriving.acquire(timeout=60)
        two.expect([1, 2, 3])
        two._pool.shutdown(wait=True)  # none of them was begun
        assert not two._fetching and not any(two._path(index).exists() for index in (1, 2, 3))
        go_on.set()
        one._pool.shutdown(wait=True)
    assert all(one._path(index).exists() for index in (5, 6, 7))
    assert same(two[local.shards.index(1)], local[local.shards.index(1)])
    assert held_bytes(folder) <= limit and not marks(folder)


def test_a_second_process_finds_what_the_first_fetched_and_checks_it(
    tmp_path: Path, local: CacheReader, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cache() -> RemoteCache:
        return RemoteCache(url, folder=tmp_path / "fetched", max_bytes=10**9)

    first = cache()
    assert same(first[0], local[0]) and same(first[39], local[39]) and first.is_whole
    path = first._path(0)
    broken = bytearray(path.read_bytes())
    broken[-1] ^= 1
    path.unlink()
    path.write_bytes(broken)
    fetched = []
    second = cache()
    plain = second._files.get_file
    monkeypatch.setattr(type(second._files), "get_file", lambda self, source, to: (fetched.append(source), plain(source, to)))
    assert same(second[0], local[0]) and same(second[39], local[39])
    assert len(fetched) == 1 and fetched[0].endswith("shard-00000.safetensors")
    assert not list((tmp_path / "fetched").glob("*/.*"))


def test_a_connection_that_fails_now_and_then_is_tried_again(
    tmp_path: Path, local: CacheReader, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fsspec

    kind, calls = type(fsspec.filesystem("memory")), []
    plain = kind.get_file

    def failing(self: Any, source: str, to: str) -> None:
        calls.append(source)
        if len(calls) % 3 == 1:
            raise ConnectionResetError("by peer")
        plain(self, source, to)
        if len(calls) % 3 == 2:
            os.truncate(to, os.path.getsize(to) // 2)

    monkeypatch.setattr(kind, "get_file", failing)
    with pytest.raises(ValueError, match=r"manifest\.json: .*"):
        RemoteCache(url, folder=tmp_path / "cut", max_bytes=10**9)  # the second attempt leaves half a manifest, which its seal tells
    calls[:] = [""] * 2  # the next succeeds
    cache = RemoteCache(url, folder=tmp_path / "fetched", max_bytes=10**9)
    for number in (0, 20, 39):
        assert same(cache[number], local[number])
    cache.done()


def test_what_is_wrong_at_the_other_end_is_named(tmp_path: Path, local: CacheReader, url: str) -> None:
    import fsspec

    files = fsspec.filesystem("memory")
    cache = RemoteCache(url, folder=tmp_path / "fetched", max_bytes=10**9)
    path = f"/{tmp_path.name}/shard-00000.safetensors"
    files.pipe_file(path, files.cat_file(path)[:-1] + b"x")
    with pytest.raises(ValueError, match=r"shard-00000.*expected a shard of \d+ bytes \(sha256 \w+\), found none.*of sha256"):
        cache[0]
    files.rm_file(path)
    with pytest.raises(ValueError, match=r"shard-00000.*found none that could be read.*run the same command again"):
        cache[0]
    assert not cache._path(0).exists() and not list((tmp_path / "fetched").glob("*/.*"))
    with pytest.raises(ValueError, match=r"memory://nowhere/manifest.json: expected a finished cache"):
        RemoteCache("memory://nowhere", folder=tmp_path / "fetched", max_bytes=10**9)
    with pytest.raises(ValueError, match=r"fetch.max_bytes: expected room for .* the largest shard"):
        RemoteCache(url, folder=tmp_path / "fetched", max_bytes=largest(local) - 1)
    with pytest.raises(ValueError, match=r"fetch.max_bytes: expected at least .* shuffle_shards"):
        RemoteCache(url, folder=tmp_path / "fetched", max_bytes=largest(local)).prepare(largest(local) + 1)
    with pytest.raises(ValueError, match="Protocol not known: nosuch"):
        RemoteCache("nosuch://bucket/cache", folder=tmp_path / "fetched", max_bytes=10**9)


@pytest.mark.parametrize(("protocol", "package"), [("s3", "s3fs"), ("gs", "gcsfs")])
def test_a_protocol_whose_package_is_missing_names_it(tmp_path: Path, protocol: str, package: str) -> None:
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    with pytest.raises(ValueError, match=package):
        RemoteCache(f"{protocol}://bucket/cache", folder=tmp_path, max_bytes=1)


def test_a_name_cannot_leave_the_folder(tmp_path: Path, local: CacheReader, url: str) -> None:
    import json

    import fsspec

    from mtp_train.runtime import seal

    files, path = fsspec.filesystem("memory"), f"/{tmp_path.name}/manifest.json"
    manifest = json.loads(files.cat_file(path))
    manifest["shards"][0]["name"] = "../../shard-00000.safetensors"
    files.pipe_file(path, json.dumps({**manifest, "seal": seal(manifest)}).encode())
    with pytest.raises(ValueError, match="shard names"):
        RemoteCache(url, folder=tmp_path / "fetched", max_bytes=10**9)


def test_what_is_needed_now_waits_for_what_arrives_ahead(
    tmp_path: Path, local: CacheReader, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, limit = tmp_path / "fetched", 3 * largest(local)
    cache = RemoteCache(url, folder=folder, max_bytes=limit)
    gate = Gate(cache, monkeypatch)
    cache.expect([5, 6, 7])
    gate.wait_for(3)
    gate.open(after_s=0.3)
    assert same(cache[at(local, 0)], local[at(local, 0)])
    cache.done()
    assert len(gate.begun) == 4 and gate.begun[-1] == "shard-00000"
    assert held_bytes(folder) <= limit and not marks(folder)


def test_two_caches_of_one_url_fetch_a_shard_once(tmp_path: Path, local: CacheReader, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = (RemoteCache(url, folder=tmp_path / "fetched", max_bytes=3 * largest(local)) for _ in range(2))
    gate = Gate(one, monkeypatch)
    one.expect([5])
    gate.wait_for(1)
    gate.open(after_s=0.3)
    assert same(two[at(local, 5)], local[at(local, 5)])
    one.done()
    assert gate.begun == ["shard-00005"] and not marks(tmp_path / "fetched")


def test_where_making_room_fails_nothing_keeps_the_room(
    tmp_path: Path, local: CacheReader, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = RemoteCache(url, folder=tmp_path / "fetched", max_bytes=2 * largest(local))
    assert all(same(cache[at(local, shard)], local[at(local, shard)]) for shard in (0, 1))
    plain = Path.unlink

    def refuse(self: Path, missing_ok: bool = False) -> None:
        if self.suffix == ".safetensors":
            raise PermissionError(13, "no", str(self))
        plain(self, missing_ok=missing_ok)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", refuse)
        with pytest.raises(PermissionError):
            cache[at(local, 5)]
        cache.expect([5, 6])
        cache.done()
    assert not marks(tmp_path / "fetched")
    other = RemoteCache(url, folder=tmp_path / "fetched", max_bytes=2 * largest(local))
    other.expect([2, 3])
    other.done()
    assert all(other._path(shard).exists() for shard in (2, 3))


def test_after_the_end_a_shard_that_was_queued_is_had_all_the_same(
    tmp_path: Path, local: CacheReader, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = RemoteCache(url, folder=tmp_path / "fetched", max_bytes=10**9)
    gate = Gate(cache, monkeypatch)
    cache.expect([0, 1, 2, 3, 4, 5])
    gate.wait_for(4)
    gate.open(after_s=0.3)
    cache.done()
    assert not cache._path(5).exists() and same(cache[at(local, 5)], local[at(local, 5)])


def test_a_fetch_that_does_not_end_is_not_waited_for_for_ever(
    tmp_path: Path, local: CacheReader, url: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(folder_module, "_PATIENCE_S", 0.2)
    one, two = (RemoteCache(url, folder=tmp_path / "fetched", max_bytes=2 * largest(local)) for _ in range(2))
    gate = Gate(one, monkeypatch)
    one.expect([5, 6])
    gate.wait_for(2)
    for shard in (0, 5):  # no room, and the shard itself
        assert same(two[at(local, shard)], local[at(local, shard)])
    assert capfd.readouterr().err.count("is fetched beyond fetch.max_bytes") == 2
    gate.open()
    one.done()
    assert not marks(tmp_path / "fetched")
    assert same(two[at(local, 7)], local[at(local, 7)]) and held_bytes(tmp_path / "fetched") <= 2 * largest(local)


def test_on_a_full_disk_who_waits_for_room_goes_on_waiting(tmp_path: Path) -> None:
    """There is no room for the words of the mark either, which others then count as of nobody's bytes."""
    path = tmp_path / ".cache.shard-00000.mark"
    mark, limit = folder_module._Mark(path, 1000), resource.getrlimit(resource.RLIMIT_FSIZE)
    told = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the system's words instead of the end of the process
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limit[1]))
    try:
        mark.set(has_begun=False)
        with pytest.raises(OSError, match="File too large"):
            mark.set(has_begun=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, told)
    assert mark.is_set and folder_module._living(path) == (0, False)
    mark.set(has_begun=True)
    assert folder_module._living(path) == (1000, True)
    mark.close()
    assert not path.exists()


def test_a_folder_without_locks_serves_all_the_same(tmp_path: Path, local: CacheReader, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    folder, limit = tmp_path / "fetched", 3 * largest(local)
    cache = RemoteCache(url, folder=folder, max_bytes=limit)
    cache.expect([0, 1, 2])
    assert all(same(cache[number], local[number]) for number in range(0, len(local), 3))
    cache.done()
    assert held_bytes(folder) <= limit and not marks(folder)


def test_processes_share_one_folder(tmp_path: Path, local: CacheReader, url: str) -> None:
    """Each makes room for its own shards, waits where there is none, and takes away what the others map."""
    folder, limit = tmp_path / "fetched", 2 * largest(local)

    def work(child: int) -> bool:
        cache = RemoteCache(url, folder=folder, max_bytes=limit)
        cache.expect([child, child + 1])
        return all(same(cache[number], local[number]) for number in [((17 + 6 * child) * step + child) % len(local) for step in range(60)])

    assert most_held(in_processes(3, work), folder) <= limit and not marks(folder)


def test_processes_that_expect_the_same_shards_fetch_each_once(tmp_path: Path, local: CacheReader, url: str) -> None:
    """As the processes of one training do; and then each of them one that it needs alone."""
    folder, limit, fetched = tmp_path / "fetched", 3 * largest(local), tmp_path / "fetched.txt"

    def work(child: int) -> bool:
        cache = RemoteCache(url, folder=folder, max_bytes=limit)
        plain = type(cache._files).get_file

        def slow(files: Any, source: str, to: str) -> None:
            plain(files, source, to)
            with open(fetched, "a") as lines:
                lines.write(f"{Path(source).stem}\n")
            time.sleep(0.3)

        type(cache._files).get_file = slow
        cache.expect([0, 1, 2])
        good = all(same(cache[at(local, shard)], local[at(local, shard)]) for shard in (0, 1, 2))
        (tmp_path / f"{child}.read").touch()
        while len(list(tmp_path.glob("*.read"))) < 3:
            time.sleep(0.01)
        return good and same(cache[at(local, 3 + child)], local[at(local, 3 + child)])

    assert most_held(in_processes(3, work), folder) <= limit
    assert sorted(fetched.read_text().split()) == [f"shard-0000{shard}" for shard in range(6)]


def test_the_fetch_of_a_killed_process_is_taken_over(tmp_path: Path, local: CacheReader, url: str) -> None:
    """Another that needs the shard waits while it is fetched, and fetches it when that process has gone."""
    folder, limit, midway = tmp_path / "fetched", largest(local), tmp_path / "midway"

    def work(child: int) -> bool:
        cache = RemoteCache(url, folder=folder, max_bytes=limit)

        def stuck(files: Any, source: str, to: str) -> None:
            Path(to).write_bytes(bytes(limit // 2))
            midway.touch()
            time.sleep(600)

        type(cache._files).get_file = stuck
        return same(cache[at(local, 5)], local[at(local, 5)])

    (child,) = in_processes(1, work)
    try:
        while not midway.exists():
            time.sleep(0.01)
        cache, read = RemoteCache(url, folder=folder, max_bytes=limit), []
        reader = threading.Thread(target=lambda: read.append(same(cache[at(local, 5)], local[at(local, 5)])))
        reader.start()
        reader.join(timeout=0.5)
        assert reader.is_alive() and len(list(folder.glob("*/.*.tmp"))) == len(marks(folder)) == 1
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    reader.join(timeout=60)
    assert read == [True] and held_bytes(folder) <= limit
    assert not marks(folder) and not list(folder.glob("*/.*.tmp"))


@pytest.mark.skipif(importlib.util.find_spec("aiohttp") is None, reason="needs aiohttp")
def test_over_http(tmp_path: Path, local: CacheReader) -> None:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *words: Any) -> None:
            super().__init__(*words, directory=str(local.path))

        def log_message(self, *words: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        cache = RemoteCache(f"http://127.0.0.1:{server.server_port}", folder=tmp_path / "fetched", max_bytes=2 * largest(local))
        assert all(same(cache[number], local[number]) for number in range(0, len(local), 3))
        cache.done()
        server.shutdown()
