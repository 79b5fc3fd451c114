"""A trained block goes back into a copy of its target's checkpoint: exact, byte-equal elsewhere, whole or not at all."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mtp_train.batch.packing import pack
from mtp_train.checkpoint import save_head
from mtp_train.exporter import stitch
from mtp_train.exporter.base import MANIFEST
from mtp_train.exporter.stitch import StitchExporter
from mtp_train.head.mtp import Mtp
from mtp_train.published.read import open_published
from mtp_train.records import Sample
from mtp_train.runtime import sha256_file
from mtp_train.target.files import tensor_files
from mtp_train.target.spec import fingerprint
from mtp_train.target.weights import read_shared
from mtp_train.trainer.probe import write_probe

WithBlock = Callable[..., Path]
Tensors = dict[str, torch.Tensor]
NORMS = dict.fromkeys(("embed", "hidden", "input", "output", "feedback"), True)
# Their names of what is the block's own; the copies of embedding and lm_head are not.
BLOCKS = {"deepseek": "model.layers.{last}.", "qwen3_next": "mtp."}
COPIES = ("embed_tokens.weight", "shared_head.head.weight")


def samples() -> list[Sample]:
    draw = torch.Generator().manual_seed(0)
    return [
        Sample(
            sample_id=str(length),
            token_ids_T=torch.randint(0, 320, (length,), generator=draw),
            loss_mask_T=torch.ones(length, dtype=torch.bool),
            hidden_TD=torch.randn(length, 64, generator=draw),
        )
        for length in (20, 9)
    ]


def adopted(target: Path, *, layout: str, num_blocks: int = 1) -> Mtp:
    """A head with the weights of the target's block, in the other column order."""
    head = Mtp(
        target_path=target,
        shared=read_shared(target),
        norms=NORMS,
        column_order="hidden_embed",
        zero_first_embedding=layout == "deepseek",
        init="random",
        seed=0,
        trust_remote_code=False,
        num_blocks=num_blocks,
    )
    found = open_published(target, target_path=target)
    head.load_state_dict(found.tensors(head.state_dict(), column_order="hidden_embed", shared=head.shared))
    return head


def trained_checkpoint(folder: Path, target: Path, *, layout: str, num_blocks: int = 1) -> dict[str, torch.Tensor]:
    """One step of training from the target's block, saved with its probe; returns the weights."""
    head = adopted(target, layout=layout, num_blocks=num_blocks)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)
    total = sum(step.hidden_TD.sin().sum() for step in itertools.islice(head.unroll(pack(samples())), 2))
    assert isinstance(total, torch.Tensor)
    total.backward()
    optimizer.step()
    identity = {"target_name": "tiny", "target_fingerprint": fingerprint(target)}
    save_head(folder, dict(head.state_dict()), config=head.draft_config(), target=identity, made_by={})
    write_probe(folder, head, samples())
    return dict(head.state_dict())


def exporter(**changes: Any) -> StitchExporter:
    settings: dict[str, Any] = {"link": True, "trust_remote_code": False, "overwrite": False, **changes}
    return StitchExporter(**settings)


def tensors_of(folder: Path) -> Tensors:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(
    ("layout", "architecture", "num_blocks"),
    [("deepseek", "tiny_llama", 1), ("deepseek", "tiny_llama", 2), ("deepseek", "tiny_deepseek", 1), ("qwen3_next", "tiny_llama", 1)],
)
def test_read_train_stitch_read(
    with_block: WithBlock, request: pytest.FixtureRequest, tmp_path: Path, layout: str, architecture: str, num_blocks: int
) -> None:
    target = with_block(request.getfixturevalue(architecture), layout=layout, num_blocks=num_blocks)
    before = {file.name: sha256_file(file) for file in target.iterdir() if file.is_file() and not file.name.startswith(".")}
    trained = trained_checkpoint(tmp_path / "head", target, layout=layout, num_blocks=num_blocks)
    result = exporter().export(tmp_path / "head", target, tmp_path / "out")

    again = adopted(result.path, layout=layout, num_blocks=num_blocks).state_dict()
    assert again.keys() == trained.keys() and all(torch.equal(again[name], tensor) for name, tensor in trained.items())
    old, new = tensors_of(target), tensors_of(result.path)
    last = json.loads((target / "config.json").read_text())["num_hidden_layers"]
    prefixes = tuple(BLOCKS[layout].format(last=last + number) for number in range(num_blocks))
    changed = {name for name, tensor in old.items() if not torch.equal(new[name], tensor)}
    assert old.keys() == new.keys()
    assert changed == {name for name in old if name.startswith(prefixes) and not name.endswith(COPIES)}
    held = {file.name for name, file in tensor_files(target).items() if name in changed}
    assert len(held) == 2, "one shard holds tensors of both"
    for name, digest in before.items():
        assert sha256_file(target / name) == digest, "the target itself is left as it was"
        assert (sha256_file(result.path / name) == digest) == (name not in held)
        assert os.path.samefile(target / name, result.path / name) == (name not in held)
    assert set(result.files) == set(before) and fingerprint(result.path) != fingerprint(target)
    assert result.proof["largest_difference"]["logits"] < 1e-4 and f'"num_speculative_tokens": {num_blocks}' in result.serve
    assert exporter().export(tmp_path / "head", target, tmp_path / "out").reused


