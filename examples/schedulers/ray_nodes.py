"""The nodes of an elastic job as tasks of Ray: `ray job submit --working-dir . -- python ray_nodes.py`.

Ray places one task on each node and starts it again elsewhere when the node is lost; the job goes on meanwhile.
"""

from __future__ import annotations

import os
import subprocess

import ray

MOST, SPARES, GPUS = 4, 1, 8


@ray.remote(max_retries=-1, retry_exceptions=True, scheduling_strategy="SPREAD")
def node(meet: str) -> None:
    environment = {**os.environ, "NODES": f"2:{MOST}", "SPARES": str(SPARES), "MEET": meet}
    subprocess.run(["sh", "start.sh"], env=environment, check=True)


def main() -> None:
    ray.init()
    with subprocess.Popen(["zeroshard", "rendezvous"]) as meeting:
        try:
            meet = ray.util.get_node_ip_address()
            ray.get([node.options(num_gpus=GPUS).remote(meet) for _ in range(MOST + SPARES)])
        finally:
            meeting.terminate()


if __name__ == "__main__":
    main()
