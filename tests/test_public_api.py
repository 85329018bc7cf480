"""What users call and type, against tests/public_api.txt: a change of it is a decision.

`python -m tests.test_public_api` writes the file anew; docs/versions.md says what such a change needs.
"""

import dataclasses
import enum
import inspect
from pathlib import Path

import jfsdp
import jfsdp.testing
from jfsdp.cli.commands import COMMANDS, COMMANDS_OF
from jfsdp.trainer.parse import write
from jfsdp.trainer.run.config import TrainConfig

FROZEN = Path(__file__).with_name("public_api.txt")
NAMESPACES = (jfsdp, jfsdp.checkpoint, jfsdp.optim, jfsdp.peft, jfsdp.plan, jfsdp.trainer, jfsdp.testing)
PLAIN = (int, float, str, bool, type(None), tuple)


def show_call(value):
    """Write names, kinds and defaults of parameters; annotations are for a type checker."""
    if inspect.isclass(value) and issubclass(value, enum.Enum):
        return ""
    signature = inspect.signature(value)
    given = [
        one.replace(
            annotation=inspect.Parameter.empty,
            default=one.default if isinstance(one.default, PLAIN) or one.default is one.empty else ...,
        )
        for one in signature.parameters.values()
    ]
    return str(inspect.Signature(given))


def show_names():
    for module in NAMESPACES:
        for name in sorted(getattr(module, "__all__", None) or names_of(module)):
            value = getattr(module, name)
            yield f"{module.__name__}.{name}{show_call(value) if callable(value) else ''}"
            if inspect.isclass(value):
                own = {key: found for key, found in vars(value).items() if not key.startswith("_")}
                for key, found in sorted(own.items()):
                    call = show_call(getattr(value, key)) if callable(getattr(value, key)) else ""
                    if callable(found) or isinstance(found, (property, classmethod, staticmethod)):
                        yield f"{module.__name__}.{name}.{key}{call}"


def names_of(module):
    return [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]


def show_options():
    kinds = {"train.py": TrainConfig} | {f"jfsdp {name}": kind for name, kind in COMMANDS.items()}
    for name, kind in list(kinds.items()):
        kinds |= {f"{name} {inner}": of for inner, of in COMMANDS_OF.get(kind, {}).items()}
    for name, kind in kinds.items():
        for field in dataclasses.fields(kind):
            default = "" if field.default is dataclasses.MISSING else f" {write(field.default)}"
            yield f"{name} --{field.name.replace('_', '-')}{default}"


def show_all():
    return "\n".join([*show_names(), *show_options()]) + "\n"


def test_the_public_api_is_what_was_decided():
    before, now = (text.splitlines() for text in (FROZEN.read_text(), show_all()))
    assert sorted(set(before) ^ set(now)) == [], "write tests/public_api.txt anew, and see docs/versions.md"


if __name__ == "__main__":
    FROZEN.write_text(show_all())