def test_half_precision_is_rounded_and_nothing_is_linked_where_copies_are_asked_for(
    with_block: WithBlock, tiny_llama: Path, tmp_path: Path
) -> None:
    target = with_block(tiny_llama, layout="deepseek", dtype="bfloat16")
    trained = trained_checkpoint(tmp_path / "head", target, layout="deepseek")
    result = exporter(link=False).export(tmp_path / "head", target, tmp_path / "out")
    again = adopted(result.path, layout="deepseek").state_dict()
    assert all(torch.equal(again[name], tensor.bfloat16().float()) for name, tensor in trained.items())
    assert {tensor.dtype for tensor in tensors_of(result.path).values()} == {torch.bfloat16}
    assert not any(os.path.samefile(target / name, result.path / name) for name in result.files)


@pytest.mark.parametrize("where", ["replace_tensors", "check_rest", "_prove"])
def test_a_stop_half_way_leaves_nothing_that_looks_whole(
    with_block: WithBlock, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    target = with_block(tiny_llama, layout="deepseek")
    trained_checkpoint(tmp_path / "head", target, layout="deepseek")
    before = {file.name: sha256_file(file) for file in target.iterdir() if not file.name.startswith(".")}

    def die(*_: object, **__: object) -> None:
        os._exit(9)

    with monkeypatch.context() as patched:
        patched.setattr(stitch, where, die)
        pid = os.fork()
        if pid == 0:
            exporter().export(tmp_path / "head", target, tmp_path / "out")
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    assert not (tmp_path / "out").exists() and not (tmp_path / ".out.partial" / MANIFEST).exists()
    assert {file.name: sha256_file(file) for file in target.iterdir() if not file.name.startswith(".")} == before
    assert not exporter().export(tmp_path / "head", target, tmp_path / "out").reused
    assert not (tmp_path / ".out.partial").exists()


def test_bytes_that_changed_elsewhere_are_noticed(
    with_block: WithBlock, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = with_block(tiny_llama, layout="deepseek")
    trained_checkpoint(tmp_path / "head", target, layout="deepseek")
    right = stitch.replace_tensors

    def wrong(file: Path, tensors: Tensors) -> None:
        right(file, tensors)
        name = next(name for name in load_file(file) if name not in tensors)
        start, _ = stitch._places(file, {name: torch.empty(0)})[name]
        with open(file, "r+b") as stream:
            stream.seek(start)
            stream.write(b"\x01")

    monkeypatch.setattr(stitch, "replace_tensors", wrong)
    with pytest.raises(ValueError, match=r"expected .* to keep all that is not the head's, found other bytes"):
        exporter().export(tmp_path / "head", target, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_cannot_go_back_is_refused(
    with_block: WithBlock, tiny_llama: Path, checkpoint_of: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="found none of these"):
        exporter().export(checkpoint_of(tiny_llama, word="mtp"), tiny_llama, tmp_path / "out")
    target = with_block(tiny_llama, layout="deepseek")
    with pytest.raises(ValueError, match="expected a folder outside the target's"):
        exporter().export(tmp_path / "nothing", target, target / "stitched")
    with pytest.raises(ValueError, match=r"head=eagle can begin as, found deepseek_mtp"):
        exporter().export(checkpoint_of(target, word="eagle", name="eagle"), target, tmp_path / "out")
    bare = checkpoint_of(target, word="mtp", name="bare", norms={**NORMS, "embed": False})
    with pytest.raises(ValueError, match=r"set head\.norms="):
        exporter().export(bare, target, tmp_path / "out")
