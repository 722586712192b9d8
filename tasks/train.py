"""Stage: a segment of reinforcement-learning steps."""

from tasks.session import current_session
from tasks.stage import stage


@stage("train", "up to step {0}")
def train(until: int) -> int:
    """Trains up to step `until` from the last committed step; returns the step that is committed now.

    A signal in between raises what it always does, after the step where that is soon done.
    """
    session = current_session()
    trainer = session.trainer
    with session.stopping.stepping():
        trainer.fit(until)
    session.flush_metrics(trainer.step)
    return trainer.step
