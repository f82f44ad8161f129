"""Reading MLflow back, and a server that speaks as much of its REST interface as a run needs."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from urllib.parse import parse_qs, urlsplit


def logged(uri, name="rayfed"):
    """Every run of an experiment in the order they began; fails on a step that is there twice."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name(name)
    runs = []
    for run in client.search_runs([experiment.experiment_id], order_by=["attributes.start_time"]):
        metrics = {}
        for key in run.data.metrics:
            for metric in client.get_metric_history(run.info.run_id, key):
                assert (key, metric.step) not in metrics
                metrics[key, metric.step] = metric.value
        info = {"name": run.info.run_name, "status": run.info.status, "params": run.data.params}
        runs.append(SimpleNamespace(metrics=metrics, **info))
    return runs


class FakeServer:
    """One run of one experiment over HTTP; it stops listening after so many rounds."""

    def __init__(self, before=None):
        self.sent = before.sent if before else []
        self.experiment = ""
        self.dies_after = None
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.address = f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self):
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        return self

    def __exit__(self, *_):
        self.die()

    def die(self):
        self._http.shutdown()
        self._http.server_close()

    def metrics(self):
        found = {}
        for metric in self.sent:
            assert (metric["key"], metric["step"]) not in found
            found[metric["key"], metric["step"]] = metric["value"]
        return found

    def answer(self, what, asked):
        run = {
            "info": {"run_id": "r1", "status": "RUNNING", "lifecycle_stage": "active", "experiment_id": "7"}
        }
        if what == "experiments/get-by-name":
            self.experiment = asked["experiment_name"]
            return {
                "experiment": {"experiment_id": "7", "name": self.experiment, "lifecycle_stage": "active"}
            }
        if what == "metrics/get-history":
            return {"metrics": [m for m in self.sent if m["key"] == asked["metric_key"]]}
        if what == "runs/log-batch":
            self.sent += asked.get("metrics", [])
            steps = {metric["step"] for metric in self.sent}
            if self.dies_after is not None and len(steps) == self.dies_after:
                threading.Thread(target=self.die).start()
            return {}
        return {"run": run, "run_info": run["info"]}

    def _handler(fake):  # noqa: N805
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                asked = {key: value for key, (value,) in parse_qs(urlsplit(self.path).query).items()}
                self._answer(asked)

            def do_POST(self):
                self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def _answer(self, asked):
                what = urlsplit(self.path).path.split("/mlflow/")[-1]
                body = json.dumps(fake.answer(what, asked)).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        return Handler
