"""A follower process whose runner computes nothing: prints what it launches. `crash` as a key makes the launch fail."""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np

from dsjax.channel import PeerLost
from dsjax.config import DistributedConfig
from dsjax.distributed import Follower


class FakeRunner:
    """Prints each launch as one line."""

    def warm_up(self, progress: bool = False) -> None:
        print("warm", flush=True)

    def launch(self, key: Any, arrays: tuple[np.ndarray, ...]) -> None:
        if key == "crash":
            raise ValueError("the device is on fire")
        print(key, [array.tolist() for array in arrays], flush=True)


def main(address: str, num_processes: str, process_id: str, peer_timeout_s: str, fact: str) -> None:
    config = DistributedConfig(
        coordinator_address=address,
        num_processes=int(num_processes),
        process_id=int(process_id),
        peer_timeout_s=float(peer_timeout_s),
    )
    follower = Follower.join(config, {"fact": fact})
    runner = FakeRunner()
    runner.warm_up()
    follower.ready()
    try:
        follower.follow(runner)
    except Exception as error:
        print(error, flush=True)
        if not isinstance(error, PeerLost):
            follower.leave(error)
        os._exit(1)
    follower.leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
