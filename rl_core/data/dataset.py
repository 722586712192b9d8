"""Prepared rows with tokenized prompts."""

import bisect
import itertools
from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from rl_core.data.rows import Row
from rl_core.data.store import StoredRows
from rl_core.errors import InputError, TransientError
from rl_core.storage import run_files
from rl_core.storage.store import Store

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROMPTS_KEPT = 1 << 16
"""Prompts whose tokens are cached, at 4 bytes per token."""

Schema = dict[str, Any]
ToolsOf = Callable[[Row], list[Schema]]
"""Returns the schemas of the tools available in a row, which are part of its prompt."""


def without_tools(row: Row) -> list[Schema]:
    """No tools."""
    return []


def check_tokenizer(tokenizer: "PreTrainedTokenizerBase", path: str) -> None:
    """Raises InputError if the tokenizer has no chat template."""
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(
            "a tokenizer with a chat template",
            "no chat template in its folder",
            path,
            "set model.chat_template=FILE or chatml, or use an instruction-tuned model",
        )


def encode_prompt(
    tokenizer: "PreTrainedTokenizerBase", prompt: list[dict[str, str]], where: str, tools: list[Schema] | None = None
) -> list[int]:
    """Token ids of the messages with the schemas of tools, up to the start of the answer.

    Raises InputError if the chat template rejects them.
    """
    try:
        return list(
            tokenizer.apply_chat_template(
                prompt,
                tools=tools or None,  # type: ignore[arg-type]
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
            )
        )
    except Exception as error:  # templates are programs and can raise anything
        raise InputError(
            expected="messages that the model's chat template accepts",
            seen=f"{type(error).__name__}: {error}",
            where=where,
            fix="change the roles or their order in the row's prompt",
        ) from error


class RLHFDataset:
    """Rows of one split; item i is the row with its `prompt_ids`, which are computed on access and cached.

    Rows of several sources are concatenated; `sizes` is the number of rows of each.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        tokenizer: "PreTrainedTokenizerBase",
        tools_of: ToolsOf = without_tools,
        sizes: Sequence[int] | None = None,
    ) -> None:
        self.rows, self.tokenizer, self.tools_of = rows, tokenizer, tools_of
        self.sizes = sizes or [len(rows)]
        self._ends = list(itertools.accumulate(self.sizes))
        self._prompt_ids = lru_cache(PROMPTS_KEPT)(self._encode)

    @classmethod
    def load(
        cls, store: Store, split: str, tokenizer: "PreTrainedTokenizerBase", tools_of: ToolsOf = without_tools
    ) -> "RLHFDataset":
        """The split (`train` or `val`) committed by `prepare_data`; raises InputError if there is none."""
        manifest = store.read_manifest(run_files.DATA)
        if manifest is None:
            raise InputError("prepared data", "no committed folder `data`", store.url, "prepare the data first")
        sizes = [source["train_rows"] for source in manifest["meta"]["sources"]] if split == "train" else None
        rows, count = StoredRows(store, split), manifest["meta"][f"{split}_rows"]
        if len(rows) != count:
            raise TransientError(f"{store.url} lists only {len(rows)} of the {count} committed {split} rows")
        return cls(rows, tokenizer, tools_of, sizes)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Row:
        return {"prompt_ids": self._prompt_ids(i).tolist(), **self.rows[i]}

    def source_of(self, i: int) -> int:
        """Index of the source of row i."""
        return bisect.bisect_right(self._ends, i)

    def _encode(self, i: int) -> "array[int]":
        row = self.rows[i]
        return array("i", encode_prompt(self.tokenizer, row["prompt"], f"row {i + 1}", self.tools_of(row)))
