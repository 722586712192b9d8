"""Stage: a segment of reinforcement-learning steps."""

from tasks.session.session import Session
from tasks.stage import stage


@stage("train", "up to step {0}")
def train(session: Session, until: int) -> int:
    """Trains up to step `until` from the last committed step; returns the step that is committed now.

    A signal takes effect after the current step if it finishes within the grace period, otherwise immediately.
    """
    trainer = session.workers.start_trainer()
    with session.telemetry.stopping.stepping():
        trainer.fit(until)
    session.tracking.flush_paced(trainer.step)
    return trainer.step
