"""Fits a draft head to the cache: cache/ -> checkpoint/<name>/.

Runs on one process or under torchrun. Killed at any moment, or ended by a signal, the same command continues it, bit for bit as
if it had not been interrupted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtp_train.commandline import next_command
from mtp_train.opening import OpenTarget, head_loader, open_run_target
from mtp_train.runtime import barrier, is_main, log, world_size
from mtp_train.stage import Run, build, call, load_word, plain, record, stage, start
from mtp_train.trainer.stop import EndAtOnce, note_in
from mtp_train.typed import fit

if TYPE_CHECKING:
    from accelerate import Accelerator
    from omegaconf import DictConfig

    from mtp_train.batch.plan import DataPlan
    from mtp_train.head.base import Head
    from mtp_train.trainer.data import Cache, Subset
    from mtp_train.trainer.measured import MeasuredAcceptance
    from mtp_train.trainer.objective import Objective
    from mtp_train.trainer.settings import LoopSettings, OptimizerSettings, Schedule
    from mtp_train.trainer.state import HeadFile

# That a process leaves the first one to say what is wrong for all of them.
_PATIENCE_S = 30.0


def _data(cfg: DictConfig, target: OpenTarget) -> tuple[Subset, Subset | None]:
    """The samples to train on, and those to validate on."""
    from mtp_train.cache.wanted import Mode
    from mtp_train.trainer.data import split
    from mtp_train.trainer.mixture import MixedCache, MixturePart
    from mtp_train.trainer.opening import Fetch, open_cache

    mode: Mode = fit(Mode, cfg.mode, "mode")
    expected = {**target.identity(), "hidden_size": target.spec.hidden_size, "vocab_size": target.spec.vocab_size}
    fetch: Fetch = fit(Fetch, plain(cfg.fetch), "fetch")
    cache: Cache
    if cfg.mixture is None:
        cache = open_cache(cfg.cache, mode=mode, fetch=fetch, expected=expected)
    elif mode != "offline":
        raise ValueError(f"mode: expected offline with a mixture, found {mode}; precompute the caches first")
    else:
        parts = fit(dict[str, MixturePart], plain(cfg.mixture), "mixture")
        cache = MixedCache({name: open_cache(part.cache, mode=mode, fetch=fetch, expected=expected) for name, part in parts.items()})
    if cfg.validation.cache is not None:
        if cfg.validation.fraction:
            raise ValueError(f"validation: expected fraction=0 beside a cache of its own, found {cfg.validation.fraction}; set one of them")
        held_out = open_cache(cfg.validation.cache, mode="offline", fetch=fetch, expected=expected)
        return split(cache, fraction=0.0, seed=cfg.seed)[0], split(held_out, fraction=0.0, seed=cfg.seed)[0]
    if mode != "offline" and cfg.validation.decode.every is not None:
        raise ValueError(
            f"validation.decode.every: expected validation.cache beside it with mode={mode}, found null; name a small cache there"
        )
    train, rest = split(cache, fraction=cfg.validation.fraction, seed=cfg.seed)
    return train, rest if len(rest) else None


def _check_cache(cfg: DictConfig) -> None:
    """ValueError where a cache that is to be read whole is not finished; before the target is opened."""
    if cfg.mixture is None and cfg.mode == "offline" and "://" not in cfg.cache:
        from mtp_train.cache.reader import read_manifest

        read_manifest(Path(cfg.cache))


def _plan(cfg: DictConfig, train: Subset) -> DataPlan:
    from mtp_train.batch.plan import DataPlan
    from mtp_train.trainer.supply import make_order

    shares = None if cfg.mixture is None else [float(part.share) for part in cfg.mixture.values()]
    return DataPlan(
        lengths=train.lengths,
        sample_ids=train.sample_ids,
        seed=cfg.seed,
        tokens_per_pack=cfg.tokens_per_pack,
        packs_per_step=cfg.packs_per_step,
        order=make_order(train, window=cfg.shuffle_shards, shares=shares, seed=cfg.seed),
    )


def _losses(cfg: DictConfig) -> dict[str, tuple[float, dict[str, Any]]]:
    """Weight and node of each loss that counts, through its yaml in conf/loss."""
    found = {}
    for word, entry in plain(cfg.losses).items():
        settings = dict(entry) if isinstance(entry, dict) else {"weight": entry}
        node = load_word("loss", word)
        unknown = settings.keys() - node.keys() - {"weight"}
        if unknown or "weight" not in settings:
            raise ValueError(f"losses.{word}: expected a weight, and settings among {sorted(node.keys() - {'_target_'})}, found {entry}")
        weight = fit(float, settings.pop("weight"), f"losses.{word}.weight")
        if weight != 0:
            found[word] = (weight, {**node, **settings})
    return found


def _objective(cfg: DictConfig, losses: dict[str, tuple[float, dict[str, Any]]]) -> Objective:
    """The weighted losses."""
    from mtp_train.trainer.objective import Objective, Term

    terms = {word: Term(weight, build(node, where=f"losses.{word}")) for word, (weight, node) in losses.items()}
    if cfg.compile and not any(term.loss.compiles for term in terms.values()):
        raise ValueError(
            f"compile: expected a loss whose passes can be compiled (forward_kl), found {', '.join(terms)}; set compile=false, which is "
            "as fast for these"
        )
    weights = None if cfg.depth_weights is None else tuple(cfg.depth_weights)
    return Objective(terms=terms, draft_steps=cfg.draft_steps, decay=cfg.depth_decay, chunk_rows=cfg.chunk_rows, depth_weights=weights)


def _head(
    cfg: DictConfig, target: OpenTarget, accelerator: Accelerator, objective: Objective, train: Subset, held_out: Subset | None
) -> tuple[Head, Subset, Subset | None, dict[str, str] | None]:
    """The head as training begins, the samples with what it reads of them, and what it started from. Its draft vocabulary, where
    it has one and did not bring it, is counted in those to train on.

    Errors: ValueError where it reads tapped layers that the cache lacks, cannot be trained with these losses and depths, or
    noise_scale would shake the last hidden state and it does not read that, and where it has a block that no depth would train.
    """
    from mtp_train.target.weights import read_shared
    from mtp_train.trainer.module import compute_dtype
    from mtp_train.trainer.start import choose_draft_vocabulary, start_from_published

    started_from = None
    shared = read_shared(target.path).to(device=accelerator.device, dtype=compute_dtype(cfg.precision))
    head: Head = build(plain(cfg.head), where="head", target_path=target.path, shared=shared, trust_remote_code=target.trust_remote_code)
    objective.check(head)
    if cfg.draft_steps < head.num_blocks:
        raise ValueError(f"draft_steps: expected at least head.num_blocks={head.num_blocks}, to train them all, found {cfg.draft_steps}")
    if cfg.noise_scale and (head.target_layer_ids or not head.reads_hidden):
        instead = "tapped layers (it learns from its own states: draft_steps)" if head.target_layer_ids else "tokens alone"
        raise ValueError(f"noise_scale: expected 0 for a head that reads {instead}, found {cfg.noise_scale}; set noise_scale=0")
    train = train.with_taps(head.target_layer_ids)
    held_out = None if held_out is None else held_out.with_taps(head.target_layer_ids)
    if cfg.start_from is not None:
        started_from = start_from_published(cfg.start_from, head, target_path=target.path)
    elif head.draft_vocab_size is not None:
        choose_draft_vocabulary(head, train, vocab_size=target.spec.vocab_size, accelerator=accelerator)
    return head, train, held_out, started_from


def _check_packs(cfg: DictConfig) -> None:
    """ValueError, said by one process, where some of them would have no pack; the launcher ends the others with it."""
    from mtp_train.batch.plan import check_packs

    try:
        check_packs(cfg.packs_per_step, world_size=max(1, world_size() // max(1, cfg.parallel.context)))
    except ValueError:
        if not is_main():
            time.sleep(_PATIENCE_S)
        raise


def _settle(cfg: DictConfig) -> tuple[LoopSettings, dict[str, tuple[float, dict[str, Any]]], OptimizerSettings, Schedule]:
    """What the settings alone decide: refused, where they are wrong, before torch is imported, which takes seconds."""
    from mtp_train.trainer.settings import Device, LoopSettings

    _check_packs(cfg)
    for key in ("num_steps", "num_epochs"):
        if cfg[key] is not None and cfg[key] < 1:
            raise ValueError(f"{key}: expected at least 1, found {cfg[key]}")
    fit(Device, cfg.device, "device")
    told = plain(cfg) | ({"precision": "fp32"} if cfg.precision == "auto" else {})  # the device will tell, by torch
    settings = LoopSettings.of(told, num_steps=cfg.num_steps or 1)  # num_epochs tells when the cache is known
    return settings, _losses(cfg), build(cfg.optimizer, where="optimizer"), build(cfg.schedule, where="schedule")


def _identity(cfg: DictConfig, head: Head, train: Subset, *, num_steps: int, started_from: dict[str, str] | None) -> dict[str, Any]:
    """What decides the result: a training is continued under the same only."""
    steps = {"num_steps": num_steps} if cfg.schedule.kind == "cosine" else {}  # a constant rate may be trained on for longer
    begun = {} if started_from is None else {"started_from": started_from}
    return {**_stated_identity(cfg), **steps, **begun, "head": head.draft_config(), "data": train.fingerprint()}


def _stated_identity(cfg: DictConfig) -> dict[str, Any]:
    """Of what decides the result all that is known before the target is opened, which takes long."""
    names = ("losses", "draft_steps", "depth_decay", "noise_scale", "precision", "seed", "tokens_per_pack", "packs_per_step", "optimizer")
    settings = {name: plain(cfg[name]) for name in (*names, "schedule")}
    for name in ("optimizer", "schedule"):
        del settings[name]["_target_"]
    settings |= {name: plain(cfg[name]) for name in ("depth_weights", "shuffle_shards", "mixture") if cfg[name] is not None}
    if cfg.precision == "auto":
        del settings["precision"]
    return settings | ({"compile": True} if cfg.compile else {})  # it rounds otherwise


def _on_validate(cfg: DictConfig, target: OpenTarget, samples: Subset) -> MeasuredAcceptance | None:
    """Measures acceptance during training, where ``validation.decode.every`` asks for it."""
    from mtp_train.trainer.measured import DecodeSettings, MeasuredAcceptance

    settings = plain(cfg.validation.decode)
    every = settings.pop("every")
    decode: DecodeSettings = call(DecodeSettings, settings, where="validation.decode")
    if every is None:
        return None

    def prepare(folder: Path) -> None:
        _probe(folder, target, samples, None)

    words = {"path": target.path.resolve(), "name": target.spec.name, "trust_remote_code": target.trust_remote_code}
    return MeasuredAcceptance(settings=decode, target=words, prepare=prepare)


def _head_file(run: Run, head: Head, target: OpenTarget, train: Subset, started_from: dict[str, Any] | None) -> HeadFile:
    from mtp_train.trainer.state import HeadFile

    begun = {} if started_from is None else {"started_from": started_from}
    made_by = {"settings": run.settings, "provenance": run.provenance, "cache": train.identity.to_json(), **begun}
    return HeadFile(config=head.draft_config(), target=target.identity(), made_by=made_by)


def _probe(folder: Path, target: OpenTarget, samples: Subset, numbers: Sequence[int] | None) -> None:
    """Write what an exporter compares with, from eight of the samples: the first ones, or of ``numbers``."""
    from mtp_train.target.weights import read_shared
    from mtp_train.trainer.probe import write_probe

    chosen = (range(len(samples)) if numbers is None else numbers)[:8]
    write_probe(folder, head_loader(target)(folder, read_shared(target.path)), [samples[number] for number in chosen])


# What the defaults in conf/train.yaml do not tell: what may be null, and losses with settings of their own.
_KINDS = {
    "losses": dict[str, float | dict[str, Any]],
    "start_from": str | None,
    "depth_weights": list[float] | None,
    "num_steps": int | None,
    "mixture": dict[str, Any] | None,
    "shuffle_shards": int | None,
    "fetch.max_bytes": str | int,
    "validation.cache": str | None,
    "validation.every": int | None,
    "validation.decode.every": int | None,
    "validation.decode.devices": str | int | None,
    "checkpoint.every": int | None,
}


@stage("train", kinds=_KINDS)
def main(cfg: DictConfig) -> None:
    settings, losses, optimizer, schedule = _settle(cfg)
    log(f"a head from {cfg.cache if cfg.mixture is None else ', '.join(cfg.mixture)} for {cfg.out}; opening target {cfg.target.name}")
    objective = _objective(cfg, losses)
    wandb, parallel = (build(cfg[key], where=key) for key in ("wandb", "parallel"))
    _check_cache(cfg)

    from mtp_train.trainer.state import check_continues, complete_steps

    check_continues(Path(cfg.out), _stated_identity(cfg), only_these=True)
    target = open_run_target(cfg)

    from mtp_train.loss.compiled import compiled_passes
    from mtp_train.trainer.loop import Trainer
    from mtp_train.trainer.module import choose_precision, make_accelerator
    from mtp_train.trainer.probe import has_probe
    from mtp_train.trainer.start import start_from_data
    from mtp_train.trainer.supply import at_hand, make_supply

    train, held_out = _data(cfg, target)
    plan = _plan(cfg, train)
    num_steps = int(cfg.num_steps if cfg.num_steps is not None else plan.steps_of(cfg.num_epochs))
    accelerator = make_accelerator(cfg.device)
    cfg.precision = choose_precision(cfg.precision, accelerator)
    settings = replace(settings, num_steps=num_steps, precision=cfg.precision)
    head, train, held_out, started_from = _head(cfg, target, accelerator, objective, train, held_out)
    if cfg.checkpoint_activations:
        head.recompute_activations(depths=cfg.draft_steps > 1)
    identity = _identity(cfg, head, train, num_steps=num_steps, started_from=started_from)
    check_continues(Path(cfg.out), identity)  # before anything there is overwritten
    run: Run = start(cfg, stage_name="train", record_now=False)
    note_in(run.out, step=max(complete_steps(run.out), default=0))
    supply = make_supply(train, plan, out=run.out, num_steps=num_steps, max_prefetch=cfg.max_prefetch)
    counts = "" if train.num_loss_tokens is None else f" ({sum(train.num_loss_tokens)} count)"
    log(
        f"{len(train)} samples of {sum(train.lengths)} tokens{counts}, {len(held_out or ())} held out; "
        f"{num_steps} steps of {cfg.packs_per_step} x {cfg.tokens_per_pack} tokens, {plan.fill():.0%} full"
    )
    if started_from is None and not complete_steps(run.out):  # else every weight is given
        start_from_data(head, train, at_hand(train, plan, window=cfg.shuffle_shards, num_steps=num_steps), device=accelerator.device)
    trainer = Trainer(
        accelerator=accelerator,
        head=head,
        objective=objective,
        train=train,
        plan=plan,
        validation=held_out,
        settings=settings,
        parallel=parallel,
        optimizer=optimizer,
        schedule=schedule,
        out=run.out,
        head_file=_head_file(run, head, target, train, started_from),
        identity=identity,
        wandb=wandb,
        on_validate=_on_validate(cfg, target, held_out or train),
        before_read=None if supply is None else supply.before_read,
    )
    record(run, stage_name="train")  # only now: settings that do not go together have been refused
    with compiled_passes(cfg.compile):
        trained = trainer.run()
    if is_main() and (trained or not has_probe(run.out)):
        last = plan.packs(num_steps - 1)[0] if held_out is None and cfg.mode != "offline" else None  # those read last are still there
        _probe(run.out, target, held_out or train, last)
    barrier()
    train.cache.done()
    log(f"next: {next_command('evaluate', reads='checkpoint', also=[f'name={cfg.name}'])}")


if __name__ == "__main__":
    with EndAtOnce():
        main()
