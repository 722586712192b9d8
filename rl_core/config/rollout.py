"""The settings of rollouts: the engine, where and when it runs, and what a policy may do in a conversation."""

from typing import Literal

from pydantic import Field

from rl_core.config.learning import Section


class RolloutConfig(Section):
    """Sampling, and the engine that samples."""

    n: int = Field(8, ge=1)
    """Responses per prompt."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature of training rollouts; the trainer's log-probs use it too."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Smallest share of probability that tokens are drawn from; below 1 the engine's log-probs are of that share only,
    so corrections and stale rollouts, which compare them with the trainer's, are refused."""
    top_k: int = Field(0, ge=0)
    """Number of likeliest tokens that are drawn from; 0 takes all. What `top_p` says of log-probs holds here too."""
    log_probs: bool = True
    """Ask the engine for the log-probs of what it samples: corrections, stale rollouts and the mismatch metrics need
    them; on a GPU sampling is much faster without."""
    mode: Literal["sync", "one_step_off", "async"] = "sync"
    """When rollouts are made. sync: with the weights of the step before; one_step_off: the next step's while this one
    trains; async: up to `max_staleness` steps ahead, going on over weight pushes. All but sync need a pool of their
    own (`ranks_per_node`)."""
    max_staleness: int = Field(1, ge=0)
    """Steps by which weights may be behind when a token is sampled; only read in mode async."""
    nodes: int = Field(1, ge=1)
    """Machines of the rollout engines' own pool; only read with `ranks_per_node`."""
    ranks_per_node: int | None = Field(None, ge=1)
    """Rollout processes a machine of their own pool; unset shares the places of the actor (colocated)."""
    tensor_parallel_size: int = Field(1, ge=1)
    """Ranks that serve one copy of the model together."""
    max_num_seqs: int = Field(256, ge=1)
    """Sequences that one engine decodes at a time."""
    kv_cache_gb: float = Field(0.25, gt=0)
    """GiB of key/value cache per engine on a CPU."""
    gpu_memory_utilization: float = Field(0.5, gt=0, le=1)
    """Share of a GPU's memory that the engine may take (weights and key/value cache)."""
    canary_tolerance: float = Field(1e-3, gt=0)
    """Largest difference of log-probs between trainer and engine after a weight push; above it training stops."""


class AgentConfig(Section):
    """What happens between the turns of a conversation; without tools and environment there is one turn."""

    tools: tuple[str, ...] = ()
    """Tools that the policy may call: names from rl_core/rollout/tools or `package.module:name` of your own."""
    mcp_servers: tuple[str, ...] = ()
    """MCP servers whose tools the policy may call: a URL or a command line."""
    parser: Literal["hermes", "qwen3_coder", "llama3", "mistral", "pythonic"] = "hermes"
    """The form in which the model writes tool calls (docs/tools.md)."""
    environment: str | None = None
    """`package.module:Class` that answers a turn without tool calls: a simulated user, a game, a judge."""
    max_turns: int = Field(8, ge=1)
    """Turns of the policy in one conversation."""
    max_tool_calls: int = Field(16, ge=1)
    """Tool calls in one conversation; further ones are answered by an error message."""
    max_tool_tokens: int = Field(256, ge=8)
    """Tokens of one tool's answer; a longer one is cut in the middle."""
    tool_timeout_s: float = Field(30.0, gt=0)
    """Seconds for one tool call; then its process is killed and the policy reads an error message."""
    tool_processes: int = Field(1, ge=1)
    """Processes of each rollout engine that run tools and environments."""
    timeout_s: float = Field(1800.0, gt=0)
    """Seconds for one conversation; then it has failed and trains nothing."""
