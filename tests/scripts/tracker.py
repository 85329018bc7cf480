"""A tracker of a user's own, for the run that the tests of the script take apart."""

import os
import signal
from pathlib import Path


class Tracker:
    def __init__(self, config):
        self.file = Path(config["run_dir"], "mine.txt").open("a")  # noqa: SIM115  # closed by `close`
        self.file.write(f"{config['config']['steps']}\n")

    def write(self, record):
        self.file.write(f"{record['step']} {record['loss']}\n")

    def close(self):
        self.file.write("closed\n")
        self.file.close()


class Stopping:
    """Stops the run after step 31."""

    def __init__(self, config):
        pass

    def write(self, record):
        if record["step"] == 31:
            os.kill(os.getpid(), signal.SIGTERM)

    def close(self):
        pass
