"""`python -m tests.servers.serve_fake FLAGS`: the real dsjax-serve with a fake engine, for tests of the process."""

import sys
import threading
import time

from dsjax.chat import ChatStrings
from servers.main import main
from tests.servers.fakes import FakeEngine


class PacedEngine(FakeEngine):
    """A token takes 2 ms, so that a stream of known length is still running when a signal comes."""

    def step(self):
        time.sleep(0.002)
        return super().step()


class NeverWarmEngine(FakeEngine):
    """A compilation that nothing can stop."""

    def warm_up(self, progress=False):
        print("warming", flush=True)
        threading.Event().wait()


def make_engine(config):
    return NeverWarmEngine() if config.model == "never-warm" else PacedEngine()


if __name__ == "__main__":
    sys.exit(main(make_engine=make_engine, read_chat_strings=lambda config: ChatStrings()))
