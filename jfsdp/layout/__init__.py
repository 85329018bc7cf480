"""Sharding as data, without collectives."""
