"""The settings of rows: where they come from, what is checked of them, and which are left out."""

import itertools
from typing import Literal

from pydantic import Field

from rl_core.config.learning import Section

DropReason = Literal["malformed", "overlong", "duplicate", "held_out"]


class SourceConfig(Section):
    """One source of rows."""

    source: str = "sort_digits"
    """Where rows come from: the name of a module in rl_core/data/sources, or `files` for your own files."""
    path: str | tuple[str, ...] | None = None
    """What the source reads: a file, a folder, a pattern such as `rows/*.parquet`, or several of them; local or a URL
    such as s3://…; sources that make their rows on the fly need none."""
    val_path: str | tuple[str, ...] | None = None
    """The same for held-out rows; only read by source `files`."""
    columns: tuple[str, ...] = ()
    """Further columns that the rows keep, for a scorer or tool of your own; only read by source `files`."""
    train_rows: int | None = Field(None, ge=1)
    """Number of training rows to make or keep; unset keeps all (a source that makes rows has its own default)."""
    val_rows: int | None = Field(None, ge=1)
    """Number of held-out rows to make or keep; unset keeps all."""
    difficulty: int = Field(5, ge=1)
    """Size of a made problem (digits in a line for `sort_digits`)."""
    tasks: tuple[str, ...] = ()
    """Names of tasks of the source, in equal shares; only read by source `reasoning_gym`."""
    weight: float = Field(1.0, gt=0)
    """Share of the training prompts, relative to that of the other sources of `data.mixture`; only read there."""


class DataConfig(SourceConfig):
    """The training and held-out rows: one source, or a mixture of several."""

    mixture: tuple[SourceConfig, ...] = ()
    """Several sources at once, as in `[{source: gsm8k, path: …, weight: 2}, {source: files, …}]`; they take the place
    of `data.source` and the settings that belong to it."""
    train_batch_size: int = Field(64, ge=1)
    """Prompts per step."""
    max_prompt_length: int = Field(512, ge=1)
    """Tokens; what happens to rows with a longer prompt is said by `drop`."""
    max_response_length: int = Field(512, ge=1)
    """Tokens that a response may have, its end token included."""
    drop: tuple[DropReason, ...] = ()
    """Kinds of rows that are left out, counted and listed in a file: malformed (no row at all), overlong (prompt),
    duplicate (same prompt as an earlier row), held_out (training prompt that is held out too). Otherwise such a row
    stops the run before anything starts, but for duplicates, which are only counted."""
    max_dropped_share: float = Field(0.1, ge=0, le=1)
    """Share of a split's rows that may be dropped; above it the run stops before anything starts."""

    @property
    def sources(self) -> tuple[SourceConfig, ...]:
        """The sources of the run: those of the mixture, or the only one."""
        return self.mixture or (self,)

    @property
    def paths(self) -> tuple[str, ...]:
        """All that the sources read, held-out rows too."""
        given = [path for source in self.sources for path in (source.path, source.val_path) if path]
        return tuple(dict.fromkeys(itertools.chain(*([path] if isinstance(path, str) else path for path in given))))
