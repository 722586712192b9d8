"""An MLflow server's network: a proxy before it that is down, slow or silent, or loses answers."""

import http.client
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rl_core.storage import run_files
from rl_core.storage.ledger import Ledger
from rl_core.storage.store import Store
from tasks.tracking.tracker import RUN_TAG, mlflow_client


class Proxy:
    """Passes requests on to a server on this machine, except as it is told; `seen` has the path of each."""

    def __init__(self, target: int) -> None:
        self.target, self.seen = target, list[str]()
        self.delay_s, self.slow_paths = 0.0, ""
        self.silent_paths = ""
        """What is in the path of requests that are taken and never answered; empty for none."""
        self.lost = Counter[str]()
        """How many answers to requests whose path ends so are lost, after the server has done what they ask."""
        self._server = self._listen(0)
        self.port = self._server.server_port
        self.uri = f"http://127.0.0.1:{self.port}"

    def down(self) -> None:
        """From now on connections are refused."""
        self._server.shutdown()
        self._server.server_close()

    def up(self) -> None:
        """Listens again."""
        self._server = self._listen(self.port)

    def _listen(self, port: int) -> ThreadingHTTPServer:
        server = ThreadingHTTPServer(("127.0.0.1", port), type("Handler", (_Handler,), {"proxy": self}))
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return server


class _Handler(BaseHTTPRequestHandler):
    proxy: Proxy

    def _pass(self) -> None:
        proxy = self.proxy
        proxy.seen.append(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if proxy.silent_paths and proxy.silent_paths in self.path:
            while proxy.silent_paths:
                time.sleep(0.05)
            return
        if proxy.slow_paths in self.path:
            time.sleep(proxy.delay_s)
        connection = http.client.HTTPConnection("127.0.0.1", proxy.target, timeout=60)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in ("host", "connection")}
        connection.request(self.command, self.path, body, headers)
        answer = connection.getresponse()
        content = answer.read()
        for part, left in proxy.lost.items():
            if left and self.path.partition("?")[0].endswith(part):
                proxy.lost[part] -= 1
                return
        self.send_response(answer.status)
        for name in ("Content-Type", "Content-Encoding"):
            if value := answer.getheader(name):
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _pass

    def log_message(self, format: str, *args: object) -> None:
        pass


def commit(store: Store, *steps: int) -> None:
    """Steps of a run as training commits them."""
    for step in steps:
        metrics = {"reward/mean": step / 10, "time/step": 2.0}
        Ledger(store).write(step, {"step": step, "time": 1_700_000_000.0 + step, "metrics": metrics})
        store.write_json(f"{run_files.checkpoint(step)}/state.json", {})
        store.commit_folder(run_files.checkpoint(step), {"step": step})


def mlflow_run(uri: str, name: str) -> Any:
    """The one MLflow run of a run."""
    client = mlflow_client(uri)
    experiments = [each.experiment_id for each in client.search_experiments()]
    (run,) = client.search_runs(experiments, f"tags.`{RUN_TAG}` = '{name}'")
    return run


def points(uri: str, name: str) -> dict[str, list[int]]:
    """The step of each point of each metric that a ledger has, in order: whatever is doubled is there twice."""
    run = mlflow_run(uri, name)
    history = mlflow_client(uri).get_metric_history
    return {
        key: sorted(point.step for point in history(run.info.run_id, key)) for key in run.data.metrics if "/" in key
    }
