"""The engine runs the target over whole responses: responses/ -> cache/ of hidden states and next-token probabilities.

Shards are written one by one; killed at any moment, the same command continues and ends with the same bytes. With torchrun each
process writes every N-th shard; so does each of num_workers commands that share nothing but the folder, at any time.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from mtp_train.runtime import barrier, is_main, log, progress, rank, world_size
from mtp_train.stage import OpenTarget, build, call, open_target, record, stage, start

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from mtp_train.cache.writer import CacheWriter
    from mtp_train.prompt.skips import SkipCounts
    from mtp_train.records import Response


def _responses(cfg: DictConfig, target: OpenTarget) -> tuple[list[Response], SkipCounts]:
    """The conversations to read, the target's own answers or a data set's, and the counts of those left out."""
    from mtp_train.prompt.build import build_responses
    from mtp_train.prompt.load import load_prompts

    if cfg.answers == "own":
        return _own_answers(cfg, target)
    if cfg.answers != "given":
        raise ValueError(f"answers: expected own (the target's, from responses/) or given (the data set's), found {cfg.answers!r}")
    prompts, counts = call(load_prompts, cfg.prompt, where="prompt")
    limit = target.length_limit(cfg.max_length_tokens)
    return build_responses(prompts, target.template, max_length=limit, policy=cfg.too_long, counts=counts)


def _own_answers(cfg: DictConfig, target: OpenTarget) -> tuple[list[Response], SkipCounts]:
    from mtp_train.prompt.responses import read_meta, read_responses
    from mtp_train.prompt.skips import Skip, SkipCounts

    found = read_meta(Path(cfg.responses))
    for key, expected in target.identity().items():
        if key != "target_name" and (stated := found.get(key)) != expected:
            raise ValueError(
                f"{cfg.responses}: expected answers of this target ({key} {expected}), found {stated} of {found.get('target_name')}; "
                "choose that target, or regenerate into another run folder"
            )
    everything = read_responses(Path(cfg.responses))
    counts = SkipCounts(num_rows=len(everything), sources=[{"name": "own answers", "source": str(cfg.responses), **found}])
    kept = []
    for response in everything:
        if (length := len(response.token_ids)) > cfg.max_length_tokens:
            why = f"{length} tokens, more than max_length_tokens={cfg.max_length_tokens}"
            counts.skip(Skip(reason="too_long", why=why), row=response.prompt_id)
        else:
            kept.append(response)
    counts.num_kept = len(kept)
    if not any(any(response.loss_mask) for response in kept):
        raise ValueError(
            f"{cfg.responses}: expected answers of at most max_length_tokens={cfg.max_length_tokens}, found none: {counts.summary()}; "
            "raise it"
        )
    return kept, counts


def _missing(cfg: DictConfig, writer: CacheWriter) -> list[tuple[int, tuple[str, ...]]]:
    """The shards that this process is to write: its share as a rank of a torchrun job, or as one of ``num_workers`` that know
    nothing of each other."""
    if cfg.num_workers is None:
        missing = list(writer.missing_shards())[rank() :: world_size()]
        barrier()  # every process has seen the same shards missing before the first one is written
        return missing
    if not 0 <= cfg.worker < cfg.num_workers or world_size() > 1:
        raise ValueError(
            f"worker: expected a number from 0 to below num_workers={cfg.num_workers}, and one process each (no torchrun), found "
            f"{cfg.worker} and {world_size()} processes"
        )
    return list(writer.missing_shards(range(cfg.worker, writer.num_shards, cfg.num_workers)))


@stage("precompute", kinds={"top_k": int | None, "target_layer_ids": list[int] | None, "num_workers": int | None})
def main(cfg: DictConfig) -> None:
    target = open_target(cfg.target)
    chosen, counts = _responses(cfg, target)
    log(counts.summary())
    responses = {response.prompt_id: response for response in chosen}

    from mtp_train.cache.disk import CacheSize, check_fits
    from mtp_train.cache.format import FORMAT_VERSION, CacheIdentity
    from mtp_train.cache.plan import PlannedSample
    from mtp_train.cache.writer import CacheWriter
    from mtp_train.engine.base import PrefillSettings
    from mtp_train.target.spec import default_tap_ids, quantization_of

    taps = default_tap_ids(target.spec.num_layers) if cfg.target_layer_ids is None else tuple(cfg.target_layer_ids)
    settings = PrefillSettings(target_layer_ids=taps, top_k=cfg.top_k)
    target.spec.check_layer_ids(settings.target_layer_ids)
    size = CacheSize(
        codec=cfg.codec,
        hidden_size=target.spec.hidden_size,
        vocab_size=target.spec.vocab_size,
        num_taps=len(settings.target_layer_ids),
        top_k=settings.top_k,
    )
    check_fits(Path(cfg.out), list(responses.values()), size)  # before the engine is loaded, and before anything is written
    engine = build(cfg.engine, target_path=target.path, trust_remote_code=target.trust_remote_code, load_head=None)
    run = start(cfg, stage_name="precompute", record_now=False, worker=None if cfg.num_workers is None else cfg.worker)
    barrier()  # the first process has the folder for itself before any other looks into it
    identity = CacheIdentity(
        format_version=FORMAT_VERSION,
        **target.identity(),
        hidden_state="post_norm",
        target_layer_ids=settings.target_layer_ids,
        dtype=engine.dtype,
        codec=cfg.codec,
        top_k=cfg.top_k,
        engine=engine.word,
        engine_version=engine.version,
        quantization=quantization_of(target.path),
        hidden_size=target.spec.hidden_size,
        vocab_size=target.spec.vocab_size,
        git_commit=run.provenance["git_commit"],
    )
    planned = [PlannedSample.of(response) for response in responses.values()]
    writer = CacheWriter(path=run.out, identity=identity, samples=planned, shard_tokens=cfg.shard_tokens)
    record(run, stage_name="precompute")  # only now: another run's folder has been refused
    if is_main():
        counts.write(run.out / "skips.json")
    missing = _missing(cfg, writer)
    num_tokens = sum(len(responses[i].token_ids) for _, ids in missing for i in ids)
    log(f"{num_tokens} tokens to read, in {len(missing)} of {writer.num_shards} shard(s)")
    groups = ([responses[i] for i in sample_ids] for _, sample_ids in missing)
    with progress(desc="precompute", unit="tok", total=num_tokens) as bar, closing(engine.prefill_groups(groups, settings)) as shards:
        for (index, sample_ids), samples in zip(missing, shards, strict=False):
            writer.write_shard(index, samples)
            bar.update(sum(len(responses[i].token_ids) for i in sample_ids))
    if cfg.num_workers is None:
        barrier()
    elif writer.num_unwritten():
        log(f"{writer.num_unwritten()} of {writer.num_shards} shards are other workers'; the last one to end completes the cache")
        return
    if is_main():
        manifest = writer.finish()
        log(
            f"{manifest.num_samples} samples, {manifest.num_loss_tokens} answer tokens in {run.out}; "
            f"next: python -m mtp_train.train run={cfg.run}"
        )


if __name__ == "__main__":
    main()
