"""What a report takes up of a certificate and of tables of costs: what is of the heads that it measured. The rest is left out, and said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mtp_train.acceptance.certificate import SHOWN_DIGITS, Certificate, GreedyCase
from mtp_train.acceptance.costs import CostTable
from mtp_train.acceptance.report_data import WEIGHTS_FACT, TrainedHead

_AGAIN = "run tools/certify.py again"


def same_weights(sha256: str | None, stated: Any) -> bool:
    """Whether the hash of a head's weights is the one that a report states of it (the fact ``WEIGHTS_FACT``, how a hash begins). What is
    not stated is not the same."""
    return isinstance(sha256, str) and isinstance(stated, str) and stated != "" and sha256.startswith(stated)


def certificate_of(
    certificate: Certificate, *, heads: Sequence[TrainedHead], target: Mapping[str, Any]
) -> tuple[Certificate | None, list[str]]:
    """The certificate without the greedy texts of other weights or another target than the report's (None where nothing is left), and
    a sentence for each head that is left out.

    Sampled cases are of no head and no target of the run's, and stay. So do texts of a head that the report does not hold, which then
    say so: nobody takes them for those of a head beside them.
    """
    stated = {head.name: head.facts.get(WEIGHTS_FACT) for head in heads}
    kept, said = _greedy_of(certificate, stated, fingerprint=target.get("fingerprint"), target_name=str(target.get("name")))
    if not certificate.sampled and not kept:
        return None, said
    return replace(certificate, greedy=tuple(kept)), said


def costs_of(tables: Sequence[CostTable], *, heads: Sequence[TrainedHead]) -> tuple[tuple[CostTable, ...], list[str]]:
    """The tables but for those of other weights of a head in the report, and a sentence for each of these. A table of a head that the
    report does not hold stays: no figures of the report are set against it."""
    stated = {head.name: head.facts.get(WEIGHTS_FACT) for head in heads}
    kept, said = [], []
    for table in tables:
        if table.head not in stated or same_weights(table.head_sha256, stated[table.head]):
            kept.append(table)
            continue
        said.append(
            f"The costs of {table.head} in {table.engine} are left out: expected the weights that were measured "
            f"({short(stated[table.head])}), found others ({short(table.head_sha256)}); run tools/measure_costs.py --name {table.head} "
            f"--engine {table.engine} again, or evaluate, whichever was done with the earlier head."
        )
    return tuple(kept), said


def _greedy_of(
    certificate: Certificate, stated: Mapping[str, Any], *, fingerprint: Any, target_name: str
) -> tuple[list[GreedyCase], list[str]]:
    if not certificate.greedy:
        return [], []
    found = certificate.target_fingerprint
    if found is None:
        return [], [f"The certificate's greedy texts are left out: it was written before it stated the heads' weights; {_AGAIN}."]
    if found != fingerprint:
        return [], [
            f"The certificate's greedy texts are left out: expected those of {target_name} ({short(fingerprint)}), found those of another "
            f"target ({short(found)}); {_AGAIN}, with this one as --target."
        ]
    kept: list[GreedyCase] = []
    dropped: dict[tuple[str, str], list[str]] = {}
    for case in certificate.greedy:
        if case.weights_sha256 is None or same_weights(case.weights_sha256, stated.get(case.head)):
            kept.append(case)
        elif case.head not in stated:
            kept.append(replace(case, head=f"{case.head} (not in this report)"))
        else:
            dropped.setdefault((case.head, case.weights_sha256), []).append(case.drafted)
    return kept, [
        f"The certificate's greedy texts of {head} ({'; '.join(drafts)}) are left out: expected the weights that were measured "
        f"({short(stated[head])}), found others ({short(sha256)}); {_AGAIN}, or evaluate, whichever was done with the earlier head."
        for (head, sha256), drafts in dropped.items()
    ]


def short(sha256: str | None) -> str:
    """A hash as sentences show it."""
    return "none stated" if sha256 is None else sha256[:SHOWN_DIGITS]
