"""Heads in published layouts draft as a forward of their own says; nothing of their files is taken for another or left out."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from mtp_train.batch.packing import pack
from mtp_train.checkpoint import save_head
from mtp_train.head.base import Head
from mtp_train.head.eagle import Eagle
from mtp_train.head.eagle3 import Eagle3
from mtp_train.head.mtp import Mtp
from mtp_train.published.layout import ON
from mtp_train.published.read import open_published, sha256_of
from mtp_train.records import Sample
from mtp_train.target.draft_vocabulary import to_mask, to_offsets
from mtp_train.target.spec import fingerprint
from mtp_train.target.weights import SharedWeights, read_shared

D, V, DEPTHS, LENGTH = 64, 320, 3, 9
WithBlock = Callable[..., Path]
Tensors = dict[str, torch.Tensor]


def sample(*, num_taps: int = 0) -> Sample:
    draw = torch.Generator().manual_seed(7)
    return Sample(
        sample_id="s",
        token_ids_T=torch.randint(0, V, (LENGTH,), generator=draw),
        loss_mask_T=torch.ones(LENGTH, dtype=torch.bool),
        hidden_TD=torch.randn(LENGTH, D, generator=draw),
        taps_TLD=torch.randn(LENGTH, num_taps, D, generator=draw) if num_taps else None,
    )


def eager_config(target: Path) -> Any:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(target)
    config._attn_implementation = config._experts_implementation = "eager"
    return config


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return functional.rms_norm(x, x.shape[-1:], weight, eps)


class TheirLayer:
    """A decoder layer of transformers over a sequence from its first position on, causal, without a cache."""

    def __init__(self, target: Path, tensors: Mapping[str, torch.Tensor], *, input_norm: bool = True) -> None:
        from transformers import AutoModelForCausalLM

        self.config = eager_config(target)
        model = AutoModelForCausalLM.from_config(self.config, attn_implementation="eager").model
        self.layer, self.rotary = model.layers[-1], model.rotary_emb
        if not input_norm:
            self.layer.input_layernorm = torch.nn.Identity()
        self.layer.load_state_dict(self.stacked(tensors))

    def stacked(self, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        """Experts as transformers holds them: all gate and up projections in one tensor, all down projections in another."""
        plain = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
        count = sum(name.endswith("gate_proj.weight") for name in tensors) - sum(name.endswith("gate_proj.weight") for name in plain)
        if count:
            of = [{part: tensors[f"mlp.experts.{n}.{part}_proj.weight"] for part in ("gate", "up", "down")} for n in range(count)]
            plain["mlp.experts.gate_up_proj"] = torch.stack([torch.cat([expert["gate"], expert["up"]]) for expert in of])
            plain["mlp.experts.down_proj"] = torch.stack([expert["down"] for expert in of])
        return plain

    def inputs(self, x_1TD: torch.Tensor) -> dict[str, Any]:
        count = x_1TD.shape[1]
        position_1T = torch.arange(count)[None]
        mask = torch.full((count, count), torch.finfo(torch.float32).min).triu(1)[None, None]
        return {"position_embeddings": self.rotary(x_1TD, position_ids=position_1T), "attention_mask": mask, "position_ids": position_1T}

    def __call__(self, x_TD: torch.Tensor) -> torch.Tensor:
        out = self.layer(x_TD[None], **self.inputs(x_TD[None]))
        return (out[0] if isinstance(out, tuple) else out)[0]


def their_drafts(
    text: Sample, states_TD: torch.Tensor, *, read: Callable[[torch.Tensor, torch.Tensor, int], Any], through: Callable[[list[Any]], Any]
) -> list[torch.Tensor]:
    """From every base, what a head speaks at each depth: ``read`` makes a row of (state, token, position), ``through`` runs rows from a
    sequence's first on and gives what the last one speaks and feeds back. One (bases, D) tensor per depth."""
    drafts: list[list[torch.Tensor]] = [[] for _ in range(DEPTHS)]
    for base in range(LENGTH - DEPTHS):
        rows = [read(states_TD[row], text.token_ids_T[row + 1], row) for row in range(base + 1)]
        for depth in range(DEPTHS):
            spoken, state = through(rows)
            drafts[depth].append(spoken)
            if depth + 1 < DEPTHS:
                rows.append(read(state, text.token_ids_T[base + 2 + depth], base + 1 + depth))
    return [torch.stack(rows) for rows in drafts]


