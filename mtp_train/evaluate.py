"""Real speculative decoding on held-out prompts: a trained head -> report/.

The engine drafts with the head, verifies with the target and counts what is accepted; the same prompts are decoded without drafts, and
acceptance is estimated without decoding, so that each figure can be held against another. Every piece is kept as it is
finished: an interrupted run continues. All heads measured into one report folder stand side by side in its page.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from mtp_train.commandline import next_command
from mtp_train.lock import alone
from mtp_train.opening import OpenTarget, head_loader, open_run_target
from mtp_train.runtime import is_main, log
from mtp_train.stage import build, call, check_name, conf_dir, load_word, plain, stage, start

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from mtp_train.acceptance.report_data import Measurement
    from mtp_train.decoding.base import Decoding
    from mtp_train.engine.base import Engine, SpeculateRequest, SpeculateSettings
    from mtp_train.engine.measure import Pieces
    from mtp_train.exporter.base import Exporter
    from mtp_train.head.base import Head


@dataclass(frozen=True, kw_only=True)
class Way:
    """One of ``ways``: how tokens are drawn, on which prompt sets, and what is measured beside it."""

    temperature: float
    top_p: float
    draft_sampling: Literal["greedy", "probabilistic"]
    prompt_sets: tuple[str, ...]
    plain: bool
    estimate: bool


def _ways(cfg: DictConfig) -> dict[str, Way]:
    return {check_name(name, key="ways"): call(Way, way, where=f"ways.{name}") for name, way in plain(cfg.ways).items()}


def _used_sets(cfg: DictConfig) -> set[str]:
    """The prompt sets that are measured on. ValueError where there is none, or one that ``prompt_sets`` does not hold."""
    used = {name for way in _ways(cfg).values() for name in way.prompt_sets}
    if cfg.identity.num_prompts != 0:
        used.add(cfg.identity.prompt_set)
    if not used:
        raise ValueError("ways: expected at least one way that names a prompt set, or an identity, found nothing to measure")
    known = plain(cfg.prompt_sets).keys()
    if missing := sorted(used - known):
        raise ValueError(f"ways: expected prompt sets among {sorted(known)} (prompt_sets), found {missing}")
    return used


def _check(cfg: DictConfig, decoding: Decoding) -> None:
    """ValueError, before anything is loaded, for settings that would be refused in the middle of measuring."""
    from mtp_train.acceptance.report_data import Aim

    for number, aim in enumerate(plain(cfg.aims)):
        call(Aim, aim, where=f"aims[{number}]", head=cfg.name)
    counts = {"batch_size": (cfg.batch_size, 1), "max_new_tokens": (cfg.max_new_tokens, 1), "num_shown": (cfg.num_shown, 0)}
    if cfg.identity.num_prompts != 0:
        counts["identity.max_new_tokens"] = (cfg.identity.max_new_tokens, 1)
        _settings(cfg, decoding, None, draws=decoding.draws)
    if cfg.identity.num_prompts is not None:
        counts["identity.num_prompts"] = (cfg.identity.num_prompts, 0)
    for key, (found, least) in counts.items():
        if found < least:
            raise ValueError(f"{key}: expected at least {least}, found {found}")
    for name in plain(cfg.prompt_sets):
        check_name(name, key="prompt_sets")
    _used_sets(cfg)
    for name, way in _ways(cfg).items():
        try:
            _settings(cfg, decoding, way, draws=decoding.draws)
        except ValueError as fault:
            raise ValueError(f"ways.{name}: {fault}") from None


def _settings(cfg: DictConfig, decoding: Decoding, way: Way | None, *, draws: bool) -> SpeculateSettings:
    """The settings of one way; None: those of the proof that speculation is plain greedy decoding. ``draws``: whether drafts can be
    drawn from q."""
    from mtp_train.engine.measure import speculate_settings

    drawn = {"temperature": 0.0, "top_p": 1.0, "draft_sampling": "greedy"} if way is None else asdict(way)
    limit = cfg.identity.max_new_tokens if way is None else cfg.max_new_tokens
    return speculate_settings(decoding=decoding, way=drawn, max_new_tokens=limit, seed=cfg.seed, batch_size=cfg.batch_size, draws=draws)


def _engine(cfg: DictConfig, target: OpenTarget, **changed: Any) -> Engine:
    node = plain(cfg.engine) | changed
    engine: Engine = build(node, target_path=target.path, trust_remote_code=target.trust_remote_code, load_head=head_loader(target))
    if engine.word != "hf" and not (conf_dir() / "exporter" / f"{engine.word}.yaml").is_file():
        raise ValueError(f"engine: expected one that decodes with drafts (hf or vllm), found {engine.word}, which only generates")
    return engine


def _prompt_sets(cfg: DictConfig, target: OpenTarget) -> dict[str, list[SpeculateRequest]]:
    from mtp_train.engine.measure import requests_of
    from mtp_train.prompt.load import load_prompts

    used, limit = _used_sets(cfg), target.length_limit(cfg.max_length_tokens)
    most_new = max(cfg.max_new_tokens, cfg.identity.max_new_tokens if cfg.identity.num_prompts != 0 else 0)
    found = {}
    for name, node in plain(cfg.prompt_sets).items():
        if name not in used:
            continue
        prompts, counts = call(load_prompts, node, where=f"prompt_sets.{name}")
        log(f"{name}: {counts.summary()}")
        found[name], skipped = requests_of(prompts, target.template, max_length_tokens=limit, max_new_tokens=most_new)
        if skipped.num_skipped:
            log(f"{name}: {skipped.summary()}")
    return found


def _loader(target: OpenTarget, engine: Engine) -> Callable[[Path], Head]:
    """Rebuilds a head in the engine's dtype and on its device, for the estimate."""

    def load(path: Path) -> Head:
        import torch

        from mtp_train.engine.hf_model import choose_device
        from mtp_train.target.weights import read_shared

        dtype: torch.dtype = getattr(torch, engine.dtype)
        device = choose_device(engine.device)
        return head_loader(target)(path, read_shared(target.path).to(device=device, dtype=dtype)).to(device=device, dtype=dtype)

    return load


