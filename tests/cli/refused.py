"""How a command refuses what it cannot do."""

from jfsdp.cli import main


def refused(capsys, *args: object) -> str:
    """Run a command that must end with status 2, nothing on stdout and one line of error; return that line.

    What is loaded before may be told in lines of its own.
    """
    assert main([*map(str, args)]) == 2
    out, err = capsys.readouterr()
    *told, line = err.splitlines()
    assert out == "" and line.startswith("jfsdp: error: ") and "error" not in "".join(told), err
    return line
