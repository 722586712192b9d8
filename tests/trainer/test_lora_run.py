"""A real run with adapters on two ranks: trained, pushed as adapters, committed."""

from support_training import Trained
from torch.distributed.checkpoint import FileSystemReader


def test_the_policy_leaves_its_base_and_the_engine_follows(trained: Trained) -> None:
    first, second = (record["metrics"] for record in trained.records("lora"))
    assert first["actor/grad_norm"] > 0
    assert first["kl/ref"] == 0  # training starts at the reference
    assert second["kl/ref"] > 1e-6
    for metrics in (first, second):
        assert metrics["kl/canary"] < 1e-5


def test_its_checkpoints_hold_adapters_only(trained: Trained) -> None:
    folder = trained.store("lora").local_path("checkpoints/step_000002/actor")
    assert folder is not None
    names = FileSystemReader(folder).read_metadata().state_dict_metadata
    assert len(names) == 1 + 3 * 14 and all(name == "counts" or ".lora_" in name for name in names)