def _draft_of(engine: Engine, checkpoint: Path | None, target: OpenTarget, served: Path) -> Path | None:
    """What the engine drafts with: the checkpoint itself for hf; for the rest the head exported for it, in float32, which the
    engine rounds to its own dtype. None without a head."""
    if engine.word == "hf" or checkpoint is None:
        return checkpoint
    node = load_word("exporter", engine.word) | {"dtype": "float32", "overwrite": True}
    exporter: Exporter = build(node, trust_remote_code=target.trust_remote_code)
    return exporter.export(checkpoint, target.path, served).path


class _How(NamedTuple):
    """What is measured: a head's name and checkpoint (None: a scheme without a head), what the engine loads, the scheme, and whether
    its drafts can be drawn."""

    name: str
    checkpoint: Path | None
    draft: Path | None
    decoding: Decoding
    draws: bool


class _Job(NamedTuple):
    """One piece to decode: what it is kept under and depends on. ``way`` None: the proof of identity."""

    key: str
    stated: list[Any]
    way_name: str
    way: Way | None
    set_name: str
    requests: list[SpeculateRequest]
    settings: SpeculateSettings

    @property
    def num_runs(self) -> int:
        """How often the prompts are decoded: with drafts, and where asked without."""
        return 2 if self.way is None or self.way.plain else 1


def _jobs(cfg: DictConfig, how: _How, prompt_sets: dict[str, list[SpeculateRequest]]) -> list[_Job]:
    """Every way on each of its prompt sets, and the proof of identity."""
    from mtp_train.engine.comparison import piece_key

    jobs = list[_Job]()
    for way_name, way in _ways(cfg).items():
        settings = _settings(cfg, how.decoding, way, draws=how.draws)
        for name in way.prompt_sets:
            requests = prompt_sets[name]
            stated = [str(settings), way.plain, [astuple(request) for request in requests]]
            jobs.append(_Job(piece_key(f"{name}.{way_name}", how.decoding.word), stated, way_name, way, name, requests, settings))
    if cfg.identity.num_prompts != 0:
        name, settings = cfg.identity.prompt_set, _settings(cfg, how.decoding, None, draws=how.draws)
        requests = prompt_sets[name][: cfg.identity.num_prompts]
        stated = [str(settings), [astuple(request) for request in requests]]
        jobs.append(_Job(piece_key("identity", how.decoding.word), stated, "identity", None, name, requests, settings))
    return jobs


def _say_what_is_measured(jobs: list[_Job], pieces: Pieces) -> None:
    """One line at the start: it may take hours."""
    sets: dict[tuple[str, int, int], list[str]] = {}
    for job in jobs:
        words = f"{job.way_name} and plain" if job.num_runs == 2 else job.way_name
        sets.setdefault((job.set_name, len(job.requests), job.settings.sampling.max_new_tokens), []).append(words)
    said = [f"{name}: {count} prompts, at most {most} tokens each ({', '.join(words)})" for (name, count, most), words in sets.items()]
    new = [job for job in jobs if not pieces.holds(job.key, job.stated)]
    most = sum(job.num_runs * len(job.requests) * job.settings.sampling.max_new_tokens for job in new)
    log(
        f"evaluate: to measure: {'; '.join(said)}. {len(jobs) - len(new)} of {len(jobs)} are measured already, the others decode {most:,} "
        "tokens at most; prompt_sets.NAME.limit=, max_new_tokens= and identity.num_prompts= make it shorter"
    )


