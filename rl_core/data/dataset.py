"""Prepared rows with their prompts as tokens."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jinja2

from rl_core.data.rows import Row, parse_parquet
from rl_core.errors import InputError
from rl_core.storage import Store

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Schema = dict[str, Any]
ToolsOf = Callable[[Row], list[Schema]]
"""The schemas of the tools that a row's policy may call, which are part of its prompt."""


def without_tools(row: Row) -> list[Schema]:
    """No tools."""
    return []


def check_tokenizer(tokenizer: "PreTrainedTokenizerBase", path: str) -> None:
    """Raises InputError when the tokenizer has no chat template."""
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(
            "a tokenizer with a chat template",
            "no chat template in its folder",
            path,
            "use an instruction-tuned model, or put a chat_template.jinja beside the tokenizer's files",
        )


def encode_prompt(
    tokenizer: "PreTrainedTokenizerBase", prompt: list[dict[str, str]], where: str, tools: list[Schema] | None = None
) -> list[int]:
    """Token ids of the messages, with the schemas of tools, and the start of the answer.

    Raises InputError when the template refuses them.
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
    except (jinja2.TemplateError, ValueError, TypeError) as error:
        raise InputError(
            "messages that the model's chat template accepts",
            f"{type(error).__name__}: {error}",
            where,
            "change the roles or their order in the row's prompt",
        ) from error


class RLHFDataset:
    """Rows of one split; item i is the row with its `prompt_ids`, made on first use and then kept."""

    def __init__(
        self, rows: list[Row], tokenizer: "PreTrainedTokenizerBase", tools_of: ToolsOf = without_tools
    ) -> None:
        self.rows, self.tokenizer, self.tools_of = rows, tokenizer, tools_of
        self._prompt_ids: dict[int, list[int]] = {}

    @classmethod
    def load(
        cls, store: Store, split: str, tokenizer: "PreTrainedTokenizerBase", tools_of: ToolsOf = without_tools
    ) -> "RLHFDataset":
        """The split (`train` or `val`) that `prepare_data` has committed; raises InputError when there is none."""
        if store.read_manifest("data") is None:
            raise InputError("prepared data", "no committed folder data", store.url, "prepare the data first")
        name = f"data/{split}.parquet"
        return cls(parse_parquet(store.read_bytes(name), f"{name} in {store.url}"), tokenizer, tools_of)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Row:
        row = self.rows[i]
        if i not in self._prompt_ids:
            self._prompt_ids[i] = encode_prompt(self.tokenizer, row["prompt"], f"row {i + 1}", self.tools_of(row))
        return {"prompt_ids": self._prompt_ids[i], **row}
