"""Adapters in the file format of PEFT."""

from jfsdp.checkpoint.foreign.peft import export_peft, read_loras

__all__ = ["export_peft", "read_loras"]
