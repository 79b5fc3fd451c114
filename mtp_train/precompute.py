"""The engine runs the target over whole responses: responses/ -> cache/ of hidden states and next-token probabilities.

Shards are written one by one; killed at any moment, the same command continues and ends with the same bytes. Any number of the same
command share the work, started at any time, on any machine that sees the folder: each claims the next shard that is free, what a
dead one had claimed is taken over, and where one ends well the cache is complete. With mode=stream or hybrid a training with the
same mode runs beside it, and says which shards come first.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from mtp_train.commandline import next_command
from mtp_train.opening import OpenTarget, open_run_target
from mtp_train.runtime import is_main, log, progress, read_object
from mtp_train.stage import build, call, record, stage, start
from mtp_train.typed import fit

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from mtp_train.cache.sharing import Work
    from mtp_train.cache.wanted import Production
    from mtp_train.cache.writer import CacheWriter
    from mtp_train.engine.base import Engine, PrefillSettings
    from mtp_train.prompt.skips import SkipCounts
    from mtp_train.records import Response

# Between two looks at what other workers do, and between two lines about it.
_LOOK_S, _SAY_S = 1.0, 60.0


def _check_answers(cfg: DictConfig) -> None:
    """Say what will be read. ValueError where there are no answers; before the target is opened, which takes seconds."""
    from mtp_train.prompt.responses import read_meta

    if cfg.answers == "own":
        stated = read_meta(Path(cfg.responses))
        log(f"answers of {stated.get('target_name')} in {cfg.responses}, for a cache in {cfg.out}; opening target {cfg.target.name}")
    elif cfg.answers == "given":
        log(f"answers that the data set gives, for a cache in {cfg.out}; opening target {cfg.target.name}")


def _engine(cfg: DictConfig, target: OpenTarget) -> Engine:
    """Says where the target's own answers will be read in another dtype than they were written in."""
    from mtp_train.prompt.responses import read_meta

    engine: Engine = build(cfg.engine, target_path=target.path, trust_remote_code=target.trust_remote_code, load_head=None)
    cfg.engine.dtype = engine.dtype  # what auto has come to here
    if cfg.answers == "own" and (wrote := read_meta(Path(cfg.responses)).get("dtype")) not in (None, cfg.engine.dtype):
        log(f"the answers were written in {wrote}, their states are read in {cfg.engine.dtype}")
    return engine


def _check_begun(cfg: DictConfig) -> None:
    """ValueError for an unknown codec, and where a cache is there that was begun with other settings, as far as they are known before
    the target is opened."""
    from mtp_train.cache.codec import codec_for
    from mtp_train.cache.format import PLAN, CacheIdentity, check_fields

    codec_for(cfg.codec)
    path = Path(cfg.out) / PLAN
    if not path.is_file():
        return
    begun = CacheIdentity.from_json(read_object(path, {"identity": dict}, remedy=f"delete {PLAN}, and call again")["identity"], where=path)
    stated = {"codec": cfg.codec, "top_k": cfg.top_k}
    if cfg.target_layer_ids is not None:  # else the target says how many layers it has
        stated["target_layer_ids"] = list(cfg.target_layer_ids)
    check_fields(stated, begun, where=Path(cfg.out))


def _taps(cfg: DictConfig, target: OpenTarget) -> tuple[int, ...]:
    """The layers to tap. ValueError where the target does not have them."""
    from mtp_train.target.spec import default_tap_ids

    taps = default_tap_ids(target.spec.num_layers) if cfg.target_layer_ids is None else tuple(cfg.target_layer_ids)
    target.spec.check_layer_ids(taps)
    return taps


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
                f"{cfg.responses}: expected answers of this target ({target.spec.name}, {key} {expected}), found {stated} of "
                f"{found.get('target_name')}; choose that target, or regenerate into another run folder"
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


