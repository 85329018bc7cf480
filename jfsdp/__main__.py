"""`python -m jfsdp`: the same as the command `jfsdp`."""

import sys

from jfsdp.cli import main

if __name__ == "__main__":
    sys.exit(main())