def _measure(cfg: DictConfig, how: _How, job: _Job, *, target: OpenTarget, engine: Engine, pieces: Pieces) -> list[Measurement]:
    """One piece, and beside a way's the estimate, which there is for chains of a head."""
    from mtp_train.engine.measure import decode, estimate_from_answers

    if job.way is None:
        return [_measure_identity(cfg, how, job, target=target, pieces=pieces)]
    log(f"evaluate: {how.name} on {job.set_name}, {how.decoding.word}, {job.way_name}, {len(job.requests)} prompts")
    where: dict[str, Any] = {"head": how.name, "prompt_set": job.set_name, "requests": job.requests, "settings": job.settings}
    decoded = pieces.get(job.key, job.stated, partial(decode, engine=engine, draft=how.draft, plain=job.way.plain, **where))
    if not job.way.estimate or how.decoding.word != "chain" or how.checkpoint is None:
        return [decoded]
    stated = [*job.stated, [prompt.token_ids for prompt in decoded.acceptance.prompts]]
    given: dict[str, Any] = {"draft": how.checkpoint, "answers": decoded.acceptance, "load": _loader(target, engine)}
    walk = partial(estimate_from_answers, engine=engine, **given, **where)
    return [decoded, pieces.get(f"{job.key}.estimate", stated, walk)]


def _measure_identity(cfg: DictConfig, how: _How, job: _Job, *, target: OpenTarget, pieces: Pieces) -> Measurement:
    """In float32: does greedy speculation write what plain greedy decoding writes."""
    from mtp_train.engine.measure import prove_identity

    log(f"evaluate: {how.name}, {how.decoding.word}, float32: is speculation plain greedy decoding, on {len(job.requests)} prompts")

    def prove() -> Measurement:
        where: dict[str, Any] = {"head": how.name, "prompt_set": job.set_name, "requests": job.requests, "settings": job.settings}
        return prove_identity(**where, engine=_engine(cfg, target, dtype="float32"), draft=how.draft)

    return pieces.get(job.key, job.stated, prove)


@stage("evaluate", kinds={"identity.num_prompts": int | None, "prompt_sets": dict[str, dict], "ways": dict[str, Any], "aims": list[dict]})
def main(cfg: DictConfig) -> None:
    if not is_main():  # one process decodes; an engine may use several devices of its own
        return
    sets = ", ".join(sorted(_used_sets(cfg)))
    log(f"prompts of {sets}, for a report in {cfg.out}; opening target {cfg.target.name}")  # before the imports, which take seconds
    from mtp_train.checkpoint import check_head, read_head_config
    from mtp_train.engine.comparison import check_target, collect, marked_answers, piece_key, write_head

    decoding: Decoding = build(cfg.decoding)
    _check(cfg, decoding)
    # A scheme without a head stands in the report under its own word.
    checkpoint, name = (Path(cfg.checkpoint), cfg.name) if decoding.needs_head else (None, decoding.word)
    head = None if checkpoint is None else read_head_config(checkpoint)
    target = open_run_target(cfg)
    if head is not None and checkpoint is not None:
        check_head(head, target.identity(), where=checkpoint)
    prompt_sets = _prompt_sets(cfg, target)
    check_target(Path(cfg.out), target.identity(), name=name)
    engine = _engine(cfg, target)
    cfg.engine.dtype = engine.dtype  # what auto has come to here
    run = start(cfg, stage_name=f"evaluate.{piece_key(name, decoding.word)}")

    from mtp_train.acceptance.report import print_summary, stands, write_report
    from mtp_train.acceptance.report_data import FORMAT_VERSION
    from mtp_train.engine.measure import Pieces
    from mtp_train.engine.standing import sets_of

    settings = {key: value for key, value in plain(cfg.engine).items() if key != "scratch"}  # a run that was moved is the same run
    depends_on = {
        "head": None if head is None else head["weights_sha256"],
        "target": target.identity(),
        "engine": settings,
        "version": engine.version,
    }
    pieces = Pieces(folder=run.out / "pieces" / name, identity=depends_on | {"format": FORMAT_VERSION})
    draft = _draft_of(engine, checkpoint, target, pieces.folder / "served")
    draws = decoding.draws and (head is None or engine.draws_drafts_of(head["method"]))
    how = _How(name=name, checkpoint=checkpoint, draft=draft, decoding=decoding, draws=draws)
    jobs = _jobs(cfg, how, prompt_sets)
    _say_what_is_measured(jobs, pieces)
    measured = [found for job in jobs for found in _measure(cfg, how, job, target=target, engine=engine, pieces=pieces)]
    engine_says = engine.describe()
    with alone(run.out / ".report.lock", writes=run.out, wait=True):  # heads measured side by side share the report
        write_head(
            pieces.folder,
            name=name,
            checkpoint=checkpoint,
            decoding=decoding,
            measured=measured,
            answers=marked_answers(name, measured[0], prompt_sets[measured[0].prompt_set], target.template, num_shown=cfg.num_shown),
            prompt_sets=sets_of({item.prompt_set: plain(cfg.prompt_sets[item.prompt_set].source) for item in measured}),
            target=target.identity(),
            provenance={"settings": run.settings, "machine": run.provenance, "engine": engine_says},
        )
        data = collect(run.out, target=target.spec.as_dict(), run_folder=Path(cfg.run), aims=plain(cfg.aims))
        if not stands(data, run.out):
            write_report(data, run.out)
    print_summary(data, run.out)
    if checkpoint is not None:
        log(f"next: {next_command('export', reads=None, also=[f'name={name}', f'exporter={engine.word}'])}")


if __name__ == "__main__":
    main()
