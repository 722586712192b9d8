"""The FSDP2 training engine: a module sharded over the ranks, its optimizer, and a step over a mini-batch.

The same code runs with one rank and with many. Losses arrive already divided by the mini-batch's global counts, so the
gradient is the same for every split into micro-batches and over ranks.
"""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from rl_core.config.schema import OptimConfig
from rl_core.data.protocol import DataProto
from rl_core.errors import TrainingError
from rl_core.training.optimizer import build_optimizer, learning_rate
from rl_core.training.packing import micro_batches

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# From the outputs [b, R] of a micro-batch and its rows: the loss and metrics, each a share of the mini-batch's total.
LossFunction = Callable[[tuple[Tensor, ...], DataProto], tuple[Tensor, dict[str, Tensor]]]


def shard(module: nn.Module, model: PreTrainedModel, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Shards layer by layer over the mesh; computes in `dtype`, keeps weights and reduces gradients in float32."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    layers = set(model._no_split_modules or [])
    for child in module.modules():
        if type(child).__name__ in layers:
            fully_shard(child, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)


class TrainEngine:
    """A sharded module (policy or value model) with its optimizer; without `optim` it only computes (a reference)."""

    def __init__(
        self,
        module: nn.Module,
        model: PreTrainedModel,
        mesh: DeviceMesh,
        device: torch.device,
        dtype: str,
        optim: OptimConfig | None,
        total_updates: int,
        max_tokens: int,
    ) -> None:
        self.device, self.max_tokens = device, max_tokens
        self.module = module.to(device)
        shard(self.module, model, mesh, DTYPES[dtype])
        self.optim_config, self.total_updates, self.updates = optim, total_updates, 0
        self.optimizer = build_optimizer(self.module, optim) if optim else None

    @torch.no_grad()
    def compute(self, rows: DataProto, *args: float) -> tuple[Tensor, ...]:
        """The module's outputs for all response tokens, each [B, R] float32 on the CPU."""
        self.module.eval()
        outputs: list[Tensor] = []
        for indices, micro in micro_batches(rows, self.max_tokens, self.device):
            for k, values_N in enumerate(_as_tuple(self.module(micro.packed, micro.target_N, *args))):
                if k == len(outputs):
                    outputs.append(torch.zeros(rows.batch["responses"].shape))
                outputs[k][indices] = micro.pad(values_N).cpu()
        self.module.reshard()  # type: ignore[operator]
        return tuple(outputs)

    def train_mini_batch(self, rows: DataProto, loss_function: LossFunction, *args: float) -> dict[str, float]:
        """One optimizer step on this rank's rows of a mini-batch; returns metrics that are the same on all ranks.

        Raises TrainingError when the gradient is not finite; the weights are then unchanged.
        """
        assert self.optimizer is not None and self.optim_config is not None
        self.module.train()
        totals: dict[str, Tensor] = {}
        for _, micro in micro_batches(rows, self.max_tokens, self.device):
            outputs = tuple(micro.pad(v) for v in _as_tuple(self.module(micro.packed, micro.target_N, *args)))
            loss, shares = loss_function(outputs, micro.rows)
            # FSDP averages gradients over the ranks; the loss is a share of a global mean and wants their sum.
            (loss * dist.get_world_size()).backward()
            for name, share in {**shares, "loss": loss}.items():
                totals[name] = totals.get(name, torch.zeros((), device=self.device)) + share.detach().float()
        grad_norm = nn.utils.clip_grad_norm_(self.module.parameters(), self.optim_config.grad_clip)
        grad_norm = grad_norm.full_tensor() if isinstance(grad_norm, DTensor) else grad_norm
        if not torch.isfinite(grad_norm):
            self.optimizer.zero_grad()
            raise TrainingError(f"the gradient of optimizer step {self.updates} is not finite ({grad_norm.item()})")
        lr = learning_rate(self.optim_config, self.updates, self.total_updates)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.updates += 1
        return {**sum_over_ranks(totals), "grad_norm": grad_norm.item(), "lr": lr}

    def full_parameters(self, model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
        """Name and whole tensor of each weight of the Hugging Face model, one at a time; all ranks take part."""
        for name, parameter in model.named_parameters():
            yield name, parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
        output, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        if output is not None and output.weight is embedding.weight:
            # Tied weights are listed once; a rollout engine that is not told about the head keeps its old copy.
            yield "lm_head.weight", embedding.weight.full_tensor()  # type: ignore[union-attr,operator]

    def state(self) -> dict[str, dict[str, Tensor] | Tensor]:
        """Weights, Adam moments and number of updates, as (sharded) tensors only, in the layout of a checkpoint."""
        assert self.optimizer is not None
        state: dict[str, dict[str, Tensor] | Tensor] = {"updates": torch.tensor(self.updates)}
        named = dict(self.module.named_parameters())
        state["model"] = {name: parameter.detach() for name, parameter in named.items()}
        for moment in ("exp_avg", "exp_avg_sq"):
            state[moment] = {
                name: self.optimizer.state[parameter].get(moment, torch.zeros_like(parameter))
                for name, parameter in named.items()
            }
        return state

    def load_state(self, state: dict[str, dict[str, Tensor] | Tensor]) -> None:
        """Takes over what `state` gave, possibly resharded; the tensors of the weights are already in place."""
        assert self.optimizer is not None
        updates, moments_1, moments_2 = state["updates"], state["exp_avg"], state["exp_avg_sq"]
        assert isinstance(updates, Tensor) and isinstance(moments_1, dict) and isinstance(moments_2, dict)
        self.updates = int(updates)
        for name, parameter in self.module.named_parameters():
            self.optimizer.state[parameter] = {
                "step": torch.tensor(float(self.updates)),
                "exp_avg": moments_1[name],
                "exp_avg_sq": moments_2[name],
            }


def _as_tuple(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def sum_over_ranks(values: dict[str, Tensor]) -> dict[str, float]:
    """Sums of scalars over all ranks, one message for all of them."""
    packed = torch.stack(list(values.values()))
    dist.all_reduce(packed)
    return dict(zip(values, packed.tolist(), strict=True))
