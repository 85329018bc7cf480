"""The training script's main() for one command line after another, in a process of two devices that starts once.

What it compiled for one run it knows in the next (`compile_once`): so a run takes what its steps take.
"""

import contextlib
import importlib.util
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.compiling import compile_once

DEVICES = 2


def serve() -> None:
    path = Path(__file__).parents[2] / "scripts" / "train.py"
    spec = importlib.util.spec_from_file_location("train_script", path)
    assert spec is not None and spec.loader is not None
    script: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.configure_xla(simulate_devices=DEVICES)
    script.configure_xla = lambda **_: None  # before JAX starts, so once; all command lines ask for the same
    compile_once()
    for line in sys.stdin:
        cwd, options, told = json.loads(line)
        out, err = io.StringIO(), io.StringIO()
        os.environ.update(told)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), contextlib.chdir(cwd or os.getcwd()):
            status = script.main(options)
        for name in told:
            del os.environ[name]
        print(json.dumps([status, out.getvalue(), err.getvalue()]), flush=True)


if __name__ == "__main__":
    serve()
