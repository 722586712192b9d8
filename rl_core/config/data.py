"""Settings of the training and held-out rows: sources, limits and filters."""

import itertools
from typing import Annotated, Literal

from pydantic import Field

from rl_core.config.learning import MAX_COUNT, MAX_VALUE, Section

TemplateValue = (
    bool
    | Annotated[int, Field(ge=-MAX_COUNT, le=MAX_COUNT)]
    | Annotated[float, Field(ge=-MAX_VALUE, le=MAX_VALUE)]
    | str
)
DropReason = Literal["malformed", "overlong", "duplicate", "held_out"]


class SourceConfig(Section):
    """A single source of rows."""

    source: str = "sort_digits"
    """Name of a module in rl_core/data/sources, or `files` to read your own files."""
    path: str | tuple[str, ...] | None = None
    """Input of the source: a file, a folder, a pattern such as `rows/*.parquet`, or a list of these; local or a URL
    such as s3://…. Not needed by sources that generate their rows."""
    val_path: str | tuple[str, ...] | None = None
    """The same for held-out rows; used only by source `files`."""
    columns: tuple[str, ...] = ()
    """Additional columns to keep, for a custom scorer or tool; used only by source `files`."""
    train_rows: int | None = Field(None, ge=1, le=MAX_COUNT)
    """Training rows to generate or keep; unset keeps all (a source that generates rows has its own default)."""
    val_rows: int | None = Field(None, ge=1, le=MAX_COUNT)
    """Held-out rows to generate or keep; unset keeps all."""
    difficulty: int = Field(5, ge=1, le=10_000)
    """Size of a generated problem (digits per line for `sort_digits`)."""
    tasks: tuple[str, ...] = ()
    """Names of the source's tasks, in equal shares; used only by source `reasoning_gym`."""
    weight: float = Field(1.0, gt=0, le=MAX_VALUE)
    """Share of training prompts relative to the other entries; used only in `data.mixture`."""


class DataConfig(SourceConfig):
    """Training and held-out rows from one source or a mixture of sources."""

    mixture: tuple[SourceConfig, ...] = ()
    """Several sources, as in `[{source: gsm8k, path: …, weight: 2}, {source: files, …}]`; replaces `data.source` and
    the settings that belong to it."""
    train_batch_size: int = Field(64, ge=1, le=MAX_COUNT)
    """Prompts per step."""
    max_prompt_length: int = Field(512, ge=1, le=MAX_COUNT)
    """Maximum tokens of a prompt; `drop` decides what happens to rows with a longer one."""
    max_response_length: int = Field(512, ge=1, le=MAX_COUNT)
    """Maximum tokens of a response, including its end token."""
    chat_template_kwargs: dict[str, TemplateValue] = Field({})
    """Variables of the chat template, as in `{enable_thinking: false}`; exports have them in their template."""
    drop: tuple[DropReason, ...] = ()
    """Kinds of rows that are dropped, counted and listed in a file: malformed (not a valid row), overlong (prompt too
    long), duplicate (same prompt as an earlier row), held_out (training prompt that is also held out). Kinds that are
    not listed stop the run before anything starts, except duplicates, which are only counted."""
    max_dropped_share: float = Field(0.1, ge=0, le=1)
    """Maximum share of a split's rows that may be dropped; above it the run stops before anything starts."""

    @property
    def sources(self) -> tuple[SourceConfig, ...]:
        """The mixture's sources, or the single source."""
        return self.mixture or (self,)

    @property
    def paths(self) -> tuple[str, ...]:
        """All paths of all sources, including held-out rows, without duplicates."""
        paths = [path for source in self.sources for path in (source.path, source.val_path) if path]
        return tuple(dict.fromkeys(itertools.chain(*([path] if isinstance(path, str) else path for path in paths))))
