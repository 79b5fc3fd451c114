"""What a run would take before anything is spent: bytes of cache, memory per process, hours, money, and what would not fit.

Reads sizes only: nothing is downloaded, no weights are made. Counts may be written as 500M or 1.5B, sizes as 80GB. Ends, after the
tables, with exit status 2 where the setting asked for does not fit the machine, and with 3 where it would but for settings that do not
go together, such as parallel=zero1 with optimizer.rule=muon.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtp_train.commandline import conf_dir, typed
from mtp_train.quantity import parse_count
from mtp_train.runtime import atomic_write_json
from mtp_train.stage import build, call, load_word, plain, stage
from mtp_train.typed import fit

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from mtp_train.head.base import Head
    from mtp_train.planning.work import Workload
    from mtp_train.target.weights import SharedWeights
    from mtp_train.trainer.objective import Objective


def _objective(cfg: DictConfig) -> Objective:
    """The losses, for what they hold while they run; train says what is wrong with their settings."""
    from mtp_train.trainer.objective import Objective, Term

    given = {word: entry if isinstance(entry, dict) else {"weight": entry} for word, entry in plain(cfg.losses).items()}
    if without := [word for word, entry in given.items() if "weight" not in entry]:
        raise ValueError(f"losses.{without[0]}: expected a weight, found {given[without[0]]}")
    terms = {
        word: Term(
            fit(float, entry["weight"], f"losses.{word}.weight"),
            build({**load_word("loss", word), **{k: v for k, v in entry.items() if k != "weight"}}),
        )
        for word, entry in given.items()
        if entry["weight"]
    }
    return Objective(terms=terms, draft_steps=cfg.draft_steps, decay=cfg.depth_decay, chunk_rows=cfg.chunk_rows)


def _work(cfg: DictConfig, head: Head, *, num_tokens: int, exact_teacher: bool) -> Workload:
    from mtp_train.planning.work import Workload

    return Workload(
        num_tokens=num_tokens,
        mean_length_tokens=parse_count(cfg.prompt.mean_length_tokens, where="prompt.mean_length_tokens"),
        answer_share=cfg.prompt.answer_share,
        top_k=cfg.top_k,
        num_taps=len(head.target_layer_ids if cfg.target_layer_ids is None else cfg.target_layer_ids),
        num_epochs=cfg.num_epochs,
        draft_steps=cfg.draft_steps,
        exact_teacher=exact_teacher,
        tokens_per_pack=parse_count(cfg.tokens_per_pack, where="tokens_per_pack"),
        packs_per_step=cfg.packs_per_step,
        num_eval_prompts=parse_count(cfg.evaluate.num_prompts, where="evaluate.num_prompts"),
        max_new_tokens=cfg.evaluate.max_new_tokens,
        num_speculative_tokens=cfg.evaluate.num_speculative_tokens,
        acceptance_length=cfg.evaluate.acceptance_length,
    )


def _told(cfg: DictConfig) -> list[str]:
    """What train is told of the training that is reckoned with, but for how it is shared out: what was typed of target, head and losses,
    and each setting that is not train's default."""
    from omegaconf import OmegaConf

    own = ("precision", "draft_steps", "depth_decay", "noise_scale", "num_epochs", "chunk_rows", "checkpoint_activations")
    values = {key: cfg[key] for key in own} | {"tokens_per_pack": parse_count(cfg.tokens_per_pack, where="tokens_per_pack")}
    defaults: Any = OmegaConf.load(conf_dir() / "train.yaml")
    changed = {key: str(value).lower() for key, value in values.items() if value != defaults[key]}
    return [*typed("experiment", "target", "head", "losses"), *(f"{key}={value}" for key, value in changed.items())]


# Another than that of a setting that does not fit: no other machine is needed.
_EXIT_CONFLICT = 3

# What the defaults in conf/plan.yaml do not tell: counts as people write them, and what may be null.
_COUNT = int | float | str
_KINDS = {
    "out": str | None,
    "prompt.num_tokens": _COUNT,
    "prompt.mean_length_tokens": _COUNT,
    "tokens_per_pack": _COUNT,
    "evaluate.num_prompts": _COUNT,
    "top_k": int | None,
    "target_layer_ids": list[int] | None,
    "losses": dict[str, float | dict[str, Any]],
    "optimizer.rule": str | None,
    "hardware.usd_per_hour": float | None,
    "assume": dict[str, float],
}


@stage("plan", kinds=_KINDS)
def main(cfg: DictConfig) -> None:
    num_tokens = parse_count(plain(cfg.prompt)["num_tokens"], where="prompt.num_tokens")  # before what takes seconds to import

    from rich.console import Console

    from mtp_train.nn.layer import read_config
    from mtp_train.planning.hardware import Hardware
    from mtp_train.planning.plan import Asked, make_plan
    from mtp_train.planning.sizes import chosen_share, head_sizes, meta_head, read_target_sizes, target_folder
    from mtp_train.planning.table import print_plan, to_json
    from mtp_train.planning.work import Assumptions

    hardware = Hardware.read(plain(cfg.hardware))
    objective = _objective(cfg)
    node: dict[str, Any] = plain(cfg.head)
    if node.get("init") == "target_last_layer":
        node["init"] = "random"  # of the same size, and needs no weights to be read
    if node.get("revision") is not None and node.get("config") is None:
        raise ValueError(
            "head.config: expected the sizes of a model that is on the hub, found null; nothing is downloaded to plan: name them"
        )
    with target_folder(plain(cfg.target)) as folder:
        target = read_target_sizes(folder, name=cfg.target.name)

        def make_head(shared: SharedWeights) -> Head:
            head: Head = build(node, target_path=folder, shared=shared, trust_remote_code=False)
            return head

        meta = meta_head(make_head, target)
        objective.check(meta)
        if cfg.draft_steps < meta.num_blocks:
            raise ValueError(f"draft_steps: expected at least head.num_blocks, {meta.num_blocks}, found {cfg.draft_steps}")
        work = _work(cfg, meta, num_tokens=num_tokens, exact_teacher=objective.needs("exact_teacher"))
        plan = make_plan(
            target=target,
            head=head_sizes(meta, word=meta.word, chosen=chosen_share(read_config(folder, trust_remote_code=False))),
            make_head=make_head,
            objective=objective,
            hardware=hardware,
            work=work,
            assume=call(Assumptions, cfg.assume, where="assume"),
            asked=Asked(
                codec=cfg.codec,
                mode=cfg.parallel.mode,
                rule=cfg.optimizer.rule,
                context=cfg.parallel.context,
                recompute=cfg.checkpoint_activations,
                precision=cfg.precision,
                noise=cfg.noise_scale > 0,
                batch_size=cfg.evaluate.batch_size,
            ),
        )
    print_plan(plan, Console(width=None if sys.stdout.isatty() else 132), told=_told(cfg))
    if cfg.out is not None:
        atomic_write_json(Path(cfg.out), to_json(plan))
    if plan.problems:
        raise ValueError("this setting does not fit:\n" + "\n".join(f"  {line}" for line in (*plan.problems, *plan.conflicts)))
    if plan.conflicts:
        lines = "\n".join(f"  {conflict}" for conflict in plan.conflicts)
        print(f"\nmtp-train plan: these settings do not go together:\n{lines}", file=sys.stderr)
        sys.exit(_EXIT_CONFLICT)


if __name__ == "__main__":
    main()
