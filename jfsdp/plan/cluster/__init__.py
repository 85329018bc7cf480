"""Describe GPUs and clusters, compile for absent devices, and diagnose a machine."""
