"""The target answers the prompts itself: prompts -> responses/.

Heads are trained on the target's own text, since that is what they will draft. Every prompt is answered turn by turn; token ids
are kept as well as text. An interrupted run continues where it stopped: what is answered is not answered again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mtp_train.commandline import next_command
from mtp_train.opening import open_run_target
from mtp_train.runtime import agreed, barrier, is_main, log, progress, rank, world_size
from mtp_train.stage import build, call, record, stage, start

if TYPE_CHECKING:
    from omegaconf import DictConfig


@stage("regenerate", kinds={})
def main(cfg: DictConfig) -> None:
    from mtp_train.prompt.load import load_prompts

    for key, least in (("num_answers", 1), ("max_length_tokens", 2)):
        if cfg[key] < least:
            raise ValueError(f"{key}: expected at least {least}, found {cfg[key]}")
    prompts, counts = call(load_prompts, cfg.prompt, where="prompt")
    if not prompts:
        raise ValueError(f"prompt: expected prompts to answer, found none: {counts.summary()}")
    log(counts.summary())

    from mtp_train.engine.answer import answer, answer_id, check_asked, check_earlier
    from mtp_train.engine.base import Sampling
    from mtp_train.prompt.responses import ResponseWriter, read_responses

    target = open_run_target(cfg)
    engine = build(cfg.engine, target_path=target.path, trust_remote_code=target.trust_remote_code, load_head=None)
    cfg.engine.dtype = agreed(engine.dtype, key="engine.dtype")  # what auto has come to here
    sampling = call(Sampling, cfg.sampling, where="sampling")
    run = start(cfg, stage_name="regenerate", record_now=False)
    barrier()  # the first process has the folder for itself before any other opens a file there
    identity = target.identity() | {
        "engine": engine.word,
        "engine_version": engine.version,
        "dtype": engine.dtype,
        "sampling": run.settings["sampling"],
    }
    mine = prompts[rank() :: world_size()]
    with ResponseWriter(directory=run.out, identity=identity, rank=rank()) as writer:
        earlier = read_responses(run.out, allow_unfinished=True)
        check_asked(prompts, earlier, num_answers=cfg.num_answers, where=run.out)
        done = check_earlier(mine, earlier, num_answers=cfg.num_answers, counts=counts)
        barrier()  # every process has read what is there before the first one writes
        record(run, stage_name="regenerate")  # only now: another run's folder has been refused
        wanted = {answer_id(prompt.prompt_id, number) for prompt in mine for number in range(cfg.num_answers)}
        share = f" (this process's; {world_size()} share {len(prompts) * cfg.num_answers})" if world_size() > 1 else ""
        log((f"{len(done)} of {len(wanted)} answers are there already" if done else f"{len(wanted)} answers to write") + share)
        num_tokens = 0
        with progress(desc="regenerate", unit="answer", total=len(wanted), initial=len(done)) as bar:
            for response in answer(
                engine,
                target.template,
                mine,
                sampling=sampling,
                num_answers=cfg.num_answers,
                max_length_tokens=target.length_limit(cfg.max_length_tokens),
                done=done,
                counts=counts,
            ):
                writer.write(response)
                num_tokens += sum(response.loss_mask)
                bar.update()
                bar.set_postfix_str(f"{num_tokens / max(bar.format_dict['elapsed'], 1e-9):.0f} tok/s")
        skips = run.out / (f"skips-{rank()}.json" if rank() else "skips.json")
        counts.write(skips)
        if counts.num_skipped or counts.notes:
            log(counts.summary() + (f"; more of them in {skips}" if counts.has_more else ""))
    barrier()
    if is_main():
        count = writer.finish()
        if not count:
            raise ValueError(f"prompt: expected prompts that can be answered, found none: {counts.summary()}; all of it in {skips}")
        log(f"{count} answers in {run.out}; next: {next_command('precompute', reads='responses')}")


if __name__ == "__main__":
    main()