def pair_drafts(
    target: Path, text: Sample, shared: SharedWeights, found: Tensors, *, layer: TheirLayer, names: tuple[str, ...], zero: bool
):
    """EAGLE-1's and the MTP blocks' graph: ``names`` are those of the norms on embedding and state, of the projection, and of the
    output norm; None: no such norm. The embedding comes first."""
    eps = shared.rms_norm_eps
    embed_norm, hidden_norm, projection, output_norm = (None if name is None else found[name] for name in names)

    def read(state: torch.Tensor, token: torch.Tensor, position: int) -> torch.Tensor:
        embed = shared.embedding_VD[token] * (0.0 if zero and position == 0 else 1.0)
        embed = embed if embed_norm is None else rms_norm(embed, embed_norm, eps)
        state = state if hidden_norm is None else rms_norm(state, hidden_norm, eps)
        return functional.linear(torch.cat([embed, state]), projection, found.get("fc.bias"))

    def through(rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        last = layer(torch.stack(rows))[-1]
        spoken = last if output_norm is None else rms_norm(last, output_norm, eps)
        return spoken, spoken

    with torch.no_grad():
        return their_drafts(text, text.hidden_TD, read=read, through=through)


def our_drafts(head: Head, text: Sample) -> list[torch.Tensor]:
    with torch.no_grad():
        return [step.hidden_TD[: LENGTH - DEPTHS] for step in itertools.islice(head.unroll(pack([text])), DEPTHS)]


def pair_head(kind: type[Mtp] | type[Eagle], target: Path, **changes: Any) -> Mtp | Eagle:
    on = kind is Mtp
    settings: dict[str, Any] = {
        "norms": dict.fromkeys(ON, on),
        "column_order": "hidden_embed" if on else "embed_hidden",
        "zero_first_embedding": on,
        "init": "random",
        "seed": 0,
        **changes,
    }
    return kind(target_path=target, shared=read_shared(target), trust_remote_code=False, **settings)


def adopt(head: Head, path: Path, target: Path) -> Head:
    """As train does with ``start_from``."""
    settings = {"num_blocks": 1, "projection_bias": False, **head.settings()}
    found = open_published(path, target_path=target)
    found.check(head=head.word, settings=settings)
    head.load_state_dict(found.tensors(head.state_dict(), column_order=settings.get("column_order"), shared=head.shared))
    return head


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert max(float(rows.abs().max()) for rows in theirs) > 0.5, "drafts of nothing prove nothing"
    for mine, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


def read_all(folder: Path) -> Tensors:
    return {name: tensor.float() for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def inside(tensors: Tensors, prefix: str) -> Tensors:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


@pytest.mark.parametrize("architecture", ["tiny_llama", "tiny_deepseek"])
@pytest.mark.parametrize("column_order", ["hidden_embed", "embed_hidden"])
def test_the_block_of_a_deepseek_like_checkpoint(
    with_block: WithBlock, request: pytest.FixtureRequest, architecture: str, column_order: str
) -> None:
    """The projection's columns come in the order that our head has, whichever it is."""
    plain: Path = request.getfixturevalue(architecture)
    target = with_block(plain, layout="deepseek")
    head = adopt(pair_head(Mtp, target, column_order=column_order), target, target)
    found, text = read_all(target), sample()
    last = json.loads((target / "config.json").read_text())["num_hidden_layers"]
    block = inside(found, f"model.layers.{last}.")
    outside = ("enorm", "hnorm", "eh_proj", "shared_head", "embed_tokens")
    layer = TheirLayer(plain, {name: tensor for name, tensor in block.items() if not name.startswith(outside)})
    names = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight")
    same(our_drafts(head, text), pair_drafts(target, text, head.shared, block, layer=layer, names=names, zero=True))


def test_the_block_of_a_qwen3_next_like_checkpoint(with_block: WithBlock, tiny_llama: Path) -> None:
    target = with_block(tiny_llama, layout="qwen3_next")
    with pytest.raises(ValueError, match=r"head.zero_first_embedding=true; set head\.zero_first_embedding=false"):
        adopt(pair_head(Mtp, target), target, target)
    head, text, found = adopt(pair_head(Mtp, target, zero_first_embedding=False), target, target), sample(), read_all(target)
    names = tuple(f"mtp.{name}.weight" for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"))
    layer = TheirLayer(tiny_llama, inside(found, "mtp.layers.0."))
    same(our_drafts(head, text), pair_drafts(target, text, head.shared, found, layer=layer, names=names, zero=False))


def write_eagle1(path: Path, target: Path, *, bias: bool, pickled: bool = False) -> Tensors:
    """EAGLE-1's layout: fc with or without a bias, one layer without its input norm, the target's embedding again (in half precision)."""
    own, draw = read_all(target), torch.Generator().manual_seed(1)
    tensors = {
        f"layers.0.{name}": torch.randn(tensor.shape, generator=draw) * 0.1 + (tensor.ndim == 1)
        for name, tensor in inside(own, "model.layers.1.").items()
        if name != "input_layernorm.weight"
    }
    tensors["fc.weight"] = torch.randn(D, 2 * D, generator=draw) * 0.1
    if bias:
        tensors["fc.bias"] = torch.randn(D, generator=draw)
    path.mkdir()
    config = json.loads((target / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1, "bias": bias}))
    written = {**tensors, "embed_tokens.weight": own["model.embed_tokens.weight"].half()}
    if pickled:
        torch.save(written, path / "pytorch_model.bin")
    else:
        save_file(written, path / "model.safetensors")
    return tensors


@pytest.mark.parametrize(("bias", "pickled"), [(False, False), (True, True)])
def test_a_head_in_eagle_1_s_layout(tiny_llama: Path, tmp_path: Path, bias: bool, pickled: bool) -> None:
    found = write_eagle1(tmp_path / "eagle", tiny_llama, bias=bias, pickled=pickled)
    if bias:
        with pytest.raises(ValueError, match=r"set head\.projection_bias=true"):
            adopt(pair_head(Eagle, tiny_llama), tmp_path / "eagle", tiny_llama)
    head, text = adopt(pair_head(Eagle, tiny_llama, projection_bias=bias), tmp_path / "eagle", tiny_llama), sample()
    layer = TheirLayer(tiny_llama, inside(found, "layers.0."), input_norm=False)
    drafts = pair_drafts(tiny_llama, text, head.shared, found, layer=layer, names=(None, None, "fc.weight", None), zero=False)
    same(our_drafts(head, text), drafts)


def write_eagle3(path: Path, target: Path, *, layer: str, draft_ids: torch.Tensor | None, taps: list[int] | None, fc_norm: bool) -> Tensors:
    """EAGLE-3's layout: a layer twice as wide at its beginning, fc over three taps, an lm_head of its own, d2t and t2d."""
    own, draw = read_all(target), torch.Generator().manual_seed(2)
    shapes = {f"{layer}.{name}": tuple(tensor.shape) for name, tensor in inside(own, "model.layers.1.").items()}
    for name in ("q", "k", "v"):
        shapes[f"{layer}.self_attn.{name}_proj.weight"] = (shapes[f"{layer}.self_attn.{name}_proj.weight"][0], 2 * D)
    num_drafted = V if draft_ids is None else len(draft_ids)
    shapes |= {f"{layer}.hidden_norm.weight": (D,), "norm.weight": (D,), "fc.weight": (D, 3 * D), "lm_head.weight": (num_drafted, D)}
    shapes |= {f"fc_norm.{tap}.weight": (D,) for tap in range(3)} if fc_norm else {}
    tensors = {name: torch.randn(shape, generator=draw) * 0.1 + (len(shape) == 1) for name, shape in shapes.items()}
    extra = {} if draft_ids is None else {"d2t": to_offsets(draft_ids), "t2d": to_mask(draft_ids, vocab_size=V)}
    path.mkdir()
    config = json.loads((target / "config.json").read_text())
    config |= {"num_hidden_layers": 1, "norm_output": fc_norm} | ({} if taps is None else {"eagle_aux_hidden_state_layer_ids": taps})
    (path / "config.json").write_text(json.dumps(config))
    save_file({**tensors, **extra}, path / "model.safetensors")
    return tensors


@pytest.mark.parametrize("fc_norm", [False, True], ids=["eagle3", "eagle3.1"])
def test_a_head_in_eagle_3_s_layout(deep_llama: Path, tmp_path: Path, fc_norm: bool) -> None:
    """The authors' names and taps, without a word in config.json; and vLLM's, which counts layers from 1."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    ids = torch.arange(3, V, 5)
    prefix, engines, taps = ("layers.0", [1, 3, 7], [0, 2, 6]) if fc_norm else ("midlayer", None, [1, 3, 4])
    found = write_eagle3(tmp_path / "e3", deep_llama, layer=prefix, draft_ids=ids, taps=engines, fc_norm=fc_norm)

    def make(**changes: Any) -> Eagle3:
        settings: dict[str, Any] = {
            "target_layer_ids": taps,
            "draft_vocab_size": len(ids),
            "norms": {"taps": fc_norm, "feedback": fc_norm},
            "init": "random",
            "seed": 0,
            **changes,
        }
        return Eagle3(target_path=deep_llama, shared=read_shared(deep_llama), trust_remote_code=False, **settings)

    with pytest.raises(ValueError, match=r"set head.target_layer_ids=\[.*\] head\.draft_vocab_size=64"):
        adopt(make(target_layer_ids=[1, 2, 5], draft_vocab_size=60), tmp_path / "e3", deep_llama)
    head, text = adopt(make(), tmp_path / "e3", deep_llama), sample(num_taps=3)
    assert torch.equal(head.draft_ids_U, ids) and torch.equal(head.lm_head.weight, found["lm_head.weight"])

    layer, eps = inside(found, f"{prefix}."), head.shared.rms_norm_eps
    rotary = TheirLayer(deep_llama, inside(read_all(deep_llama), "model.layers.1.")).rotary
    taps_TLD = text.taps_TLD
    assert taps_TLD is not None
    if fc_norm:
        taps_TLD = torch.stack([rms_norm(taps_TLD[:, tap], found[f"fc_norm.{tap}.weight"], eps) for tap in range(3)], dim=1)
    states_TD = functional.linear(taps_TLD.flatten(1), found["fc.weight"])

    def through(rows: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
        embed, state = (torch.stack(column) for column in zip(*rows, strict=True))
        pair = torch.cat([rms_norm(embed, layer["input_layernorm.weight"], eps), rms_norm(state, layer["hidden_norm.weight"], eps)], -1)
        q, k, v = (
            functional.linear(pair, layer[f"self_attn.{n}_proj.weight"]).unflatten(-1, (-1, 16)).transpose(0, 1)[None] for n in "qkv"
        )
        q, k = apply_rotary_pos_emb(q, k, *rotary(pair[None], torch.arange(len(rows))[None]))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1).flatten(1)
        y = state + functional.linear(attended, layer["self_attn.o_proj.weight"])
        normed = rms_norm(y, layer["post_attention_layernorm.weight"], eps)
        gate, up = (functional.linear(normed, layer[f"mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        last = (y + functional.linear(functional.silu(gate) * up, layer["mlp.down_proj.weight"]))[-1]
        spoken = rms_norm(last, found["norm.weight"], eps)
        return spoken, spoken if fc_norm else last

    with torch.no_grad():
        theirs = their_drafts(text, states_TD, read=lambda state, token, _: (head.shared.embedding_VD[token], state), through=through)
    same(our_drafts(head, text), theirs)


def test_one_of_ours_goes_on_as_it_is(tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head = pair_head(Mtp, tiny_llama, seed=4, num_blocks=2)
    for other, stated in ((False, fingerprint(tiny_llama)), (True, "0" * 64)):
        identity = {"target_name": "elsewhere", "target_fingerprint": stated}
        save_head(tmp_path / "head", dict(head.state_dict()), config=head.draft_config(), target=identity, made_by={})
        open_published(tmp_path / "head", target_path=tiny_llama)
        assert ("was trained for elsewhere, not for this target" in capsys.readouterr().err) == other
    again = adopt(pair_head(Mtp, tiny_llama, num_blocks=2), tmp_path / "head", tiny_llama)
    assert sha256_of(dict(again.state_dict())) == sha256_of(dict(head.state_dict()))
    with pytest.raises(ValueError, match=r"head.num_blocks=1; set head\.num_blocks=2"):
        adopt(pair_head(Mtp, tiny_llama), tmp_path / "head", tiny_llama)


def test_several_blocks_are_found_and_asked_for(with_block: WithBlock, tiny_llama: Path) -> None:
    target = with_block(tiny_llama, layout="deepseek", num_blocks=2)
    with pytest.raises(ValueError, match=r"set head\.num_blocks=2"):
        adopt(pair_head(Mtp, target), target, target)
    head, found = adopt(pair_head(Mtp, target, num_blocks=2), target, target), read_all(target)
    assert torch.equal(head.state_dict()["later_blocks.0.hidden_norm.weight"], found["model.layers.3.hnorm.weight"])


def changed(folder: Path, change: Callable[[Tensors], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.update({"extra.weight": torch.zeros(2)}), "found extra.weight, which it does not have"),
        (lambda tensors: tensors.update({"layers.0.extra.weight": torch.zeros(2)}), r"layers\.0\.extra\.weight absent, found \(2,\)"),
        (lambda tensors: tensors.pop("layers.0.mlp.up_proj.weight"), r"layers\.0\.mlp\.up_proj\.weight \(128, 64\), found none"),
        (lambda tensors: tensors.update({"fc.weight": torch.zeros(64, 64)}), r"fc\.weight \(64, 128\), found \(64, 64\)"),
        (lambda tensors: tensors.update({"fc.weight": torch.zeros(64, 128, dtype=torch.int8)}), "found torch.int8, quantized"),
        (lambda tensors: tensors.update({"embed_tokens.weight": torch.zeros(10, 64)}), "of the target's shape"),
        (lambda tensors: tensors["fc.weight"][0].fill_(float("nan")), r"finite numbers in fc\.weight, found 128 of 8192"),
    ],
)
def test_what_is_no_such_head_is_refused_by_name(tiny_llama: Path, tmp_path: Path, change: Callable[[Tensors], Any], message: str) -> None:
    write_eagle1(tmp_path / "eagle", tiny_llama, bias=False)
    changed(tmp_path / "eagle", change)
    with pytest.raises(ValueError, match=message):
        adopt(pair_head(Eagle, tiny_llama), tmp_path / "eagle", tiny_llama)


def with_config(folder: Path, **entries: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **entries}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / "config.json").write_text("[1]"), "config.json: expected a JSON object, found list"),
        (
            lambda path: with_config(path, num_hidden_layers="1"),
            "config.json: num_hidden_layers: expected a whole number or null, found '1'",
        ),
        (lambda path: with_config(path, rope_parameters=None, rope_scaling="linear"), "config.json: rope_scaling: expected a mapping"),
        (lambda path: with_config(path, rope_parameters=None, rope_theta="1e4"), "config.json: rope_theta: expected a number"),
        (lambda path: os.truncate(path / "model.safetensors", 5000), "model.safetensors: expected a whole safetensors file"),
        (lambda path: os.truncate(path / "model.safetensors", 0), "model.safetensors: expected a whole safetensors file"),
        (lambda path: (path / "model.safetensors.index.json").write_text("[]"), "expected a JSON object with weight_map, found list"),
    ],
)
def test_a_damaged_folder_is_told_with_its_file(tiny_llama: Path, tmp_path: Path, damage: Callable[[Path], Any], message: str) -> None:
    write_eagle1(tmp_path / "eagle", tiny_llama, bias=False)
    damage(tmp_path / "eagle")
    with pytest.raises(ValueError, match=f"{tmp_path / 'eagle'}.*{message}"):
        open_published(tmp_path / "eagle", target_path=tiny_llama)


@pytest.mark.parametrize(
    ("change", "entries", "message"),
    [
        (lambda tensors: tensors.update(d2t=torch.tensor(3)), {}, r"expected d2t as whole numbers.*found torch.int64 of shape \(\)"),
        (lambda tensors: tensors.update(d2t=torch.zeros(0, dtype=torch.int64)), {}, r"expected d2t as whole numbers.*of shape \(0,\)"),
        (lambda tensors: tensors.update(d2t=tensors["d2t"].float() + 0.4), {}, "expected d2t as whole numbers.*found torch.float32"),
        (lambda tensors: tensors.update(d2t=tensors["d2t"] + 300), {}, "e3: d2t: expected offsets to different tokens"),
        (lambda tensors: tensors.update(t2d=~tensors["t2d"]), {}, "expected d2t and t2d to name the same tokens"),
        (lambda tensors: tensors.pop("d2t"), {}, "expected d2t beside t2d, found none"),
        (lambda tensors: None, {"eagle_aux_hidden_state_layer_ids": 3}, "eagle_aux_hidden_state_layer_ids: expected a list"),
        (lambda tensors: None, {"eagle_aux_hidden_state_layer_ids": [2, 4, 60]}, r"from 1 to 8, .*found \[2, 4, 60\]; .*another target"),
        (lambda tensors: None, {"eagle_config": [1]}, r"eagle_config: expected a mapping or null, found \[1\]"),
    ],
)
def test_a_draft_vocabulary_or_taps_that_cannot_be(
    deep_llama: Path, tmp_path: Path, change: Callable[[Tensors], Any], entries: dict[str, Any], message: str
) -> None:
    write_eagle3(tmp_path / "e3", deep_llama, layer="midlayer", draft_ids=torch.arange(3, V, 5), taps=None, fc_norm=False)
    changed(tmp_path / "e3", change)
    with_config(tmp_path / "e3", **entries)
    with pytest.raises(ValueError, match=message):
        open_published(tmp_path / "e3", target_path=deep_llama)._draft_ids(vocab_size=V)


def test_a_block_elsewhere_than_its_config_says_is_refused(with_block: WithBlock, tiny_llama: Path) -> None:
    target = with_block(tiny_llama, layout="deepseek")
    with_config(target, num_hidden_layers=1)
    with pytest.raises(ValueError, match=r"expected blocks behind the last of num_hidden_layers=1 .*found them at \[2\]"):
        open_published(target, target_path=tiny_llama)


def test_a_pickle_as_torch_once_wrote_it(tiny_llama: Path, tmp_path: Path) -> None:
    """Before version 1.6 no zip file; what is neither is told from it."""
    write_eagle1(tmp_path / "eagle", tiny_llama, bias=False, pickled=True)
    file = tmp_path / "eagle" / "pytorch_model.bin"
    tensors = torch.load(file)
    torch.save(tensors, file, _use_new_zipfile_serialization=False)
    found = open_published(tmp_path / "eagle", target_path=tiny_llama)
    assert torch.equal(found.read("fc.weight"), tensors["fc.weight"])
    torch.save({1: torch.zeros(1), **tensors}, file)
    with pytest.raises(ValueError, match="expected tensors by their names"):
        open_published(tmp_path / "eagle", target_path=tiny_llama)
    for content in (b"", b"hello world"):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"expected tensors as torch\.save writes them"):
            open_published(tmp_path / "eagle", target_path=tiny_llama)


def test_a_pickle_that_would_run_code_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    write_eagle1(tmp_path / "eagle", tiny_llama, bias=False, pickled=True)
    torch.save({"fc.weight": Path("code")}, tmp_path / "eagle" / "pytorch_model.bin")
    with pytest.raises(ValueError, match="expected tensors and nothing else"):
        open_published(tmp_path / "eagle", target_path=tiny_llama)


def test_folders_without_a_head_and_heads_of_another_kind_are_refused(with_block: WithBlock, tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="found none of these"):
        open_published(tiny_llama, target_path=tiny_llama)
    with pytest.raises(ValueError, match="found none at"):
        open_published(tmp_path / "nothing", target_path=tiny_llama)
    target = with_block(tiny_llama, layout="deepseek")
    with pytest.raises(ValueError, match=r"head=eagle can begin as, found deepseek_mtp; choose head=mtp"):
        adopt(pair_head(Eagle, target), target, target)


def test_what_differs_from_the_target_and_still_fits_is_said(tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another model's embedding, other rotary settings: a head of a fine-tuned target's base may begin so."""
    write_eagle1(tmp_path / "eagle", tiny_llama, bias=False)
    adopt(pair_head(Eagle, tiny_llama), tmp_path / "eagle", tiny_llama)
    assert "embed_tokens" not in capsys.readouterr().err
    changed(tmp_path / "eagle", lambda tensors: tensors["embed_tokens.weight"].mul_(0.5))
    config = json.loads((tmp_path / "eagle" / "config.json").read_text())
    config.pop("rope_parameters", None)
    (tmp_path / "eagle" / "config.json").write_text(json.dumps({**config, "rope_theta": 5e5}))
    adopt(pair_head(Eagle, tiny_llama), tmp_path / "eagle", tiny_llama)
    said = capsys.readouterr().err
    assert "embed_tokens.weight is not this target's embedding" in said and "'rope_theta': 500000.0" in said
