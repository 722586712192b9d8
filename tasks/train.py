"""Stage: a segment of reinforcement-learning steps."""

from tasks.session.session import Session
from tasks.stage import stage


@stage("train", "to step {0}")
def train(session: Session, until: int) -> int:
    """Trains from the last committed step to step `until`; returns the last committed step.

    A signal takes effect after the current step if it finishes within the grace period, otherwise immediately.
    """
    trainer = session.workers.start_trainer()
    with session.telemetry.stopping.defer_signals():
        trainer.fit(until)
    session.tracking.flush_paced(trainer.step)
    return trainer.step
