"""The paths of a run's folder, relative to it; README has the same table in words."""

MANIFEST = "manifest.json"
"""File that commits the folder it is in: written last, with the size and the checksum of every other file."""

RUN = "run.json"
"""What the run is: name, recipe, resolved settings and their origins."""
STATUS = "status.json"
"""What the run is doing now."""
NOTES = "notes.json"
"""Warnings that the report shows: a list of {time, text}."""
REPORT = "report.html"

LEASES = "leases"
"""Current and past owners of the run."""
LEDGER = "ledger"
"""One record a step; `Ledger` knows their names."""

DATA = "data"
"""Folder of the committed rows."""
DATA_REPORT = f"{DATA}/report.json"
DATA_PAGE = f"{DATA}/report.html"
DROPPED_ROWS = f"{DATA}/dropped.jsonl"

WARM_START = "warm_start"
"""Folder of the policy after the supervised steps, in Hugging Face form."""

CHECKPOINTS = "checkpoints"
ROLLOUTS_AHEAD = "rollouts.safetensors"
"""File of a checkpoint with the rollouts of the next step, where these were made ahead of training."""
ROLLOUTS = "rollouts"
FAILED = "failed"
"""What a step that failed trained on, until a later attempt commits the step."""

EVALUATION = "evaluation"
CHAMPION = f"{EVALUATION}/champion.json"
"""Scores of the champion that the policy was compared with, with its `version`."""
RELOAD = f"{EVALUATION}/reload.json"
DECISION = f"{EVALUATION}/decision.json"
"""What the gate decided, check by check."""
CANARY = f"{EVALUATION}/canary.json"
"""Fixed tokens with the trainer's log-probs of them, for the reload check."""


def step_name(step: int) -> str:
    """Name of the folder (or, with an ending, the file) of a step: `step_000012`."""
    return f"step_{step:06d}"


def rows_part(split: str, number: int) -> str:
    """A part of the rows of a split, `train` or `val`."""
    return f"{rows(split)}/part_{number:05d}.parquet"


def rows(split: str) -> str:
    """Folder of the rows of a split."""
    return f"{DATA}/{split}"


def checkpoint(step: int) -> str:
    """Folder of the checkpoint of a step."""
    return f"{CHECKPOINTS}/{step_name(step)}"


def rollouts(step: int) -> str:
    """File with the trajectories of a step."""
    return f"{ROLLOUTS}/{step_name(step)}.parquet"


def failed_rollouts(step: int) -> str:
    """File with the trajectories of a step that failed."""
    return f"{FAILED}/{step_name(step)}.parquet"


def failed_error(step: int) -> str:
    """File with the error of a step that failed and its metrics so far; written after `failed_rollouts`."""
    return f"{FAILED}/{step_name(step)}.json"


def evaluation(step: int) -> str:
    """File with the held-out scores of the policy at a step."""
    return f"{EVALUATION}/{step_name(step)}.json"


def export(step: int) -> str:
    """Folder of the policy at a step, in Hugging Face form."""
    return f"export/{step_name(step)}"