def _write_shards(
    engine: Engine, settings: PrefillSettings, *, writer: CacheWriter, work: Work, production: Production, responses: dict[str, Response]
) -> None:
    """Write what is free, wait for what others are at, and take over what they leave, until every shard looks written, or the
    training that they are streamed to has ended. An engine may ask for shards ahead of the one that it is at."""
    asked: deque[int] = deque()
    said_s = time.monotonic()

    def groups() -> Iterator[list[Response] | None]:
        nonlocal said_s
        while True:
            index = work.take(production.order())
            if index is not None:
                asked.append(index)
                yield [responses[sample_id] for sample_id in writer.sample_ids(index)]
            elif asked:
                yield None
            elif production.is_over or (others := production.waits_for() or work.waits_for()) is None:
                return
            else:
                if time.monotonic() - said_s >= _SAY_S:
                    log(f"nothing to do; waiting for {others}")
                    said_s = time.monotonic()
                time.sleep(_LOOK_S)

    missing = [index for index in range(writer.num_shards) if not writer.looks_done(index)]
    num_tokens = sum(len(responses[sample_id].token_ids) for index in missing for sample_id in writer.sample_ids(index))
    log(f"{num_tokens} tokens to read, in {len(missing)} of {writer.num_shards} shard(s)")
    with progress(desc="precompute", unit="tok", total=num_tokens) as bar, closing(engine.prefill_groups(groups(), settings)) as shards:
        for samples in shards:
            index = asked[0]
            writer.write_shard(index, samples)
            work.done(asked.popleft())  # only now: while it is in hand, nobody may be waited for, who might wait for it
            bar.update(sum(len(responses[sample_id].token_ids) for sample_id in writer.sample_ids(index)))


@stage("precompute", kinds={"top_k": int | None, "target_layer_ids": list[int] | None, "max_bytes": str | int | None})
def main(cfg: DictConfig) -> None:
    _check_answers(cfg)
    _check_begun(cfg)
    target = open_run_target(cfg)
    taps = _taps(cfg, target)
    chosen, counts = _responses(cfg, target)
    log(counts.summary())
    responses = {response.prompt_id: response for response in chosen}

    from mtp_train.cache.claim import Claims
    from mtp_train.cache.disk import CacheSize, check_fits
    from mtp_train.cache.format import FORMAT_VERSION, CacheIdentity
    from mtp_train.cache.growing import write_answer_counts
    from mtp_train.cache.plan import PlannedSample
    from mtp_train.cache.sharing import Work
    from mtp_train.cache.wanted import Mode, Production
    from mtp_train.cache.writer import CacheWriter
    from mtp_train.engine.base import PrefillSettings
    from mtp_train.quantity import parse_bytes
    from mtp_train.target.spec import quantization_of

    settings = PrefillSettings(target_layer_ids=taps, top_k=cfg.top_k)
    size = CacheSize(
        codec=cfg.codec,
        hidden_size=target.spec.hidden_size,
        vocab_size=target.spec.vocab_size,
        num_taps=len(settings.target_layer_ids),
        top_k=settings.top_k,
    )
    max_bytes = None if cfg.max_bytes is None else parse_bytes(cfg.max_bytes, where="max_bytes")
    # Before the engine is loaded, and before anything is written.
    check_fits(Path(cfg.out), list(responses.values()), size, max_bytes=max_bytes)
    engine = _engine(cfg, target)
    run = start(cfg, stage_name="precompute", record_now=False, shared=True)
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
    if cfg.mode != "offline":
        write_answer_counts(run.out, responses.values(), vocab_size=target.spec.vocab_size)
    production = Production(writer=writer, mode=fit(Mode, cfg.mode, "mode"), max_bytes=max_bytes)
    with Claims(run.out, silence_s=cfg.silence_s) as claims:
        work = Work(writer=writer, claims=claims)
        manifest = None
        while manifest is None:
            _write_shards(engine, settings, writer=writer, work=work, production=production, responses=responses)
            if production.is_over:
                log(f"the training that {run.out} was streamed to has ended; to stream to another one, start that training first")
                return
            manifest = work.finish(look_s=_LOOK_S)
    log(
        f"{manifest.num_samples} samples, {manifest.num_loss_tokens} answer tokens in {run.out}; "
        f"next: {next_command('train', reads='cache')}"
    )


if __name__ == "__main__":
    main()
