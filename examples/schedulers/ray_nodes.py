"""The nodes of an elastic job as tasks of Ray: `ray job submit --working-dir . -- python ray_nodes.py`.

Ray places one task on each node and starts it again elsewhere when the node is lost; the job goes on meanwhile.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

import ray

MOST, SPARES, GPUS = 4, 1, 8


@ray.remote(max_retries=-1, scheduling_strategy="SPREAD")
def node(meet: str, port: int) -> int:
    variables = {"NODES": f"2:{MOST}", "SPARES": str(SPARES), "MEET": meet, "PET_MASTER_PORT": str(port)}
    # setpriv: what the task has started ends with it, also when Ray kills it.
    words = ["setpriv", "--pdeathsig", "KILL", "sh", "start.sh"]
    return subprocess.run(words, env={**os.environ, **variables}, check=False).returncode


def main() -> int:
    ray.init()
    meet, port = ray.util.get_node_ip_address(), free_port()
    with subprocess.Popen(["zeroshard", "rendezvous", "--once", "--port", str(port)]) as meeting:
        wait_for(meet, port)  # else a node of this host would serve the rendezvous itself, and end the job with it
        running = [node.options(num_gpus=GPUS).remote(meet, port) for _ in range(MOST + SPARES)]
        # The rendezvous ends with the job. A task whose node is lost may wait for another one much longer.
        while meeting.poll() is None and running:
            running = ray.wait(running, num_returns=len(running), timeout=1)[1]
        if not running:
            meeting.terminate()
    return meeting.returncode  # 0, or 75 if the ranks were told to stop and have saved


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def wait_for(host: str, port: int) -> None:
    for _ in range(600):
        try:
            return socket.create_connection((host, port)).close()
        except OSError:
            time.sleep(0.1)
    raise SystemExit(f"zeroshard rendezvous does not answer at {host}:{port}")


if __name__ == "__main__":
    sys.exit(main())
