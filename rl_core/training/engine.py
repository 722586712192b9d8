"""FSDP2 training engine: a module sharded over the ranks, its optimizer, and the optimizer step on a mini-batch.

The same code runs on one rank and on many. Losses are already divided by the mini-batch's global counts, so the
gradient is the same for every split into micro-batches and over ranks.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rl_core.config.schema import FSDPConfig, OptimConfig
from rl_core.data.protocol import DataProto
from rl_core.errors import TrainingError
from rl_core.models.conversion import persistent_buffers
from rl_core.models.load import PolicyModel, ValueModel
from rl_core.models.lora import base_name, factors, is_adapter, peft_name
from rl_core.models.weights import load_weights
from rl_core.training.mesh import RankMesh
from rl_core.training.optimizer import build_optimizer, learning_rate
from rl_core.training.packing import micro_batches

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LossFunction = Callable[[tuple[Tensor, ...], DataProto], tuple[Tensor, dict[str, Tensor]]]
"""Maps the outputs [b, R] of a micro-batch and its rows to loss and metrics, as shares of the mini-batch's total."""


class TrainEngine:
    """A sharded module (policy or value model) with its optimizer; without `optim`, inference only (reference)."""

    def __init__(
        self,
        module: PolicyModel | ValueModel,
        source: Path,
        rank_mesh: RankMesh,
        config: FSDPConfig,
        dtype: str,
        optim: OptimConfig | None,
        total_updates: int,
        max_tokens: int,
        seed: int = 0,
    ) -> None:
        """Loads the weights of the module, which is on the meta device, from `source`; collective over all ranks.

        Args:
            total_updates: optimizer steps of the whole run, for the learning-rate schedule.
            max_tokens: maximum number of packed tokens in a micro-batch.
            seed: seed of the adapters' initial values.
        """
        self.rank_mesh, self.device, self.max_tokens, self.source = rank_mesh, rank_mesh.device, max_tokens, source
        self.module, self.model, self.dtype = module, module.hf, DTYPES[dtype]
        on_gpu = self.device.type == "cuda"
        always = config.offload == "always" or (optim is None and config.reference_offload)
        self._always_offloaded, self._offloads_when_idle = on_gpu and always, on_gpu and config.offload == "idle"
        self._is_offloaded = False
        if config.activation_checkpointing:
            self.model.gradient_checkpointing_enable()
        self._shard(self.dtype, config.compile)
        load_weights(module, self.model, source, torch.device("cpu") if self._always_offloaded else self.device, seed)
        if self._always_offloaded:
            for part in module.modules():
                for name, buffer in part.named_buffers(recurse=False):
                    setattr(part, name, buffer.to(self.device))
        self.optim_config, self.total_updates, self.updates, self.skipped = optim, total_updates, 0, 0
        self.optimizer = build_optimizer(module, optim) if optim else None

    def _shard(self, dtype: torch.dtype, compiled: bool) -> None:
        """Shards each layer over the mesh; computes in `dtype`, stores weights and reduces gradients in float32."""
        options: dict[str, Any] = {
            "mesh": self.rank_mesh.mesh,
            "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
        }
        if self._always_offloaded:
            options["offload_policy"] = CPUOffloadPolicy()
        layers = set(self.model._no_split_modules or [])
        for child in self.module.modules():
            if type(child).__name__ in layers:
                if compiled:
                    child.compile()
                fully_shard(child, **options)
        fully_shard(self.module, **options)

    @torch.no_grad()
    def compute(self, rows: DataProto, *args: float) -> tuple[Tensor, ...]:
        """Outputs of the module for all response tokens, each [B, R] float32 on the CPU."""
        self._onload()
        self.module.eval()
        outputs = Outputs()
        for indices, micro in micro_batches(rows, self.max_tokens, self.rank_mesh):
            outputs.add(indices, [micro.pad(v) for v in _as_tuple(self.module(micro.packed, micro.target_N, *args))])
        self.module.reshard()  # type: ignore[operator]
        return outputs.on_cpu()

    def train_mini_batch(
        self, rows: DataProto, loss_function: LossFunction, *args: float, keep: "Outputs | None" = None
    ) -> dict[str, float]:
        """One optimizer step on this rank's rows of a mini-batch; returns metrics that are the same on all ranks.

        `keep` receives the module's outputs before the step, which equal those of `compute`.

        A step with a non-finite gradient is skipped: weights, moments and schedule do not change, and the only metric
        is `skipped_updates` 1. Raises TrainingError after more than `max_skipped_updates` skipped steps in a row.
        """
        assert self.optimizer is not None and self.optim_config is not None
        self._onload()
        self.module.train()
        totals: dict[str, Tensor] = {}
        for indices, micro in micro_batches(rows, self.max_tokens, self.rank_mesh):
            outputs = tuple(micro.pad(v) for v in _as_tuple(self.module(micro.packed, micro.target_N, *args)))
            if keep is not None:
                keep.add(indices, outputs)
            loss, shares = loss_function(outputs, micro.rows)
            # FSDP averages gradients over the ranks, but the loss is a share of a global mean and needs their sum. The
            # same holds for ranks that share sequences: each has the same loss and a part of its gradient.
            (loss * dist.get_world_size()).backward()
            for name, share in {**shares, "loss": loss}.items():
                totals[name] = totals.get(name, torch.zeros((), device=self.device)) + share.detach().float()
        norm = self._clip(self.optim_config.grad_clip)
        lr = learning_rate(self.optim_config, self.updates, self.total_updates)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        # The optimizer skips the step on the device if `found_inf` is set; a check here would force a device sync.
        self.optimizer.grad_scale, self.optimizer.found_inf = None, (~norm.isfinite()).float()  # type: ignore[attr-defined]
        self.optimizer.step()
        self.optimizer.zero_grad()
        # Reduce the norm with the metrics so that there is a single device sync.
        sums = sum_over_ranks({**totals, "grad_norm": norm.to(self.device)})
        grad_norm = sums.pop("grad_norm") / dist.get_world_size()
        if not math.isfinite(grad_norm):
            return self._skip(grad_norm)
        self.updates, self.skipped = self.updates + 1, 0
        ranks_per_sequence = self.rank_mesh.parallel.size if self.rank_mesh.parallel else 1
        metrics = {name: value / ranks_per_sequence for name, value in sums.items()}
        return {**metrics, "grad_norm": grad_norm, "lr": lr, "skipped_updates": 0.0}

    def _clip(self, max_norm: float) -> Tensor:
        """Scales the gradient to a global L2 norm of at most `max_norm`; returns the norm before clipping, a scalar."""
        # Use the local shards: each of these operations costs milliseconds on distributed tensors.
        gradients = [_local(parameter.grad) for parameter in self.module.parameters() if parameter.grad is not None]
        square = nn.utils.get_total_norm(gradients).square()
        dist.all_reduce(square, group=self.rank_mesh.mesh.get_group("shard"))
        norm = square.sqrt()
        torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def _skip(self, grad_norm: float) -> dict[str, float]:
        assert self.optim_config is not None
        self.skipped += 1
        if self.skipped > self.optim_config.max_skipped_updates:
            raise TrainingError(
                f"the gradient of optimizer step {self.updates} is not finite ({grad_norm}), {self.skipped} times in a "
                f"row (limit {self.optim_config.max_skipped_updates}: actor.optim.max_skipped_updates or "
                "critic.optim.max_skipped_updates)"
            )
        return {"skipped_updates": 1.0}

    def offload(self) -> None:
        """Moves weights and optimizer state to host memory until the next use, with `offload: idle`."""
        if self._offloads_when_idle and not self._is_offloaded:
            self._move(torch.device("cpu"))
            self._is_offloaded = True
            torch.cuda.empty_cache()

    def _onload(self) -> None:
        if self._is_offloaded:
            self._move(self.device)
            self._is_offloaded = False

    def _move(self, device: torch.device) -> None:
        self.module.to(device)
        if self.optimizer is not None:
            for state in self.optimizer.state.values():
                state.update({name: value.to(device) for name, value in state.items()})

    def full_parameters(self, merged: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Yields name and whole tensor of each weight and persistent buffer of the Hugging Face model; collective over
        all ranks.

        Adapters are merged into the weights if `merged`, otherwise omitted.
        """
        self._onload()
        adapters = factors(self.model) if merged else {}
        for name, parameter in self.model.named_parameters():
            if not is_adapter(name):
                whole = self._whole(parameter)
                if name in adapters:
                    a, b, scale = adapters[name]
                    whole = whole + scale * (self._whole(b) @ self._whole(a))
                yield base_name(name), whole
        yield from persistent_buffers(self.model)
        output, embedding = self.model.get_output_embeddings(), self.model.get_input_embeddings()
        if output is not None and output.weight is embedding.weight:
            # Tied weights are listed once; without an update of the head, a rollout engine would keep its old copy.
            yield "lm_head.weight", self._whole(cast(nn.Parameter, embedding.weight))

    def in_dtype(self, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """The named weights in `dtype`; buffers, such as routing biases, keep their own, as in the forward pass."""
        buffers = {name for name, _ in persistent_buffers(self.model)}
        for name, tensor in weights:
            yield name, tensor if name in buffers else tensor.to(dtype)

    def adapter_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yields PEFT name and whole tensor of each adapter weight; collective over all ranks."""
        self._onload()
        for name, parameter in self.model.named_parameters():
            if is_adapter(name):
                yield peft_name(name), self._whole(parameter)

    def _trained(self) -> dict[str, nn.Parameter]:
        return {name: parameter for name, parameter in self.module.named_parameters() if parameter.requires_grad}

    def _whole(self, parameter: Tensor) -> Tensor:
        whole = parameter.detach().to(self.device)
        if not isinstance(whole, DTensor):
            return whole
        # A single rank already has the whole tensor; `full_tensor` would cost a quarter of a weight push.
        return whole.to_local() if whole.device_mesh.size() == 1 else whole.full_tensor()

    def state(self) -> dict[str, dict[str, Tensor] | Tensor]:
        """Checkpoint state: trained weights, their Adam moments and the update counts, as (sharded) tensors only."""
        assert self.optimizer is not None
        counts = torch.tensor([self.updates, self.skipped])
        state: dict[str, dict[str, Tensor] | Tensor] = {"counts": counts}
        named = self._trained()
        state["model"] = {name: parameter.detach() for name, parameter in named.items()}
        for moment in ("exp_avg", "exp_avg_sq"):
            state[moment] = {
                name: self.optimizer.state[parameter].get(moment, torch.zeros_like(parameter))
                for name, parameter in named.items()
            }
        return state

    def load_state(self, state: dict[str, dict[str, Tensor] | Tensor]) -> None:
        """Restores moments and counts of a `state`, possibly resharded; the weights have been loaded in place."""
        assert self.optimizer is not None
        counts, moments_1, moments_2 = state["counts"], state["exp_avg"], state["exp_avg_sq"]
        assert isinstance(counts, Tensor) and isinstance(moments_1, dict) and isinstance(moments_2, dict)
        self.updates, self.skipped = counts.tolist()
        for name, parameter in self._trained().items():
            self.optimizer.state[parameter] = {
                "step": torch.tensor(float(self.updates), device=parameter.device),
                "exp_avg": moments_1[name],
                "exp_avg_sq": moments_2[name],
            }


class Outputs:
    """Outputs of a module for some rows, collected from their micro-batches."""

    def __init__(self) -> None:
        self.parts, self.indices = list[list[Tensor]](), list[int]()

    def add(self, indices: list[int], outputs: Sequence[Tensor]) -> None:
        """Adds the outputs [b, R] of the rows at `indices`."""
        self.indices += indices
        self.parts.append([output.detach() for output in outputs])

    def on_cpu(self) -> tuple[Tensor, ...]:
        """Each output [B, R] float32 on the CPU, in the order of the rows."""
        order = torch.tensor(self.indices).argsort()
        return tuple(torch.cat(parts).float().cpu()[order] for parts in zip(*self.parts, strict=True))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _as_tuple(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def sum_over_ranks(values: dict[str, Tensor]) -> dict[str, float]:
    """Sums of scalars over all ranks, in a single all-reduce."""
    packed = torch.stack(list(values.values()))
    dist.all_reduce(packed)
    return dict(zip(values, packed.tolist(), strict=True))
