"""Settings of the model, its adapters, and its layout on devices."""

from typing import Literal

from pydantic import Field

from rl_core.config.learning import MAX_COUNT, MAX_VALUE, Section


class TinyModelConfig(Section):
    """Size of the offline model."""

    hidden_size: int = Field(64, ge=32, le=1_000_000)
    """Hidden size of the offline model."""
    layers: int = Field(2, ge=1, le=10_000)
    """Number of transformer layers."""
    heads: int = Field(1, ge=1, le=10_000)
    """Number of attention heads, 64 channels each."""


class LoraConfig(Section):
    """Low-rank adapters: base weights are frozen and serve as the reference. A critic is still trained in full."""

    rank: int = Field(0, ge=0, le=512)
    """Rank of the adapters trained instead of the policy's weights; 0 trains all weights."""
    alpha: float = Field(32.0, gt=0, le=MAX_VALUE)
    """Adapter outputs are scaled by alpha ÷ rank."""
    target_modules: tuple[str, ...] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    """Names of the linear layers that get an adapter; [all-linear] selects all except the head."""
    push: Literal["merged", "adapter"] = "merged"
    """Weights pushed to the rollout engine after each step. merged: full weights with the adapters merged in; fastest
    decoding. adapter: adapters only; little to transfer, and bfloat16 does not round small weight changes away."""


class ModelConfig(Section):
    """The trained model."""

    path: str = "tiny"
    """Folder of a Hugging Face checkpoint, or `tiny` for the offline model built in code."""
    chat_template: str | None = None
    """Chat template instead of the checkpoint's own: a Jinja file, or `chatml`, which is append-only. Exports have it
    too."""
    tiny: TinyModelConfig = TinyModelConfig()
    """Size of the offline model; used only with model.path=tiny."""
    lora: LoraConfig = LoraConfig()
    """Low-rank adapters; off by default."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of computation and of the rollout engine's weights; master weights are always float32."""


class FSDPConfig(Section):
    """Device layout and execution of actor, critic and reference; does not affect what is learned."""

    shard_size: int | None = Field(None, ge=1, le=MAX_COUNT)
    """Ranks over which weights, gradients and optimizer states are sharded; unset: all ranks. A smaller value is
    HybridShard: each group of `shard_size` ranks holds one copy."""
    sequence_parallel_size: int = Field(1, ge=1, le=MAX_COUNT)
    """Ranks that share each sequence (Ulysses); for sequences whose activations do not fit on one device."""
    activation_checkpointing: bool = False
    """Recompute each layer in the backward pass instead of storing its activations."""
    compile: bool = False
    """Compile each layer with torch.compile: faster steps on CUDA after minutes of compilation."""
    offload: Literal["none", "idle", "always"] = "none"
    """CUDA: what is kept in host memory. idle: weights and optimizer states while not in use (during rollouts).
    always: weights, gradients and optimizer states; the optimizer step runs on the CPU."""
    reference_offload: bool = False
    """CUDA: keep the reference's weights in host memory and copy them to the device layer by layer."""
