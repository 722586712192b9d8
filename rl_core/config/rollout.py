"""Settings of rollouts: sampling, the rollout engine and its placement, tools and environments."""

from typing import Annotated, Literal

from pydantic import Field

from rl_core.config.learning import ALWAYS, CODE, MAX_COUNT, MAX_PROCESSES, MAX_SECONDS, MAX_VALUE, Section


class RolloutConfig(Section):
    """Sampling and the rollout engine."""

    engine: Literal["auto", "vllm", "transformers"] = "auto"
    """Rollout engine. auto: vLLM on CUDA and with `tensor_parallel_size` above 1, otherwise transformers, which needs
    fewer CPU seconds. A run keeps the engine it has started with."""
    n: int = Field(8, ge=1, le=1_000_000)
    """Responses per prompt."""
    temperature: float = Field(1.0, ge=0.01, le=100.0)
    """Sampling temperature of training rollouts; the trainer's log-probs use it too."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling: cumulative probability of the tokens sampled from. Below 1 the engine's log-probs cover only
    those tokens, so corrections and stale rollouts, which compare them with the trainer's, are rejected."""
    top_k: int = Field(0, ge=0, le=MAX_COUNT)
    """Number of most likely tokens sampled from; 0 disables the limit. Restricts log-probs as `top_p` does."""
    log_probs: bool = True
    """Return the engine's log-probs of sampled tokens, which corrections, stale rollouts and the mismatch metrics
    require. On a GPU, sampling is much faster without."""
    mode: Literal["sync", "one_step_off", "async"] = "sync"
    """When rollouts are generated. sync: after the previous step's update; one_step_off: for the next step while this
    one trains; async: up to `max_staleness` steps ahead, continuing across weight pushes. All but sync require a
    separate pool (`ranks_per_node`)."""
    max_staleness: int = Field(1, ge=0, le=MAX_COUNT)
    """Maximum steps by which the weights that sample a token may lag behind; used only in mode async."""
    nodes: int = Field(1, ge=1, le=100_000)
    """Machines of the rollout engines' separate pool; used only with `ranks_per_node`."""
    ranks_per_node: int | None = Field(None, ge=1, le=MAX_PROCESSES)
    """Rollout processes per machine of a separate pool; unset shares the actor's slots (colocated)."""
    tensor_parallel_size: int = Field(1, ge=1, le=MAX_COUNT)
    """Ranks that together serve one copy of the model."""
    max_num_seqs: int = Field(256, ge=1, le=MAX_COUNT)
    """Maximum sequences that one engine decodes concurrently."""
    kv_cache_gb: float = Field(0.25, gt=0, le=1e6)
    """Key/value cache per engine on a CPU, in GiB."""
    gpu_memory_utilization: float = Field(0.5, gt=0, le=1)
    """Share of a GPU's memory that the engine may use (weights and key/value cache)."""
    canary_tolerance: float = Field(1e-3, gt=0, le=MAX_VALUE)
    """Maximum absolute difference of log-probs between trainer and engine after a weight push; above it training
    stops. In bfloat16 the limit is at least 4 times the rounding error of a narrow model of the family."""

    def engine_on(self, device: str) -> Literal["vllm", "transformers"]:
        """The engine on a device `cpu` or `cuda`.

        On a CPU, transformers needs fewer CPU seconds per token at every measured size (docs/rollouts.md).
        """
        if self.engine != "auto":
            return self.engine
        return "transformers" if device == "cpu" and self.tensor_parallel_size == 1 else "vllm"


class AgentConfig(Section):
    """Multi-turn conversations; without tools and environment there is a single turn."""

    tools: Annotated[tuple[str, ...], CODE] = ()
    """Tools that the policy may call: names from rl_core/rollout/tools or a custom `package.module:name`."""
    mcp_servers: Annotated[tuple[str, ...], ALWAYS] = ()
    """MCP servers whose tools the policy may call: a URL or a command line each."""
    parser: Literal["hermes", "qwen3_coder", "llama3", "mistral", "pythonic"] = "hermes"
    """Format in which the model writes tool calls (docs/tools.md)."""
    environment: Annotated[str | None, CODE] = None
    """`package.module:Class` that responds to turns without tool calls: a simulated user, a game, a judge."""
    max_turns: int = Field(8, ge=1, le=MAX_COUNT)
    """Maximum policy turns per conversation."""
    max_tool_calls: int = Field(16, ge=1, le=MAX_COUNT)
    """Maximum tool calls per conversation; further calls return an error message."""
    max_tool_tokens: int = Field(256, ge=8, le=MAX_COUNT)
    """Maximum tokens of one tool result; longer results are truncated in the middle."""
    tool_timeout_s: float = Field(30.0, gt=0, le=MAX_SECONDS)
    """Seconds per tool call; then its process is killed and the policy receives an error message."""
    tool_processes: int = Field(1, ge=1, le=MAX_PROCESSES)
    """Processes per rollout engine that run tools and environments."""
    timeout_s: float = Field(1800.0, gt=0, le=MAX_SECONDS)
    """Seconds per conversation; then it counts as failed and is excluded from training."""
