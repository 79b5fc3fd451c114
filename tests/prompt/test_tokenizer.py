"""A folder without a tokenizer is told so, before transformers is asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtp_train.prompt.tokenizer import load_tokenizer


def test_what_is_no_tokenizer_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected a model folder with a tokenizer, found nothing there"):
        load_tokenizer(tmp_path / "none")
    with pytest.raises(ValueError, match=r"expected a tokenizer, found none of tokenizer\.json, tokenizer_config\.json, "):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}", encoding="utf-8")
    for content in (None, "{}", '{"added_tokens": [], "model": 3}'):  # transformers says each in another way
        if content is not None:
            (tmp_path / "tokenizer.json").write_text(content, encoding="utf-8")
        with pytest.raises(ValueError, match=r"expected a tokenizer .*, found: \S") as caught:
            load_tokenizer(tmp_path)
        assert "\n" not in str(caught.value)
