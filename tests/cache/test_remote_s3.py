"""The same cache behind s3://, through the real s3fs, from moto's imitation of S3 on this machine.

Neither is among the locked packages, for boto3 and some thirty others come with them:
``pip install s3fs==2026.9.0 'moto[server]'`` (fsspec's own version) into an environment of one's own runs these.
"""

from __future__ import annotations

import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from mtp_train.cache import remote as module
from mtp_train.cache.reader import CacheReader
from mtp_train.cache.remote import RemoteCache

for _package in ("s3fs", "moto"):
    pytest.importorskip(_package, reason="needs s3fs and moto[server], which are not among the locked packages")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")

LENGTHS = tuple(3 + (7 * number) % 10 for number in range(40))


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    from moto.server import ThreadedMotoServer

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running = ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    running.start()
    yield f"http://127.0.0.1:{port}"
    running.stop()


@pytest.fixture
def s3(server: str, tmp_path: Path, identity: Any, make_source: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """s3fs as the environment sets it up, with the cache of ``tmp_path`` in a bucket."""
    import s3fs

    monkeypatch.setattr(module, "_PAUSE_S", 0.0)
    for name, value in (("ENDPOINT_URL", server), ("ACCESS_KEY_ID", "a"), ("SECRET_ACCESS_KEY", "b"), ("DEFAULT_REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    make_source(identity, LENGTHS).write(tmp_path / "cache")
    s3fs.S3FileSystem.clear_instance_cache()
    files = s3fs.S3FileSystem()
    files.mkdir("bucket")
    files.put(f"{tmp_path}/cache/", "bucket/cache/", recursive=True)
    yield files
    s3fs.S3FileSystem.clear_instance_cache()
    urllib.request.urlopen(urllib.request.Request(f"{server}/moto-api/reset", method="POST")).close()


def opened(folder: Path, **settings: Any) -> RemoteCache:
    return RemoteCache("s3://bucket/cache", folder=folder / "fetched", max_bytes=settings.get("max_bytes", 10**9))


def read(cache: RemoteCache, local: CacheReader) -> None:
    """All samples, in an order that goes through the shards again and again."""
    assert (cache.sample_ids, cache.checksums()) == (local.sample_ids, local.checksums())
    for number in [(17 * step) % len(local) for step in range(2 * len(local))]:
        mine, theirs = cache[number], local[number]
        assert mine.sample_id == theirs.sample_id and mine.hidden_TD.equal(theirs.hidden_TD) and mine.token_ids_T.equal(theirs.token_ids_T)
    cache.done()


def test_every_sample_is_that_of_the_folder_and_the_limit_holds(s3: Any, tmp_path: Path) -> None:
    local = CacheReader(tmp_path / "cache", verify="first_read")
    limit = 3 * max(local.shard_bytes())
    cache = opened(tmp_path, max_bytes=limit)
    cache.expect(range(len(local.shard_bytes())))
    read(cache, local)
    assert 0 < sum(path.stat().st_size for path in (tmp_path / "fetched").glob("*/*shard-*")) <= limit


def test_what_is_missing_is_named_with_what_s3_said(s3: Any, tmp_path: Path) -> None:
    s3.rm("bucket/cache/shard-00001.safetensors")
    cache = opened(tmp_path)
    with pytest.raises(ValueError, match=r"s3://bucket/cache/shard-00001\.safetensors: expected a shard of .*key does not exist"):
        cache[cache.shards.index(1)]
    cache.done()
    with pytest.raises(ValueError, match=r"s3://bucket/other/manifest\.json: expected a finished cache, found none"):
        RemoteCache("s3://bucket/other", folder=tmp_path / "fetched", max_bytes=10**9)
    with pytest.raises(ValueError, match=r"s3://no-bucket/cache/manifest\.json: .*bucket does not exist"):
        RemoteCache("s3://no-bucket/cache", folder=tmp_path / "fetched", max_bytes=10**9)


def test_credentials_that_are_wrong_or_not_there_are_said(s3: Any, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import s3fs

    def ask(num_free: int) -> None:
        words = urllib.request.Request(f"{server}/moto-api/reset-auth", data=str(num_free).encode(), headers={"Content-Type": "text/plain"})
        urllib.request.urlopen(words).close()

    ask(0)
    try:
        s3fs.S3FileSystem.clear_instance_cache()
        with pytest.raises(ValueError, match=r"manifest\.json: .*Access Key Id you provided does not exist"):
            opened(tmp_path)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        s3fs.S3FileSystem.clear_instance_cache()
        with pytest.raises(ValueError, match=r"manifest\.json: .*Unable to locate credentials"):
            opened(tmp_path)
    finally:
        ask(10**9)


class CutConnections:
    """Passes what comes through a port on to the server, and cuts the first ``num_cuts`` answers that are longer than ``most_bytes``."""

    def __init__(self, server: str, *, most_bytes: int, num_cuts: int) -> None:
        self._to, self._most_bytes, self.left = int(server.rpartition(":")[2]), most_bytes, num_cuts
        self._listens = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listens.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            client, _ = self._listens.accept()
            upstream = socket.create_connection(("127.0.0.1", self._to))
            threading.Thread(target=self._pass, args=(client, upstream, 1 << 40), daemon=True).start()
            threading.Thread(target=self._pass, args=(upstream, client, self._most_bytes), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, most_bytes: int) -> None:
        sent = 0
        with suppress(OSError):
            while data := source.recv(1024):
                sent += len(data)
                if sent > most_bytes and self.left > 0:
                    self.left -= 1
                    break
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def test_a_connection_that_dies_in_the_middle_is_tried_again(s3: Any, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import s3fs

    local = CacheReader(tmp_path / "cache", verify="first_read")
    cuts = CutConnections(server, most_bytes=min(local.shard_bytes()) // 2, num_cuts=3)
    monkeypatch.setenv("AWS_ENDPOINT_URL", cuts.url)
    s3fs.S3FileSystem.clear_instance_cache()
    read(opened(tmp_path), local)
    assert cuts.left == 0
