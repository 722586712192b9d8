"""Stage: the held-out score of the policy at a step."""

from typing import Any

from rl_core import evaluation
from rl_core.errors import TrainingError
from rl_core.storage import step_name
from tasks.session import current_session
from tasks.stage import stage


def result_file(step: int) -> str:
    """Where the evaluation of a step is kept in the run's store."""
    return f"evaluation/{step_name(step)}.json"


@stage("evaluate", "the policy at step {0}")
def evaluate(step: int) -> dict[str, float]:
    """Greedy and sampled score at the step that training has reached, made once."""
    session = current_session()
    if not session.store.exists(result_file(step)):
        trainer = session.trainer
        if trainer.step != step:
            raise TrainingError(f"the policy to evaluate is that of step {step}, training is at step {trainer.step}")
        result = evaluation.evaluate(session.config, session.val_rows, session.roles, session.tokenizer)
        session.store.write_json(result_file(step), result)
    result = session.store.read_json(result_file(step))
    session.console.note(f"greedy {result['greedy']:.3f}  sampled {result['sampled']:.3f}  on {result['rows']} rows")
    return {"greedy": result["greedy"], "sampled": result["sampled"]}


def samples_of(step: int) -> list[dict[str, Any]]:
    """A few held-out answers at a step that was evaluated."""
    samples: list[dict[str, Any]] = current_session().store.read_json(result_file(step))["samples"]
    return samples
