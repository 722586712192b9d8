"""What is describe of a process from the stacks that it wrote."""

import pytest

from rl_core.cluster.stall import Seen, describe, waits_for_others

LIB = "/usr/lib/python3.11"
SITE = f"{LIB}/site-packages"
IDLE = f"""Thread 0x00007f7392bff6c0 (most recent call first):
  File "{LIB}/threading.py", line 982 in run
  File "{LIB}/threading.py", line 1002 in _bootstrap
"""
HOST = f"""  File "/app/rl_core/cluster/host.py", line 33 in call
  File "{SITE}/ray/_private/worker.py", line 900 in main_loop
"""
COLLECTIVE = f"""Current thread 0x00007f7392bff6c1 (most recent call first):
  File "{SITE}/torch/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "{SITE}/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/app/rl_core/cluster/training_workers.py", line 98 in _train
  File "/app/rl_core/cluster/training_workers.py", line 233 in update_actor
{HOST}"""
WAITING_LOOP = f"""Thread 0x00007f7392bff6c1 (most recent call first):
  File "{LIB}/selectors.py", line 468 in select
  File "{LIB}/asyncio/base_events.py", line 641 in run_until_complete
  File "/app/rl_core/cluster/training_workers.py", line 211 in generate_sequences
{HOST}"""
TASK = f"""Thread 0x00007f7392bff6c1 (most recent call first):
  File "{SITE}/vllm/core.py", line 468 in step
  File "/app/rl_core/rollout/engine/request_queue.py", line 141 in _step
  File "{LIB}/asyncio/events.py", line 80 in _run
  File "/app/rl_core/cluster/training_workers.py", line 211 in generate_sequences
{HOST}"""
COMPILED_LOOP = f"""Thread 0x00007f7392bff6c1 (most recent call first):
  File "{SITE}/vllm/core.py", line 468 in step
  File "/app/rl_core/rollout/engine/request_queue.py", line 141 in _step
  File "{LIB}/threading.py", line 982 in run
"""


@pytest.mark.parametrize(
    ("stacks", "words"),
    [
        (COLLECTIVE, "waits for other ranks in all_reduce (distributed_c10d.py:3252) < "
                     "_train (training_workers.py:98) < update_actor (training_workers.py:233)"),
        (WAITING_LOOP, "is in select (selectors.py:468) < generate_sequences (training_workers.py:211)"),
        (TASK, "is in step (core.py:468) < _step (request_queue.py:141)"),
        (COMPILED_LOOP, "is in step (core.py:468) < _step (request_queue.py:141)"),
        ("", "waits for the next call or awaits an operation in its event loop"),
    ],
    ids=["collective", "waiting loop", "task", "compiled loop", "nothing"],
)  # fmt: skip
def test_the_thread_that_works_is_told_of(stacks: str, words: str) -> None:
    text = f"{IDLE}\n{stacks}"
    assert describe(Seen(text)) == words
    assert waits_for_others(text) == (stacks == COLLECTIVE)


def test_who_cannot_be_asked_is_described() -> None:
    assert describe(Seen("", "is stopped by a signal")) == "is stopped by a signal"
