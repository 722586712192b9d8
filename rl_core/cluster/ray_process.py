"""The process in which a run's local Ray starts; run as a script, it needs nothing but Ray.

It prints the cluster's address, or why there is none. Ray's processes are its children, in a session of its own:
signals to the process group of a run's command do not reach them, so they end after the run's own process, not before.
"""

import json
import sys
from typing import Any

import ray

if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    try:
        context: Any = ray.init(address="local", log_to_driver=False, **options)
        print(json.dumps({"address": context.address_info["gcs_address"]}), flush=True)
    except Exception as error:
        print(json.dumps({"problem": str(error) or type(error).__name__}), flush=True)
    else:
        sys.stdin.read()  # until the run closes it, or has ended
    ray.shutdown()
