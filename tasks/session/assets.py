"""Assets of a run: model, tokenizer, tools, chat template, rows, and local copies of committed folders."""

import shutil
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from rl_core.config.compose import config_hash
from rl_core.data.dataset import RLHFDataset, ToolsOf
from rl_core.models.load import check_model_folder, load_tokenizer, stop_tokens
from rl_core.models.template import templated_folder
from rl_core.models.tiny import save_tiny_model
from rl_core.rollout.agent.chat import ChatTemplate
from rl_core.rollout.agent.responders import chat_template
from rl_core.rollout.agent.tool_runner import tool_schemas
from rl_core.rollout.agent.toolbox import row_schemas
from rl_core.storage import run_files
from rl_core.storage.manifest import Json
from tasks.registry.registry import Registry
from tasks.runs.run import Run


class RunAssets:
    """The assets of one run, each loaded once."""

    def __init__(self, run: Run, registry: Registry, warn: Callable[[str], None]) -> None:
        """`warn` receives a message for every damaged folder."""
        self.run, self.config, self.store = run, run.composed.config, run.store
        self.registry, self._warn = registry, warn
        self._verified: set[str] = set()
        self._downloaded: set[tuple[str, str | None]] = set()

    def forget(self) -> None:
        """Forgets what was verified and downloaded, so that the next attempt of a stage checks every folder again."""
        self._verified.clear()
        self._downloaded.clear()

    def make_base_model(self) -> Path:
        """Folder of the base model; the offline model is built on first use."""
        if self.config.model.path != "tiny":
            folder = check_model_folder(self.config.model.path)
            template, variables = self.config.model.chat_template, self.config.data.chat_template_kwargs
            return templated_folder(folder, template, variables, self.run.home / "models")
        folder = self.run.home / "models" / f"tiny-{config_hash(self.config)[:16]}"
        if not folder.exists():
            draft = folder.with_name(f"{folder.name}.draft")
            shutil.rmtree(draft, ignore_errors=True)
            length = self.config.data.max_prompt_length + self.config.data.max_response_length
            save_tiny_model(draft, self.config.model.tiny, length, self.config.trainer.seed)
            draft.rename(folder)
        return folder

    def fetch_policy_model(self) -> Path:
        """Folder of the initial policy of reinforcement learning: the warm-started model, or else the base model."""
        return self.download(run_files.WARM_START) if self.config.warm_start.steps else self.make_base_model()

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer."""
        return load_tokenizer(self.make_base_model())

    @cached_property
    def tools(self) -> list[dict[str, Any]]:
        """Schemas of the tools that the policy may call."""
        return tool_schemas(self.config.agent)

    @cached_property
    def tools_of(self) -> ToolsOf:
        """The schemas of a row's tools."""
        return row_schemas(self.tools)

    @cached_property
    def chat(self) -> ChatTemplate:
        """The chat template as conversations use it; InputError when it cannot render tools or environment."""
        return chat_template(self.tokenizer, self.tools, self.config.agent, stop_tokens(self.make_base_model()))

    def check_chat_template(self) -> None:
        """Raises InputError when the chat template cannot render the run's conversations."""
        _ = self.chat

    @cached_property
    def train_rows(self) -> RLHFDataset:
        """The committed training rows."""
        return RLHFDataset.load(self.store, "train", self.tokenizer, self.tools_of)

    @cached_property
    def val_rows(self) -> RLHFDataset:
        """The committed held-out rows."""
        return RLHFDataset.load(self.store, "val", self.tokenizer, self.tools_of)

    def verify_or_remove(self, folder: str, content: bool = True) -> Json | None:
        """The manifest of a committed folder; None if the folder has to be built or rebuilt.

        Verified once per attempt; a damaged folder is reported and deleted. Without `content` only names and sizes are
        verified, not checksums.
        """
        if folder not in self._verified and self.store.exists(f"{folder}/{run_files.MANIFEST}"):
            if problems := self.store.verify(folder, content):
                self._warn(f"{self.store.url}/{folder} is damaged and will be rebuilt: {'; '.join(problems)}")
                self.store.remove(folder)
            self._verified.add(folder)
        return self.store.read_manifest(folder)

    def download(self, folder: str) -> Path:
        """Local path of a committed folder of the store; a remote folder is downloaded once per attempt."""
        local = self.store.local_path(folder)
        if local is None:
            local = self.run.home / "cache" / self.run.name / folder
            key = folder, (self.store.read_manifest(folder) or {}).get("sha256")
            if key not in self._downloaded:
                self.store.download(folder, local)
                self._downloaded.add(key)
        return local

    def download_version(self, version: str) -> Path:
        """Local path of a registered version's model folder, downloaded once."""
        return self.registry.local_folder(version, self.run.home / "cache")
