"""Paths of the files in a run's folder, relative to it; the README describes them in a table."""

import re

MANIFEST = "manifest.json"
"""File that commits its folder: written last, with the size and checksum of every other file."""

RUN = "run.json"
"""Description of the run: name, recipe, resolved settings and their origins."""
STATUS = "status.json"
"""Current status of the run."""
NOTES = "notes.json"
"""Warnings shown in the report: a list of {time, text, key}; a key identifies warnings whose text has numbers."""
REPORT = "report.html"

LEASES = "leases"
"""Current and past owners of the run."""
LEDGER = "ledger"
"""Folder with one record per step; see `Ledger`."""

DATA = "data"
"""Folder of the committed rows."""
DATA_REPORT = f"{DATA}/report.json"
DATA_PAGE = f"{DATA}/report.html"
DROPPED_ROWS = f"{DATA}/dropped.jsonl"

WARM_START = "warm_start"
"""Folder of the policy after the supervised steps, in Hugging Face format."""

CHECKPOINTS = "checkpoints"
IN_LEASE = re.compile(r"(lease_\d{6,})/")
"""Start of the path of a checkpoint's file in a `lease_folder`."""
ROLLOUTS_AHEAD = "rollouts.safetensors"
"""File of a checkpoint with the rollouts of the next step, if these were generated ahead of training."""
ROLLOUTS = "rollouts"
PROFILE = "profile"
FAILED = "failed"
"""Folder with the training data of a failed step, kept until a later attempt commits the step."""

EVALUATION = "evaluation"
CHAMPION = f"{EVALUATION}/champion.json"
"""Scores of the champion that the policy was compared with, and its `version`."""
RELOAD = f"{EVALUATION}/reload.json"
CONSTANT = f"{EVALUATION}/constant.json"
"""Score of the best constant answer, and the hash of the rows it was computed on."""
DECISION = f"{EVALUATION}/decision.json"
"""The gate's decision and the result of each check."""
CANARY = f"{EVALUATION}/canary.json"
"""Fixed tokens with the trainer's log-probs, for the reload check."""


def step_name(step: int) -> str:
    """Name of the folder (or, with a suffix, the file) of a step: `step_000012`."""
    return f"step_{step:06d}"


def rows_part(split: str, number: int) -> str:
    """File with one part of the rows of a split, `train` or `val`."""
    return f"{rows(split)}/part_{number:05d}.parquet"


def rows(split: str) -> str:
    """Folder of the rows of a split."""
    return f"{DATA}/{split}"


def checkpoint(step: int) -> str:
    """Folder of the checkpoint of a step."""
    return f"{CHECKPOINTS}/{step_name(step)}"


def lease_folder(number: int) -> str:
    """Folder of a checkpoint with the files written under the lease of this number; the checkpoint itself without one.

    A former holder's workers may still be writing: their files never have the names of the current holder's.
    """
    return f"lease_{number:06d}" if number else ""


def rollouts(step: int) -> str:
    """File with the trajectories of a step."""
    return f"{ROLLOUTS}/{step_name(step)}.parquet"


def profile(step: int) -> str:
    """Folder with each training rank's profile of a step."""
    return f"{PROFILE}/{step_name(step)}"


def failed_rollouts(step: int) -> str:
    """File with the trajectories of a failed step."""
    return f"{FAILED}/{step_name(step)}.parquet"


def failed_error(step: int) -> str:
    """File with the error and the metrics so far of a failed step; written after `failed_rollouts`."""
    return f"{FAILED}/{step_name(step)}.json"


def evaluation(step: int) -> str:
    """File with the held-out scores of the policy at a step."""
    return f"{EVALUATION}/{step_name(step)}.json"


def export(step: int) -> str:
    """Folder of the policy at a step, in Hugging Face format."""
    return f"export/{step_name(step)}"
