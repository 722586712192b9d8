"""Two processes that train together and one that trains alone, on the same rows: for tests on CPUs and on GPUs."""

from pathlib import Path

from safetensors.torch import load_file
from support import LENGTHS, off_policy, policy_engine, rows_of, save, start_ranks, update, weights_of
from torch import Tensor

from rl_core.config.schema import ActorConfig, LoraConfig, OptimConfig
from rl_core.storage.store import Store
from rl_core.training.engine import TrainEngine
from rl_core.training.mesh import RankMesh

SCRIPT = Path(__file__).parent / "training" / "two_ranks.py"
MAX_TOKENS = 21
OPTIM = OptimConfig(lr=1e-3, lr_schedule="cosine", grad_clip=1e9, weight_decay=0.1)
LORA = LoraConfig(rank=3, target_modules=("all-linear",))
CONFIG = ActorConfig(loss_agg_mode="seq-mean-token-mean", entropy_coef=0.01, kl_loss_coef=0.1)


class Alone:
    """A world of one rank on the same rows."""

    def __init__(self, model: Path, rank_mesh: RankMesh) -> None:
        self.engine: TrainEngine = policy_engine(model, rank_mesh, OPTIM, MAX_TOKENS)
        self.rows = off_policy(self.engine, rows_of(LENGTHS))

    def update(self) -> dict[str, float]:
        tokens = self.rows.batch["response_mask"].sum().item()
        return update(self.engine, self.rows, tokens, len(self.rows), CONFIG)


class Outcome:
    """What both worlds came to: a folder with the two ranks' files, and the lone rank's results in memory."""

    def __init__(self, folder: Path, model: Path, rank_mesh: RankMesh) -> None:
        self.folder, self.store = folder, Store(str(folder))
        alone = Alone(model, rank_mesh)
        self.metrics, self.first = alone.update(), weights_of(alone.engine)
        save(alone.engine, self.store, "alone")
        alone.update()
        self.second = weights_of(alone.engine)
        start_ranks(SCRIPT, 2, model, folder, rank_mesh.device.type)

    def read(self, name: str) -> dict[str, Tensor]:
        return load_file(self.folder / f"{name}.safetensors")
