"""Number of optimizer steps of a run, and warnings about settings that do not fit it."""

from rl_core.config.schema import RunConfig


def mini_batches(config: RunConfig) -> int:
    """Mini-batches of the run; each gives one optimizer step per epoch."""
    return config.trainer.steps * (config.data.train_batch_size // config.mini_batch_size)


def actor_updates(config: RunConfig) -> int:
    """Optimizer steps of the policy in the run."""
    return mini_batches(config) * config.actor.ppo_epochs


def critic_updates(config: RunConfig) -> int:
    """Optimizer steps of the value model in the run, if it has one."""
    return mini_batches(config) * config.critic.ppo_epochs


def config_warnings(config: RunConfig) -> list[str]:
    """Valid settings that have another effect than their user probably expects."""
    updates = [("actor", config.actor.optim, actor_updates(config))]
    if config.needs_critic:
        updates.append(("critic", config.critic.optim, critic_updates(config)))
    return [
        f"{name}.optim.warmup_steps={optim.warmup_steps} is longer than the {total} optimizer steps of the run: the "
        f"learning rate ends at {optim.lr * total / optim.warmup_steps:.3g}, below {name}.optim.lr={optim.lr:g}"
        for name, optim, total in updates
        if optim.warmup_steps > total
    ]
